"""The front door: `attention`, its parts and its weights."""
