"""Attention kernels for CPUs in C++, which join the backends' own. This module imports no array library."""
