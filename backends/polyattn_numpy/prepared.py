"""A call with its arrays as pieces are cut from them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from polyattn.plugin import Array, Indices, Mask, Operands, Problem, Span, combined_mask
from polyattn_numpy.blocks import Piece
from polyattn_numpy.mask_table import Table

__all__ = ["Call", "call_of"]


class Call(NamedTuple):
    """A call, its arrays with the axes (outer..., batch, G, H/G, length, size).

    Key and value have no axis H/G; the bias has length 1 along what it broadcasts.
    """

    problem: Problem
    x: Operands
    xp: Any
    query: Array
    key: Array
    value: Array
    bias: Array | None
    tile: int
    mask: Mask | None  # all that masks
    table: Table | None  # and which of the tiles it leaves, where that is worth knowing
    check: Callable[[], None]  # raises where nobody waits for the result any more

    def cut(self, array: Array, piece: Piece, *spans: Span | None) -> Array:
        """Return a view of what of an array belongs to a piece, and to spans of its last axes."""
        return array[piece.within(array.shape, *spans)]

    def indices(self, piece: Piece, heads: Span, rows: Span, columns: Span) -> Indices:
        """Return the indices of some key/value heads, rows and keys of a piece."""
        batch = self.problem.batch or (1,)
        members = self.problem.heads // self.problem.key_heads
        flat = 0
        for axis, index in zip(batch, piece.outer, strict=False):
            flat = flat * axis + index
        first = flat * batch[-1] + piece.batch.start
        items = Span(first, first + piece.batch.length)
        heads = Span(heads.start * members, heads.stop * members)
        return Indices(self.problem, self.xp, self.x, rows, columns, items=items, heads=heads)


def call_of(problem: Problem, x: Operands, xp: Any, tile: int, check: Any) -> Call:
    """Return the call with its arrays' axes as pieces are cut from them."""
    batch = problem.batch or (1,)
    groups, members = problem.key_heads, problem.heads // problem.key_heads

    def spread(array: Array) -> Array:
        shape = (*batch, *array.shape[-3:])
        return array if array.shape == shape else np.broadcast_to(array, shape)

    bias = x.bias
    if bias is not None:
        bias = bias.reshape((1,) * (len(batch) + 3 - bias.ndim) + bias.shape)
        *leading, heads, rows, columns = bias.shape
        split = (1, 1) if heads == 1 else (groups, members)
        bias = bias.reshape(*leading, *split, rows, columns)
    query = spread(x.query)
    query = query.reshape(*batch, groups, members, *query.shape[-2:])
    mask = combined_mask(problem, x)
    table = None if mask is None else Table.of(mask, problem, x, xp, tile)
    return Call(
        problem, x, xp, query, spread(x.key), spread(x.value), bias, tile, mask, table, check
    )
