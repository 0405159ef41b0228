"""Change the last axes of arrays, whose others may be of unknown length."""

from __future__ import annotations

from polyattn.arrays import Array, library_of
from polyattn.dispatch.transfer import backend_of

__all__ = ["rows_of", "with_last_axes"]


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
