"""Decide which pages new tokens of a PagedCache go to, for any library and in a trace."""

from __future__ import annotations

from typing import Any, NamedTuple

from polyattn._base.arrays import Array, index_range, library_of
from polyattn.nn.cache import zeros


class Table(NamedTuple):
    """The pages of items, and the number of tokens of each item."""

    pages: Array  # (B, n)
    lengths: Array  # (B,)
    page: int  # tokens of a page
    total: int  # pages of the pools


class Plan(NamedTuple):
    """The places of new tokens."""

    table: Array  # (B, n), with the new pages
    touched: Array  # (B, n), whether a page is written to
    needed: Array  # number of new pages
    copied: tuple[Array, Array]  # (B,), pages to copy, and to where
    places: tuple[Array, Array]  # (B · tokens,), page and slot of each token


def empty(pool: Array, pages: int) -> Array:
    """Return pages of zeros."""
    xp, (_, heads, page, size) = library_of(pool).xp, pool.shape
    return zeros(xp.broadcast_to(pool[:1, :, :1, :1], (pages, heads, 1, 1)), page, size)


def unused(taken: Array) -> int:
    """Return the number of unused pages."""
    return int(taken.shape[0]) - int(library_of(taken).xp.count_nonzero(taken))


def slots_used(lengths: Array, table: Array, page: int) -> Array:
    """Return how many slots of each page of a table are used, shape (B, n)."""
    xp = library_of(table).xp
    starts = index_range(xp, 0, table.shape[1], table)[None, :] * page
    return xp.clip(lengths[:, None] - starts, 0, page)


def usage(table: Table) -> tuple[Array, Array]:
    """Return how many slots of each page of the pools are used, and which pages."""
    pages, lengths, page, total = table
    xp = library_of(pages).xp
    slots = xp.reshape(slots_used(lengths, pages, page), (-1, 1))
    numbers = index_range(xp, 0, total, pages)
    here = xp.reshape(pages, (-1, 1)) == numbers[None, :]
    marks = xp.max(xp.where(here, slots, xp.zeros_like(slots)), axis=0)
    return marks, (marks > 0) | (numbers == 0)


def placed(given: Table, counts: Array, m: int, marks: Array, taken: Array) -> Plan:
    """Return where the first of m new tokens of each item go."""
    table, before_them, page, _ = given
    xp, (items, columns) = library_of(table).xp, table.shape
    column = index_range(xp, 0, columns, table)[None, :]
    lengths, ends = before_them[:, None], (before_them + counts)[:, None]
    touched = (column * page < ends) & (column * page + page > lengths) & (counts[:, None] > 0)
    begun = touched & (column * page < lengths)  # at most one of an item
    none = xp.zeros_like(table)
    newest = xp.sum(xp.where(begun, table, none), axis=1)
    # Another item or cache may have written to the slot, or be about to.
    item = index_range(xp, 0, items, table)
    before = item[None, :] < item[:, None]
    rivals = before & (newest[None, :] == newest[:, None]) & (counts[None, :] > 0)
    is_ours = (xp.take(marks, newest) == before_them % page) & ~xp.any(rivals, axis=1)
    fresh = touched & ~(begun & is_ours[:, None])
    numbers = xp.sum(xp.astype(fresh, table.dtype), axis=1)
    offset = xp.sum(
        xp.where(before, numbers[None, :], xp.zeros_like(before, dtype=table.dtype)), axis=1
    )
    # The new pages of an item are its last touched ones, one after another.
    last = -(-ends // page)
    rank = offset[:, None] + column - (last - numbers[:, None])
    free = xp.astype(xp.argsort(xp.astype(taken, table.dtype), stable=True), table.dtype)
    place = xp.clip(rank, 0, free.shape[0] - 1)
    found = xp.reshape(xp.take(free, xp.reshape(place, (-1,))), table.shape)
    is_free = ~xp.reshape(xp.take(taken, xp.reshape(found, (-1,))), table.shape)
    found = xp.where(is_free & (place == rank), found, none)
    new = xp.where(fresh, found, table)
    copied = [xp.sum(xp.where(begun & fresh, pages, none), axis=1) for pages in (table, new)]
    token = index_range(xp, 0, m, table)[None, :]
    at = lengths + token
    inside = (token < counts[:, None]) & (at < columns * page)
    cell = item[:, None] * columns + xp.clip(at // page, 0, columns - 1)
    pages = xp.reshape(xp.take(xp.reshape(new, (-1,)), xp.reshape(cell, (-1,))), at.shape)
    pages = xp.where(inside, pages, xp.zeros_like(pages))
    places = xp.reshape(pages, (-1,)), xp.reshape(at % page, (-1,))
    return Plan(new, touched, xp.sum(numbers), (copied[0], copied[1]), places)


def by_token(rows: Array) -> Array:
    """Return rows (B, G, m, size) as (B · m, G, size)."""
    xp, (items, heads, m, size) = library_of(rows).xp, rows.shape
    return xp.reshape(xp.permute_dims(rows, (0, 2, 1, 3)), (items * m, heads, size))


def written(pool: Array, rows: Array, plan: Plan) -> Array:
    """Return a pool with new rows, in new memory."""
    (old, new), (pages, slots), rows = plan.copied, plan.places, by_token(rows)
    library = library_of(pool)
    copies: Any = library.xp.take(pool, old, axis=0)
    written: Any = pool
    if library.name == "jax":
        return written.at[new].set(copies).at[pages, :, slots].set(rows)
    written = pool + 0
    if library.name in ("numpy", "cupy", "torch", "mlx"):
        written[new] = copies
        written[pages, :, slots] = rows
        return written
    for number in range(new.shape[0]):
        written[int(new[number]), ...] = copies[number, ...]
    for number in range(pages.shape[0]):
        written[int(pages[number]), :, int(slots[number]), :] = rows[number, ...]
    return written
