"""The part of `flash_attn.layers` that code imports."""
