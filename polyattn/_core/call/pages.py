"""Paged keys and values: gather them for kernels that need contiguous ones, and scatter gradients.

A pool has the shape (pages, G, page, size). With pages of 2 slots, an item of 3 keys whose row of
the block table is [5, 0] has its keys in the slots 0 and 1 of page 5 and the slot 0 of page 0::

    pool    page 0: [k2  –]   …   page 5: [k0 k1]       – is unused: it may hold NaN
    keys    [k0 k1 k2  0]                               gathered, (..., G, S, size)
"""

from __future__ import annotations

from typing import Any

from polyattn._base.arrays import Array, clip, facts_of, index_range, library_of, with_rank
from polyattn._base.scatter import scatter_add
from polyattn._core.call.facts import Call, axes_of
from polyattn._core.call.operands import Operands
from polyattn._core.expressions.patterns import CachePadding, Padding


def on_used_pages(call: Call, x: Operands) -> tuple[Call, Operands]:
    """Return a call, whose lengths can be read, over the columns of its table that rows may see.

    With pages of 2 slots, lengths [3, 5] and a table of 8 columns, the first 3 are left. In a
    window whose scores depend on nothing but the distance to the row, the columns of an item begin
    with the page where its window begins, and its length and offset count from there. A bias, or
    another mask than the lengths, counts from the first key: then the call stays as it is.
    """
    table: Any = x.block_table
    lengths: Any = x.key_lengths
    if call.bias is not None or not isinstance(x.mask, Padding):
        return call, x
    xp, many, (left, _) = library_of(table).xp, table.shape[-1], call.window or (None, None)
    (_, _, rows, _), (_, _, page, _) = (axes_of(y.shape, call.layout) for y in call[:2])
    if max(xp.reshape(lengths, (-1,)).tolist(), default=0) > many * page:
        return call, x  # such a length hides nothing
    by_distance = isinstance(x.mask, CachePadding) and x.score_mod is None and not call.dropout
    moves = by_distance and left is not None and not isinstance(x.query_offset, int)
    first: Any = clip(xp, (lengths - rows - left) // page, 0, many) if moves else 0
    count = max([1, *xp.reshape(-(-lengths // page) - first, (-1,)).tolist()])
    if count >= many:
        return call, x
    changed = {"block_table": table[..., :count]}
    if moves:
        first = (first + 0 * table[..., 0])[..., None]
        columns = clip(xp, first + index_range(xp, 0, count, table), 0, many - 1)
        lengths = lengths - first[..., 0] * page
        changed = {"key_lengths": lengths, "query_offset": lengths - rows}
        changed["block_table"] = xp.take_along_axis(table + 0 * first, columns, axis=-1)
        x = x._replace(mask=CachePadding(lengths))
    facts: dict[str, Any] = {name: facts_of(y, name) for name, y in changed.items()}
    return call._replace(**facts), x._replace(**changed)


def gathered(pool: Array, operands: Operands) -> Array:
    """Return the gathered keys of each item, (..., G, S, size), and 0 in unused slots."""
    xp, (_, heads, page, size) = library_of(pool).xp, pool.shape
    table, used = _used_pages(operands, page)
    *batch, count = table.shape
    keys = xp.take(pool, xp.reshape(table, (-1,)), axis=0)
    keys = xp.moveaxis(xp.reshape(keys, (*batch, count, heads, page, size)), -4, -3)
    keys = xp.reshape(keys, (*batch, heads, count * page, size))
    # An unused slot may hold NaN, which not every kernel leaves out under a mask.
    return xp.where(used[..., None, :, None], keys, xp.zeros_like(keys))


def in_one_piece(operands: Operands) -> Operands:
    """Return operands with contiguous keys and values, gathered if they are in pages."""
    if operands.block_table is None:
        return operands
    key, value = (x if x is None else gathered(x, operands) for x in operands[1:3])
    return operands._replace(key=key, value=value, block_table=None, key_lengths=None)


def scattered(gradient: Array, operands: Operands, pool: Array) -> Array:
    """Return the gradient of a pool from that of the gathered keys."""
    xp, (_, heads, page, size) = library_of(gradient).xp, pool.shape
    table, _ = _used_pages(operands, page)
    *batch, count = table.shape
    numbers, zero = xp.reshape(table, (-1,)), index_range(xp, 0, 1, gradient)
    parts = xp.reshape(gradient, (*batch, heads, count, page, size))
    parts = xp.reshape(xp.moveaxis(parts, -3, -4), (*numbers.shape, heads, page, size))
    whole = xp.astype(xp.broadcast_to(zero, pool.shape), gradient.dtype)  # always a copy
    return scatter_add(whole, numbers, parts)


def _used_pages(operands: Operands, page: int) -> tuple[Array, Array]:
    """Return the table with page 0 for each unused one, and which slots of an item are used."""
    table: Any = operands.block_table
    lengths: Any = operands.key_lengths
    xp, count, ends = library_of(table).xp, table.shape[-1], lengths[..., None]
    columns, slots = (
        with_rank(index_range(xp, 0, number, table), len(ends.shape))
        for number in (count, count * page)
    )
    begun = columns * page < ends
    # A table of the host may go with more items than lengths, and the other way round.
    return xp.where(begun, table, xp.zeros_like(table)), slots < ends
