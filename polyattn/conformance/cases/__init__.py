"""The calls that kernels are held to."""
