"""Keys in pages: copy them in one piece for kernels that read no pages, and add gradients up.

The one place that does: a page is (G, page, size) of a pool (pages, G, page, size), heads first.
"""

from __future__ import annotations

from typing import Any

from polyattn._base.arrays import Array, index_range, library_of, with_rank
from polyattn._core.call.operands import Operands


def gathered(pool: Array, operands: Operands) -> Array:
    """Return the keys of each item in one piece, (..., G, S, size), and 0 in unused slots."""
    xp, (_, heads, page, size) = library_of(pool).xp, pool.shape
    table, used = _used_pages(operands, page)
    *batch, count = table.shape
    found = xp.take(pool, xp.reshape(table, (-1,)), axis=0)
    found = xp.moveaxis(xp.reshape(found, (*batch, count, heads, page, size)), -4, -3)
    found = xp.reshape(found, (*batch, heads, count * page, size))
    # An unused slot may hold NaN, and not every kernel leaves out what is hidden.
    return xp.where(used[..., None, :, None], found, xp.zeros_like(found))


def in_one_piece(operands: Operands) -> Operands:
    """Return operands whose keys and values, if they are in pages, are copied in one piece."""
    if operands.block_table is None:
        return operands
    key, value = (x if x is None else gathered(x, operands) for x in operands[1:3])
    return operands._replace(key=key, value=value, block_table=None, key_lengths=None)


def scattered(gradient: Array, operands: Operands, pool: Array) -> Array:
    """Return the gradient of a pool from that of the keys in one piece."""
    xp, (_, heads, page, size) = library_of(gradient).xp, pool.shape
    table, _ = _used_pages(operands, page)
    *batch, count = table.shape
    numbers, zero = xp.reshape(table, (-1,)), index_range(xp, 0, 1, gradient)
    parts = xp.reshape(gradient, (*batch, heads, count, page, size))
    parts = xp.reshape(xp.moveaxis(parts, -3, -4), (*numbers.shape, heads, page, size))
    whole = xp.astype(xp.broadcast_to(zero, pool.shape), gradient.dtype)  # always a copy
    if hasattr(whole, "at"):  # JAX and MLX
        return whole.at[numbers].add(parts)
    if hasattr(whole, "index_add"):  # torch
        return whole.index_add(0, numbers, parts)
    for number in range(parts.shape[0]):
        whole[int(numbers[number]), ...] += parts[number, ...]
    return whole


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
