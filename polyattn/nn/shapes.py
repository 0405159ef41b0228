"""Change the last axes of arrays, and read and replace rows, where lengths may be unknown."""

from __future__ import annotations

import sys

from polyattn._base.arrays import Array, index_range, library_of, with_rank
from polyattn._base.tracing import is_compiling
from polyattn._dispatch.transfer import backend_of


def broadcastable(x: Array, parameter: Array) -> Array:
    """Return a parameter that broadcasts with `x`: JAX can be told to refuse another rank."""
    if library_of(x).name != "jax":
        return parameter
    # Not always, because JAX takes as long to add axes as for a small product.
    allowed = sys.modules["jax"].config.jax_numpy_rank_promotion == "allow"
    return parameter if allowed else with_rank(parameter, len(x.shape))


def with_last_axes(x: Array, number: int, *lengths: int) -> Array:
    """Return `x` with axes of these lengths in place of its last ones, of that number."""
    lead = tuple(x.shape[: len(x.shape) - number])
    if None in lead:
        return backend_of(x).reshape_last(x, number, lengths)
    return library_of(x).xp.reshape(x, (*lead, *lengths))


def rows_of(table: Array, ids: Array) -> Array:
    """Return the rows of a table at ids of any shape (...), shape (..., size)."""
    if None in ids.shape:
        return backend_of(table).rows(table, ids)
    xp = library_of(table).xp
    rows = xp.take(table, xp.reshape(ids, (-1,)), axis=0)
    return xp.reshape(rows, (*ids.shape, table.shape[1]))


def with_rows(memory: Array, rows: Array, at: int | Array) -> Array:
    """Return `memory` with `rows` in place of those from `at` on."""
    if rows.shape[-2] == 0:
        return memory
    if library_of(memory).traced and not is_compiling():
        written = backend_of(memory).with_rows(memory, rows, at)
        if written is not None:
            return written
    xp = library_of(memory).xp
    indices = index_range(xp, 0, memory.shape[-2], memory) - at
    new = (indices >= 0) & (indices < rows.shape[-2])
    spread = xp.take(rows, xp.where(new, indices, xp.zeros_like(indices)), axis=-2)
    return xp.where(with_rank(new[:, None], len(memory.shape)), spread, memory)


def as_array(length: int | Array, like: Array) -> Array:
    """Return a length as an array without axes: torch.compile makes no condition of it."""
    xp = library_of(like).xp
    return xp.reshape(index_range(xp, 0, 1, like) + length, ())
