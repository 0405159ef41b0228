"""Decide which pages new tokens of a PagedCache go to.

Pools hold pages of some slots. A table names the pages of each item in the order of its tokens, and
page 0 takes what is not kept. The mark of a page is the number of its slots that any item has
written. Here pages have 4 slots; item 1 was forked from item 0, which then got one more token, so
both have tokens in page 5, whose mark is 2. Each gets 3 tokens, the first of them in column 1::

    item  length  table
    0     6       3 5 .    may go on in page 5: it has 6 % 4 tokens there, as many as the mark
    1     5       3 5 .    may not: it has 5 % 4 = 1 token there, and another item wrote slot 1

Item 0 writes in place, and takes a free page for its last token. Item 1 takes a free page instead
of page 5, and the tokens of page 5 are copied to it. With 1, 2 and 4 as the free pages::

    item  length  table    places, as page:slot    copied
    0     9       3 5 1    5:2 5:3 1:0             -
    1     8       3 2 .    2:1 2:2 2:3             5 to 2

`Ledger.place` does this item by item where the host can read the table. `plan_in_trace` does the
same for all items at once in a compiled step, which cannot read it.
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


class PagePlan(NamedTuple):
    """The places of new tokens."""

    table: Array  # (B, n), with the new pages
    copied: tuple[Array, Array]  # pages to copy, and to where
    places: tuple[Array, Array]  # (B, m), page and slot of each token


class Ledger:
    """The free pages of a memory, and the mark of each page: the number of slots written."""

    def __init__(self, table: Table) -> None:
        # The memory has one cache, whose table is of NumPy.
        self.page, self.marks = table.page, [0] * table.total
        slots = slots_used(table)
        for page, mark in zip(table.pages.ravel().tolist(), slots.ravel().tolist(), strict=True):
            self.marks[page] = max(self.marks[page], mark if page else 0)
        self.release([table])

    def release(self, tables: Iterable[Table]) -> None:
        """Keep the pages that these items have, and free all others."""
        used = {0}  # which takes what is not kept
        for table in tables:
            used.update(table.pages[slots_used(table) > 0].tolist())
        self.free = [page for page in range(len(self.marks) - 1, 0, -1) if page not in used]

    def place(self, table: Table, counts: Any, m: int) -> PagePlan | None:
        """Return where the first of m new tokens of each item go; None if pages lack."""
        # Tables and counts are arrays of NumPy.
        pages, size, taken = table.pages, self.page, 0
        marks: dict[int, int] = {}  # of the pages that these tokens are written to
        copied: list[tuple[int, int]] = []
        for item, (length, count) in enumerate(
            zip(table.lengths.tolist(), counts.tolist(), strict=True)
        ):
            end, first = length + count, length // size
            begun = int(pages[item, first]) if count and length % size else 0
            # Another item or cache may have written to the slot, or be about to.
            if begun and marks.get(begun, self.marks[begun]) == length % size:
                marks[begun] = min(end - first * size, size)
                first += 1
            for column in range(first, -(-end // size)) if count else ():
                if taken == len(self.free):
                    return None
                taken += 1
                new = self.free[-taken]
                marks[new] = min(end - column * size, size)
                if column * size < length:
                    copied.append((begun, new))
                pages = pages.copy() if pages is table.pages else pages
                pages[item, column] = new
        for page, mark in marks.items():
            self.marks[page] = mark
        del self.free[len(self.free) - taken :]
        token = np.arange(m)
        columns, slots = np.divmod(table.lengths[:, None] + token, size)
        rows = np.arange(len(pages))[:, None]
        held = pages[rows, np.minimum(columns, pages.shape[1] - 1)]
        pairs = np.asarray(copied, dtype=np.int64).reshape(-1, 2)
        return PagePlan(
            pages, (pairs[:, 0], pairs[:, 1]), (np.where(token < counts[:, None], held, 0), slots)
        )


def with_columns(table: Table, length: int) -> Table:
    """Return a table of NumPy that has columns for items of this length."""
    columns = table.pages.shape[1]
    missing = -(-length // table.page) - columns
    if missing <= 0:
        return table
    return table._replace(pages=np.pad(table.pages, ((0, 0), (0, max(missing, columns)))))


def with_room(
    pools: tuple[Array, Array], table: Table, counts: Any, m: int
) -> tuple[tuple[Array, Array], Ledger, PagePlan]:
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


def slots_used(table: Table) -> Array:
    """Return how many slots of each page of a table are used, shape (B, n)."""
    xp = library_of(table.pages).xp
    starts = index_range(xp, 0, table.pages.shape[1], table.pages)[None, :] * table.page
    return clip(xp, table.lengths[:, None] - starts, 0, table.page)


def plan_in_trace(given: Table, counts: Array, m: int) -> PagePlan:
    """Return where the first of m new tokens of each item go; page 0 for those without a page."""
    # Arrays are (B,), a number for each item, unless the end of a line says otherwise.
    table, lengths, size, total = given
    xp, columns = library_of(table).xp, table.shape[1]
    marks, free = _pages_in_use(given)  # (total,) each
    begun, in_place = _begun_pages(given, counts, marks)
    first = lengths // size  # column of the first new token

    # Each item takes pages from `first_new` to `end`, of the free ones those after the pages of the
    # items before: where they begin is a sum.
    first_new = first + xp.astype(in_place, table.dtype)
    end = clip(xp, -(-(lengths + counts) // size), 0, columns)
    end = xp.where(counts > 0, end, first_new)
    taken = clip(xp, end - first_new, 0, columns)
    before = xp.where(_is_earlier(table), taken[None, :], xp.zeros_like(table[:, :1]))  # (B, B)
    column = index_range(xp, 0, columns, table)[None, :]
    number = column + (xp.sum(before, axis=1) - first_new)[:, None]  # (B, n)
    page = xp.take(free, xp.reshape(clip(xp, number, 0, total - 1), (-1,)))
    is_new = (column >= first_new[:, None]) & (column < end[:, None])  # (B, n)
    new = xp.where(is_new, xp.reshape(page, table.shape), table)  # (B, n)

    to = xp.where((begun > 0) & ~in_place, _entries(new, first[:, None])[:, 0], begun * 0)
    token = index_range(xp, 0, m, table)[None, :]
    at = lengths[:, None] + token  # (B, m)
    inside = (token < counts[:, None]) & (at < columns * size)  # (B, m)
    pages = xp.where(inside, _entries(new, at // size), xp.zeros_like(at))  # (B, m)
    return PagePlan(new, (xp.where(to > 0, begun, begun * 0), to), (pages, at % size))


def _begun_pages(given: Table, counts: Array, marks: Array) -> tuple[Array, Array]:
    """Return the page that each item has begun, else 0, and whether its tokens go on there."""
    table, lengths, size, _ = given
    xp, first = library_of(table).xp, lengths // size
    is_begun = (counts > 0) & (lengths % size > 0) & (first < table.shape[1])
    begun = xp.where(is_begun, _entries(table, first[:, None])[:, 0], xp.zeros_like(lengths))
    # Only those of the first item whose tokens are all that the page holds.
    may_go_on = is_begun & (xp.take(marks, begun) == lengths % size)
    is_rival = may_go_on[None, :] & (begun[None, :] == begun[:, None])  # (B, B)
    return begun, may_go_on & ~xp.any(_is_earlier(table) & is_rival, axis=1)


def _is_earlier(table: Array) -> Array:
    """Return whether an item (columns) comes before another (rows), shape (B, B)."""
    item = index_range(library_of(table).xp, 0, table.shape[0], table)
    return item[None, :] < item[:, None]


def _pages_in_use(given: Table) -> tuple[Array, Array]:
    """Return the marks of all pages, and the free pages, after which there are zeros."""
    xp = library_of(given.pages).xp
    numbers = index_range(xp, 0, given.total, given.pages)
    slots = xp.reshape(slots_used(given), (-1, 1))
    here = xp.reshape(given.pages, (-1, 1)) == numbers[None, :]  # (B n, total)
    marks = xp.max(xp.where(here, slots, xp.zeros_like(slots)), axis=0)
    is_used = (marks > 0) | (numbers == 0)
    pages = xp.argsort(xp.astype(is_used, numbers.dtype), stable=True)  # the free ones first
    pages = xp.astype(pages, numbers.dtype)
    return marks, xp.where(xp.take(is_used, pages), xp.zeros_like(pages), pages)


def _entries(table: Array, columns: Array) -> Array:
    """Return the entries of a table at columns (B, m) of its rows; of the last column beyond it."""
    xp, (items, width) = library_of(table).xp, table.shape
    rows = index_range(xp, 0, items, table)[:, None] * width
    cells = xp.reshape(rows + clip(xp, columns, 0, width - 1), (-1,))
    return xp.reshape(xp.take(xp.reshape(table, (-1,)), cells), columns.shape)


def on_host(numbers: Array) -> Any:
    """Return integers as an array of NumPy, or None where they are traced."""
    if is_transformed() or is_recording():
        return None
    if is_host(numbers):
        return numbers
    if is_array(known(library_of(numbers).xp.sum(numbers))):
        return None
    return convert_like(numbers, np.zeros(0)).astype(np.int64, copy=False)


def plan_on_device(plan: PagePlan, like: Array) -> PagePlan:
    """Return a plan of NumPy with its arrays in the library and on the device of another."""
    copied, to, pages, slots = (to_device(array, like) for array in (*plan.copied, *plan.places))
    return PagePlan(to_device(plan.table, like), (copied, to), (pages, slots))


def to_device(numbers: Any, like: Array) -> Array:
    """Return integers of the host on the device of an array, if possible without a wait for it."""
    library = library_of(like)
    if library.name == "numpy":
        return numbers
    if library.name == "torch":
        tensor: Any = library.xp.asarray(numbers)
        # Not for MPS, which may read the numbers when they are gone: pytorch/pytorch#189690.
        may_go_on = like.device.type == "cuda"
        return tensor.to(like.device, like.dtype, non_blocking=may_go_on)
    return numbers_like(library.xp, numbers, like.dtype, like)


def with_written(pool: Any, rows: Array, plan: PagePlan, *, in_place: bool = False) -> Array:
    """Return a pool with new rows (B, G, m, size), in new memory by default."""
    (old, new), (pages, slots) = plan.copied, plan.places
    xp, put = library_of(pool).xp, scatter.written if in_place else scatter.scatter
    if new.shape[0]:
        pool = put(pool, (new,), pool[old] if in_place else xp.take(pool, old, axis=0))
    return put(pool, (pages, slice(None), slots), xp.permute_dims(rows, (0, 2, 1, 3)))
