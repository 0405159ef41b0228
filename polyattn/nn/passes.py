"""Compute row-wise formulas block by block on all threads, in NumPy.

NumPy passes over memory once for each step of a formula; a block of rows stays in the caches.
Other libraries fuse the steps or use all threads themselves, so their arrays are not split.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from polyattn._base.arrays import Array, library_of
from polyattn._base.same_bits import keeps_bits
from polyattn._dispatch.products import multiply
from polyattn._dispatch.transfer import backend_of
from polyattn.nn.shapes import broadcastable

# The bytes that a step reads and writes at a time: few enough for the caches, and so many that
# threads seldom wait for Python's lock between the steps.
BLOCK_BYTES = 2**19
# Rows of a matrix product: few enough to share among threads, enough to keep BLAS at full speed.
BLOCK_ROWS = 256


def by_rows(function: Callable[[Array], Array], x: Array) -> Array:
    """Apply a function that maps each row of `x`, its last axis, to a row of the same length."""
    if not _is_numpys(x) or x.nbytes <= BLOCK_BYTES:
        return function(x)
    row = function(x.reshape(-1, x.shape[-1])[:1])

    def write(rows: Array, out: Array) -> None:
        out[...] = function(rows)

    max_rows = max(1, BLOCK_BYTES // (x.shape[-1] * x.itemsize))
    return _in_blocks(write, x, (x.shape[-1], row.dtype), max_rows)


def affine(x: Array, weight: Array, bias: Array | None) -> Array:
    """Return x · weight + bias, of shapes (..., inputs), (inputs, outputs) and (outputs,)."""
    if keeps_bits():
        return multiply(x, weight, bias)
    library, is_one = library_of(x), x.dtype == weight.dtype
    if library.name != "numpy" or x.size <= BLOCK_ROWS * x.shape[-1] or not is_one:
        # The namespace of torch looks at the dtypes, in the time of three small products.
        is_direct = is_one and library.name == "torch"
        y = x @ weight if is_direct else library.xp.matmul(x, weight)
        return y if bias is None else y + broadcastable(y, bias)

    def write(rows: Array, out: Array) -> None:
        library.xp.matmul(rows, weight, out=out)
        if bias is not None:
            out += bias

    return _in_blocks(write, x, (weight.shape[1], x.dtype), BLOCK_ROWS)


def _is_numpys(array: Array) -> bool:
    return library_of(array).name == "numpy"


def _in_blocks(
    write: Callable[[Array, Array], None], x: Array, output: tuple[int, Any], max_rows: int
) -> Array:
    """Return rows of the output's width and dtype, written for blocks of `max_rows` at most."""
    width, dtype = output
    rows = x.reshape(-1, x.shape[-1])
    out = library_of(x).xp.empty((len(rows), width), dtype=dtype)
    step = -(-len(rows) // -(-len(rows) // max_rows))

    def work(start: int) -> None:
        write(rows[start : start + step], out[start : start + step])

    backend_of(x).each(work, range(0, len(rows), step))
    return out.reshape(*x.shape[:-1], width)
