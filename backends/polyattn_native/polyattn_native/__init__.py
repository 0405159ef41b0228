"""Attention kernels for CPUs in C++, which join those of other backends."""
