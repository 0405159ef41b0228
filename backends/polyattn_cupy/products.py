"""Stacks of matrix products by cuBLAS, with 16-bit factors summed in float32.

TF32 and partial sums in 16 bits are off, whatever math mode CuPy's handle is in.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import cupy
import numpy as np

TYPES = {"float32": 0, "float64": 1, "float16": 2, "bfloat16": 14}  # cudaDataType
COMPUTE_32F, COMPUTE_64F = 68, 70  # cublasComputeType_t
NO_TRANSPOSE, TRANSPOSE = 0, 1  # cublasOperation_t
DEFAULT_ALGORITHM = -1
# CUBLAS_DEFAULT_MATH with CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION
EXACT_MATH = 16


class Matrices(NamedTuple):
    """A stack of matrices in device memory, row after row."""

    pointer: int  # the address of the first element
    pitch: int  # elements from one row to the next
    step: int  # elements from one matrix to the next
    dtype: str

    def at(self, matrix: int, row: int) -> Matrices:
        """Return the stack that begins at a row of a matrix."""
        offset = matrix * self.step + row * self.pitch
        return self._replace(pointer=self.pointer + offset * SIZES[self.dtype])

    def holding(self, dtype: str) -> Matrices:
        """Return the stack of narrower numbers that fill the first part of each row."""
        narrower = SIZES[self.dtype] // SIZES[dtype]
        return Matrices(self.pointer, self.pitch * narrower, self.step * narrower, dtype)


SIZES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}


def why_no_cublas() -> str | None:
    """Return why cuBLAS cannot be used on this machine, or None."""
    try:
        _cublas()
    except ImportError as error:
        return f"cuBLAS cannot be loaded: {str(error).splitlines()[0]}"
    return None


def _cublas() -> Any:
    from cupy_backends.cuda.libs import cublas

    return cublas


def multiply(
    x: Matrices,
    y: Matrices,
    out: Matrices,
    shape: tuple[int, int, int, int],
    *,
    transposed: str = "",
    factor: float = 1.0,
    adds: bool = False,
) -> None:
    """Write factor · x · y to `out` for every matrix, or add it if `adds`."""
    # `transposed` names a factor, "x", "y" or neither. `shape` is the number of matrices, the rows
    # and columns of a product, and the length of its sums. `factor` must not be 0, for which cuBLAS
    # reads neither x nor y.
    count, rows, columns, inner = shape
    wide = out.dtype == "float64"
    scalars = np.array([factor, float(adds)], "float64" if wide else "float32")
    alpha, beta = scalars.ctypes.data, scalars.ctypes.data + scalars.itemsize
    cublas, handle = _cublas(), cupy.cuda.device.get_cublas_handle()
    with _exact_math(cublas, handle):
        # cuBLAS stores matrices column by column, so it sees their transposes: outᵀ = yᵀ · xᵀ.
        cublas.gemmStridedBatchedEx(
            handle,
            TRANSPOSE if transposed == "y" else NO_TRANSPOSE,
            TRANSPOSE if transposed == "x" else NO_TRANSPOSE,
            columns, rows, inner,
            alpha,
            y.pointer, TYPES[y.dtype], y.pitch, y.step,
            x.pointer, TYPES[x.dtype], x.pitch, x.step,
            beta,
            out.pointer, TYPES[out.dtype], out.pitch, out.step,
            count, COMPUTE_64F if wide else COMPUTE_32F, DEFAULT_ALGORITHM,
        )  # fmt: skip


@contextmanager
def _exact_math(cublas: Any, handle: int) -> Iterator[None]:
    before = cublas.getMathMode(handle)
    cublas.setMathMode(handle, EXACT_MATH)
    try:
        yield
    finally:
        cublas.setMathMode(handle, before)
