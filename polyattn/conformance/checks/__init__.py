"""Checks of a backend's kernels."""
