"""Fewer passes over memory, on all threads, where NumPy makes a pass for each step of a formula.

Rows are taken in blocks of which the steps stay in a core's cache. Other libraries fuse the steps
or spread the work themselves: for them the formula is computed as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from polyattn.arrays import Array, library_of
from polyattn.dispatch.transfer import backend_of

__all__ = ["by_rows", "mapped"]

# Of what each step reads and writes; a core's own cache is several times as large.
BLOCK_BYTES = 2**18
# Rows of a product: so few that threads share them, so many that BLAS is as fast as on all.
BLOCK_ROWS = 256


def by_rows(function: Callable[[Array], Array], x: Array) -> Array:
    """Return a function of each row of `x`, its last axis, and of no other row.

    Parameters
    ----------
    function : callable
        From rows (..., n) to as many of the same length.
    x : Array
        Shape (..., n).
    """
    if library_of(x).name != "numpy" or x.nbytes <= BLOCK_BYTES:
        return function(x)

    def write(rows: Array, out: Array) -> None:
        out[...] = function(rows)

    most = max(1, BLOCK_BYTES // (x.shape[-1] * x.itemsize))
    dtype = function(x.reshape(-1, x.shape[-1])[:1]).dtype
    return _in_blocks(write, x, (x.shape[-1], dtype), most)


def mapped(x: Array, weight: Array, bias: Array | None) -> Array:
    """Return x · weight + bias, of shapes (..., inputs), (inputs, outputs) and (outputs,)."""
    library = library_of(x)
    matmul = library.xp.matmul
    if library.name != "numpy" or x.dtype != weight.dtype or x.size <= BLOCK_ROWS * x.shape[-1]:
        y = matmul(x, weight)
        return y if bias is None else y + bias

    def write(rows: Array, out: Array) -> None:
        matmul(rows, weight, out=out)
        if bias is not None:
            out += bias

    return _in_blocks(write, x, (weight.shape[1], x.dtype), BLOCK_ROWS)


def _in_blocks(
    write: Callable[[Array, Array], None], x: Array, kind: tuple[int, Any], most: int
) -> Array:
    """Return rows of a width and dtype, written by blocks of no more than so many rows of `x`."""
    width, dtype = kind
    rows = x.reshape(-1, x.shape[-1])
    out = library_of(x).xp.empty((len(rows), width), dtype=dtype)
    step = -(-len(rows) // -(-len(rows) // most))

    def work(start: int) -> None:
        write(rows[start : start + step], out[start : start + step])

    backend_of(x).each(work, range(0, len(rows), step))
    return out.reshape(*x.shape[:-1], width)
