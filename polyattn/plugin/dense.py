"""The formula as a kernel: a base class for kernels that change one step of it."""

from __future__ import annotations

from polyattn._kernels.dense_kernel import Dense

__all__ = ["Dense"]
__dir__ = __all__.copy
