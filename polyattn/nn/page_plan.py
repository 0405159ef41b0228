"""Decide which pages new tokens of a PagedCache go to.

A ledger on the host does it where the host can read the table, and `placed` in a trace.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from polyattn._base import scatter
from polyattn._base.arrays import Array, clip, index_range, is_array, library_of, numbers_like
from polyattn._base.host import is_host
from polyattn._base.tracing import is_recording, is_transformed
from polyattn._dispatch.transfer import convert_like
from polyattn.nn.cache import known


class Table(NamedTuple):
    """The pages of items, and the number of tokens of each item."""

    pages: Array  # (B, n)
    lengths: Array  # (B,)
    page: int  # tokens of a page
    total: int  # pages of the pools


class Plan(NamedTuple):
    """The places of new tokens."""

    table: Array  # (B, n), with the new pages
    copied: tuple[Array, Array]  # pages to copy, and to where
    places: tuple[Array, Array]  # (B, m), page and slot of each token


class Ledger:
    """The slots written of each page of a memory and the pages that no cache has, on the host."""

    def __init__(self, table: Table) -> None:
        # The memory has one cache, whose table is of NumPy.
        self.page, self.marks = table.page, [0] * table.total
        slots = slots_used(table.lengths, table.pages, table.page)
        for page, mark in zip(table.pages.ravel().tolist(), slots.ravel().tolist(), strict=True):
            self.marks[page] = max(self.marks[page], mark if page else 0)
        self.release([table])

    def release(self, tables: Iterable[Table]) -> None:
        """Keep the pages that these items have, and free all others."""
        used = {0}  # which takes what is not kept
        for pages, lengths, page, _ in tables:
            used.update(pages[slots_used(lengths, pages, page) > 0].tolist())
        self.free = [page for page in range(len(self.marks) - 1, 0, -1) if page not in used]

    def place(self, table: Table, counts: Any, m: int) -> Plan | None:
        """Return where the first of m new tokens of each item go; None if pages lack."""
        # Tables and counts are arrays of NumPy.
        pages, size, used = table.pages, self.page, 0
        marks: dict[int, int] = {}
        copied: list[tuple[int, int]] = []
        for item, (length, count) in enumerate(
            zip(table.lengths.tolist(), counts.tolist(), strict=True)
        ):
            end, column = length + count, length // size
            old = int(pages[item, column]) if count and length % size else 0
            # Another item or cache may have written to the slot, or be about to.
            if old and marks.get(old, self.marks[old]) == length % size:
                marks[old] = min(end - column * size, size)
                column += 1
            for fresh in range(column, -(-end // size)) if count else ():
                if used == len(self.free):
                    return None
                used += 1
                new = self.free[-used]
                marks[new] = min(end - fresh * size, size)
                if fresh * size < length:
                    copied.append((old, new))
                pages = pages.copy() if pages is table.pages else pages
                pages[item, fresh] = new
        for number, mark in marks.items():
            self.marks[number] = mark
        del self.free[len(self.free) - used :]
        token = np.arange(m)
        columns, slots = np.divmod(table.lengths[:, None] + token, size)
        rows = np.arange(len(pages))[:, None]
        found = pages[rows, np.minimum(columns, pages.shape[1] - 1)]
        places = np.where(token < counts[:, None], found, 0), slots
        pairs = np.asarray(copied, dtype=np.int64).reshape(-1, 2)
        return Plan(pages, (pairs[:, 0], pairs[:, 1]), places)


def widened(table: Table, length: int) -> Table:
    """Return a table of NumPy that has room for items of this length."""
    columns = table.pages.shape[1]
    missing = -(-length // table.page) - columns
    if missing <= 0:
        return table
    return table._replace(pages=np.pad(table.pages, ((0, 0), (0, max(missing, columns)))))


def with_room(
    pools: tuple[Array, Array], table: Table, counts: Any, m: int
) -> tuple[tuple[Array, Array], Ledger, Plan]:
    """Return pools for new memory, with more pages if new tokens need them, and where these go."""
    ledger = Ledger(table)
    plan = ledger.place(table, counts, m)
    if plan is not None:
        return pools, ledger, plan
    starts, ends = table.lengths // table.page, -(-(table.lengths + counts) // table.page)
    missing = int((ends - starts).sum()) - len(ledger.free)
    table = table._replace(total=table.total + max(missing, table.total // 8))
    ledger = Ledger(table)
    plan = ledger.place(table, counts, m)
    assert plan is not None
    return (with_pages(pools[0], table.total), with_pages(pools[1], table.total)), ledger, plan


def with_pages(pool: Array, total: int) -> Array:
    """Return a pool with pages of zeros after its own, so that it has so many."""
    xp, (pages, *rest) = library_of(pool).xp, pool.shape
    more = xp.zeros_like(xp.broadcast_to(pool[:1, ...], (total - pages, *rest)))
    return xp.concat((pool, more), axis=0)


def slots_used(lengths: Array, table: Array, page: int) -> Array:
    """Return how many slots of each page of a table are used, shape (B, n)."""
    xp = library_of(table).xp
    starts = index_range(xp, 0, table.shape[1], table)[None, :] * page
    return clip(xp, lengths[:, None] - starts, 0, page)


def usage(table: Table) -> tuple[Array, Array]:
    """Return how many slots of each page of the pools are used, and which pages."""
    pages, lengths, page, total = table
    xp = library_of(pages).xp
    slots = xp.reshape(slots_used(lengths, pages, page), (-1, 1))
    numbers = index_range(xp, 0, total, pages)
    here = xp.reshape(pages, (-1, 1)) == numbers[None, :]
    marks = xp.max(xp.where(here, slots, xp.zeros_like(slots)), axis=0)
    return marks, (marks > 0) | (numbers == 0)


def placed(given: Table, counts: Array, m: int) -> Plan:
    """Return where the first of m new tokens of each item go."""
    (table, before_them, page, _), (marks, taken) = given, usage(given)
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
    place = clip(xp, rank, 0, free.shape[0] - 1)
    found = xp.reshape(xp.take(free, xp.reshape(place, (-1,))), table.shape)
    is_free = ~xp.reshape(xp.take(taken, xp.reshape(found, (-1,))), table.shape)
    found = xp.where(is_free & (place == rank), found, none)
    new = xp.where(fresh, found, table)
    copied = [xp.sum(xp.where(begun & fresh, pages, none), axis=1) for pages in (table, new)]
    token = index_range(xp, 0, m, table)[None, :]
    at = lengths + token
    inside = (token < counts[:, None]) & (at < columns * page)
    cell = item[:, None] * columns + clip(xp, at // page, 0, columns - 1)
    pages = xp.reshape(xp.take(xp.reshape(new, (-1,)), xp.reshape(cell, (-1,))), at.shape)
    pages = xp.where(inside, pages, xp.zeros_like(pages))
    return Plan(new, (copied[0], copied[1]), (pages, at % page))


def on_host(numbers: Array) -> Any:
    """Return integers as an array of NumPy, or None where they are traced."""
    if is_transformed() or is_recording():
        return None
    if is_host(numbers):
        return numbers
    if is_array(known(library_of(numbers).xp.sum(numbers))):
        return None
    return convert_like(numbers, np.zeros(0)).astype(np.int64, copy=False)


def beside(plan: Plan, like: Array) -> Plan:
    """Return a plan of NumPy with its arrays beside another."""
    copied, to, pages, slots = (sent(array, like) for array in (*plan.copied, *plan.places))
    return Plan(sent(plan.table, like), (copied, to), (pages, slots))


def sent(numbers: Any, like: Array) -> Array:
    """Return integers of the host beside an array, where possible without a wait for its device."""
    library = library_of(like)
    if library.name == "numpy":
        return numbers
    if library.name == "torch":
        tensor: Any = library.xp.asarray(numbers)
        # Not for MPS, which may read the numbers when they are gone: pytorch/pytorch#189690.
        may_go_on = like.device.type == "cuda"
        return tensor.to(like.device, like.dtype, non_blocking=may_go_on)
    return numbers_like(library.xp, numbers, like.dtype, like)


def write(pool: Any, rows: Array, plan: Plan) -> None:
    """Write new rows (B, G, m, size) to a pool."""
    (old, new), (pages, slots) = plan.copied, plan.places
    if new.shape[0]:
        scatter.write(pool, (new,), pool[old])
    by_token = library_of(rows).xp.permute_dims(rows, (0, 2, 1, 3))
    scatter.write(pool, (pages, slice(None), slots), by_token)


def written(pool: Any, rows: Array, plan: Plan) -> Array:
    """Return a pool with new rows, in new memory."""
    (old, new), (pages, slots) = plan.copied, plan.places
    if new.shape[0]:
        xp = library_of(pool).xp
        pool = scatter.scatter(pool, (new,), xp.take(pool, old, axis=0))
    by_token = library_of(rows).xp.permute_dims(rows, (0, 2, 1, 3))
    return scatter.scatter(pool, (pages, slice(None), slots), by_token)
