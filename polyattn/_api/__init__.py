"""The public functions: attention, partial attention, its weights, and explain."""
