"""Stacks of matrix products by cuBLAS: 16-bit factors are summed in float32, float32 ones exactly.

cuBLAS is told so, whatever its handle was left at: no TF32, no sums of parts in 16 bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import cupy
import numpy as np

__all__ = ["Matrices", "multiply", "why_no_cublas"]

TYPES = {"float32": 0, "float64": 1, "float16": 2, "bfloat16": 14}  # cudaDataType
COMPUTE_32F, COMPUTE_64F = 68, 70  # cublasComputeType_t
NO_TRANSPOSE, TRANSPOSE = 0, 1  # cublasOperation_t
DEFAULT_ALGORITHM = -1
# CUBLAS_DEFAULT_MATH with CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION
EXACT_MATH = 16


class Matrices(NamedTuple):
    """A stack of matrices in device memory, row after row.

    Attributes
    ----------
    pointer : int
        The address of the first number.
    pitch, step : int
        How many numbers from one row to the next, and from one matrix to the next.
    dtype : str
        Of what they are.
    """

    pointer: int
    pitch: int
    step: int
    dtype: str

    def at(self, matrix: int, row: int) -> Matrices:
        """Return the stack from a row of a matrix on."""
        offset = matrix * self.step + row * self.pitch
        return self._replace(pointer=self.pointer + offset * SIZES[self.dtype])


SIZES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}


def why_no_cublas() -> str | None:
    """Return why cuBLAS cannot be called here, or None."""
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
    transposed: bool = False,
    factor: float = 1.0,
) -> None:
    """Write factor · x · y to `out`, for every matrix of the stacks.

    Parameters
    ----------
    x, y, out : Matrices
        The factors, of one dtype, and where the products go.
    shape : tuple of int
        How many matrices; the rows and columns of a product; the length of the sums.
    transposed : bool
        Whether the rows of `y` are the columns of the factor.
    factor : float
        What multiplies each product, not 0.
    """
    count, rows, columns, inner = shape
    wide = out.dtype == "float64"
    scalars = np.array([factor, 0], "float64" if wide else "float32")
    one, zero = scalars.ctypes.data, scalars.ctypes.data + scalars.itemsize
    cublas, handle = _cublas(), cupy.cuda.device.get_cublas_handle()
    with _exact_math(cublas, handle):
        # cuBLAS counts column by column, to which a matrix row by row is its transpose: it is
        # asked for outᵀ = yᵀ · xᵀ.
        cublas.gemmStridedBatchedEx(
            handle, TRANSPOSE if transposed else NO_TRANSPOSE, NO_TRANSPOSE,
            columns, rows, inner,
            one,
            y.pointer, TYPES[y.dtype], y.pitch, y.step,
            x.pointer, TYPES[x.dtype], x.pitch, x.step,
            zero,
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
