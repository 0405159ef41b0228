"""The calls that kernels are checked with."""
