"""Define PagedCache: keys and values of a ragged batch, in pages that items may share.

A cache is a value, as KVCache is. Caches of one memory write to slots that no cache has written;
elsewhere a page is copied before it is written to. Memory knows the caches that use it, so that a
page is free once no cache has it in its table. Where arrays are not writable, the next cache
consists of new arrays of the same shape.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple
from weakref import WeakSet

import numpy as np

from polyattn._base.arguments import check_int
from polyattn._base.arrays import (
    Array,
    facts_of,
    index_range,
    is_array,
    library_of,
    numbers_like,
    zeros,
)
from polyattn._base.forks import forkable_lock
from polyattn._base.host import as_array, is_host
from polyattn._base.tracing import is_transformed
from polyattn.nn.cache import checked_tokens
from polyattn.nn.memory import is_writable
from polyattn.nn.page_plan import (
    Ledger,
    PagePlan,
    Table,
    on_host,
    plan_in_trace,
    plan_on_device,
    to_device,
    with_columns,
    with_room,
    with_written,
)


class _Memory:
    """Pools that a cache allocated, and what the caches that share them have written."""

    def __init__(self, key: Array, value: Array, ledger: Ledger) -> None:
        self.key, self.value, self.ledger = key, value, ledger
        self.users: WeakSet[PagedCache] = WeakSet()
        self.lock = forkable_lock()

    def place(self, table: Table, counts: Any, m: int) -> PagePlan | None:
        """Return where new tokens go, if need be in pages that no cache has any more."""
        plan = self.ledger.place(table, counts, m)
        if plan is None:
            tables = [cache._on_host() for cache in self.users]
            self.ledger.release([one for one in (table, *tables) if one is not None])
            plan = self.ledger.place(table, counts, m)
        return plan

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """Copy and pickle as None: whether the new arrays share memory is unknown."""
        return type(None), ()


class _Known(NamedTuple):
    """A table and lengths, and their numbers on the host."""

    block_table: Array
    lengths: Array
    numbers: Table


@dataclass(frozen=True, eq=False)
class PagedCache:
    """Keys and values of the tokens so far of several items, in pages.

    Attributes
    ----------
    key, value : Array
        Pools of pages, shapes (pages, G, page, D) and (pages, G, page, E). Page 0 takes tokens that
        are not kept.
    block_table : Array of int
        The pages of each item, shape (B, n).
    lengths : Array of int
        Number of tokens of each item, shape (B,).
    start : Array of int, optional
        Lengths before the newest tokens, where the items got different numbers of tokens.
    known : object, optional
        The numbers of the table and the lengths, where the host has them: `append` reads them from
        the arrays otherwise, and waits for their device.
    memory : object, optional
        Shared by the caches of the pools; decides which slots may be written. Without it the next
        cache copies the pools.
    """

    key: Array
    value: Array
    block_table: Array
    lengths: Array
    start: Array | None = None
    known: _Known | None = field(default=None, repr=False, compare=False)
    memory: _Memory | None = field(default=None, repr=False, compare=False)

    @classmethod
    def init(
        cls,
        heads: int,
        size: int,
        capacity: int,
        *,
        items: int,
        like: Array,
        page: int = 16,
        pages: int | None = None,
        value_size: int | None = None,
    ) -> PagedCache:
        """Return an empty cache.

        Parameters
        ----------
        heads, size, like, value_size
            As for `KVCache.init`.
        capacity : int
            Number of tokens that an item may have. The cache grows as needed, except in a traced
            function, where lengths are unknown: tokens beyond the capacity, and those that find no
            free page, are lost there.
        items : int
            B, the number of items.
        page : int
            Number of tokens of a page.
        pages : int, optional
            Number of pages to allocate memory for; enough for all items by default.

        Raises
        ------
        ValueError
            If a number is below 1.

        Examples
        --------
        >>> import numpy as np
        >>> from polyattn import attention, nn
        >>> prompt = np.ones((1, 8, 100, 64), dtype=np.float32)
        >>> cache = nn.PagedCache.init(8, 64, 256, items=1, like=prompt).append(prompt, prompt)
        >>> cache = cache.fork([0, 0, 0])  # three continuations share the pages of the prompt
        >>> token = np.ones((3, 8, 1, 64), dtype=np.float32)
        >>> cache = cache.append(token, token)
        >>> attention(token, cache.keys, cache.values, **cache.options({})).shape
        (3, 8, 1, 64)
        """
        numbers = {"heads": heads, "size": size, "capacity": capacity, "items": items, "page": page}
        for name, number in numbers.items():
            check_int(name, number, least=1)
        columns = -(-capacity // page)
        pages = 1 + (items * columns if pages is None else check_int("pages", pages, least=0))
        xp = library_of(like, "like").xp
        widths = size, size if value_size is None else value_size
        pools = [(pages, heads, page, width) for width in widths]
        key, value = (zeros(xp, shape, like.dtype, like) for shape in pools)
        lengths = index_range(xp, 0, items, like) * 0
        table = xp.broadcast_to(lengths[:, None], (items, columns)) + 0
        return cls(key, value, table, lengths)

    def __post_init__(self) -> None:
        if self.memory is not None:
            with self.memory.lock:
                self.memory.users.add(self)

    def __copy__(self) -> PagedCache:
        return self

    @property
    def page(self) -> int:
        """Number of tokens of a page."""
        return int(self.key.shape[-2])

    @property
    def capacity(self) -> int:
        """Number of tokens of an item for which the table has pages."""
        return int(self.block_table.shape[1]) * self.page

    @property
    def next_position(self) -> Array:
        """The position of each item's next token, shape (B, 1)."""
        return self.lengths[:, None]

    @property
    def keys(self) -> Array:
        """The pool of keys, shape (pages, G, page, D)."""
        return self.key

    @property
    def values(self) -> Array:
        """The pool of values, shape (pages, G, page, E)."""
        return self.value

    def options(self, options: dict[str, Any]) -> dict[str, Any]:
        """Return the options for attention from the newest tokens to `keys` and `values`.

        Parameters
        ----------
        options : dict
            Further options of `polyattn.attention`.

        Returns
        -------
        dict
            `options`, with the pages and lengths of the items.
        """
        own = {"block_table": self.block_table, "key_lengths": self.lengths}
        return own | ({} if self.start is None else {"query_offset": self.start}) | options

    def append(
        self, key: Array, value: Array, *, counts: Any = None, query: Array | None = None
    ) -> PagedCache:
        """Return a cache with more tokens at the end of each item; this cache does not change.

        Parameters
        ----------
        key, value : Array
            Keys and values of m tokens for each item, shapes (B, G, m, D) and (B, G, m, E).
        counts : Array of int or sequence of int, optional
            How many of them each item keeps, the first ones, shape (B,); all by default.
        query : Array, optional
            As for `KVCache.append`.

        Returns
        -------
        PagedCache

        Raises
        ------
        ValueError
            If the shapes do not fit, or a count is below 0 or above m.
        TypeError
            If the library or dtype differs.
        """
        lead = self.lengths.shape[0], self.key.shape[1]
        key, value = checked_tokens((self.key, self.value), lead, key, value)
        m, number, start = key.shape[-2], key.shape[-2], None
        if counts is not None:
            number, start = self._checked("counts", counts, m), self.lengths
            self._check_items("counts must be a number", number)
        table = self._on_host()
        kept = on_host(number) if is_array(number) else number
        if table is None or kept is None:
            here = to_device(number, self.lengths) if is_host(number) else number
            number = self.lengths * 0 + here
            given = Table(self.block_table, self.lengths, self.page, self.key.shape[0])
            plan = plan_in_trace(given, number, m)
            pools = with_written(self.key, key, plan), with_written(self.value, value, plan)
            return PagedCache(*pools, plan.table, self.lengths + number, start)
        cache = self._appended(key, value, table, kept + 0 * table.lengths, query)
        return cache if start is None else replace(cache, start=start)

    def _appended(
        self, key: Array, value: Array, table: Table, counts: Any, query: Array | None
    ) -> PagedCache:
        """Return the cache with more tokens, whose numbers the host knows."""
        m, memory = key.shape[-2], self.memory
        table = with_columns(table, int((table.lengths + counts).max(initial=0)))
        new = [array for array in (key, value, query) if array is not None]
        writable = is_writable(new, [self.key, self.value])
        shared = memory is not None and memory.key is self.key and memory.value is self.value
        if writable and memory is not None and shared:
            with memory.lock:
                plan = memory.place(table, counts, m)
                if plan is not None:
                    there = plan_on_device(plan, self.lengths)
                    for pool, rows in ((self.key, key), (self.value, value)):
                        with_written(pool, rows, there, in_place=True)
                    return self._following(plan, there, table.lengths + counts)
        pools, ledger, plan = with_room((self.key, self.value), table, counts, m)
        there = plan_on_device(plan, self.lengths)
        pools = with_written(pools[0], key, there), with_written(pools[1], value, there)
        # A graph of gradients may hold the new arrays, so no cache may write to them.
        memory = _Memory(*pools, ledger) if writable else None
        cache = replace(self, key=pools[0], value=pools[1], memory=memory)
        return cache._following(plan, there, table.lengths + counts)

    def _following(self, plan: PagePlan, there: PagePlan, lengths: Any) -> PagedCache:
        """Return the cache after new tokens, whose places the host knows."""
        place = there.table, to_device(lengths, self.lengths)
        known = _Known(*place, Table(plan.table, lengths, self.page, self.key.shape[0]))
        return PagedCache(self.key, self.value, *place, None, known, self.memory)

    def fork(self, items: Any) -> PagedCache:
        """Return a cache of these items, which share the pages of this one until they are written.

        Parameters
        ----------
        items : Array of int or sequence of int
            Numbers of items of this cache, each any number of times.

        Returns
        -------
        PagedCache
        """
        xp = library_of(self.lengths).xp
        items = self._numbers("items", items, self.lengths.shape[0] - 1)
        table, lengths = (xp.take(x, items, axis=0) for x in (self.block_table, self.lengths))
        start = None if self.start is None else xp.take(self.start, items, axis=0)
        return replace(self, block_table=table, lengths=lengths, start=start)

    def truncate(self, lengths: Any) -> PagedCache:
        """Return a cache of the first tokens of each item; this cache does not change.

        Parameters
        ----------
        lengths : int, Array of int or sequence of int
            Number of tokens to keep at most, of all items or of each, shape (B,).

        Returns
        -------
        PagedCache
        """
        xp = library_of(self.lengths).xp
        lengths = self._numbers("lengths", lengths, None)
        if lengths.shape:
            self._check_items("lengths must be a number, or one", lengths)
        kept = xp.where(lengths < self.lengths, lengths, self.lengths)
        return replace(self, lengths=kept, start=None)

    def free(self, items: Any) -> PagedCache:
        """Return a cache in which these items have no tokens; this cache does not change.

        Their pages can be used again as soon as no other cache is left that has them.

        Parameters
        ----------
        items : Array of bool or sequence of bool
            Which items to empty, shape (B,).

        Returns
        -------
        PagedCache
        """
        xp = library_of(self.lengths).xp
        emptied = items if is_array(items) else np.asarray(items)
        self._check_items("items must be True or False", emptied, "bool")
        if is_host(emptied):
            emptied = numbers_like(xp, emptied, xp.bool, self.lengths)
        kept = xp.where(emptied, xp.zeros_like(self.lengths), self.lengths)
        return replace(self, lengths=kept, start=None)

    def slide(self, window: int) -> PagedCache:
        """Return a cache with only the pages that hold some of the newest `window` tokens.

        Positions and lengths stay. Give attention the option `window` too, which hides the tokens
        that were dropped.

        Parameters
        ----------
        window : int
            Number of tokens to keep at least.

        Returns
        -------
        PagedCache
        """
        check_int("window", window, least=0)
        xp, table = library_of(self.lengths).xp, self.block_table
        ends = (index_range(xp, 0, table.shape[1], table)[None, :] + 1) * self.page
        dropped = ends <= self.lengths[:, None] - window
        return replace(self, block_table=xp.where(dropped, xp.zeros_like(table), table))

    def _on_host(self) -> Table | None:
        """Return the table and lengths as arrays of NumPy, or None in a trace."""
        known = None if is_transformed() else self.known
        if known and known.block_table is self.block_table and known.lengths is self.lengths:
            return known.numbers
        pages, lengths = on_host(self.block_table), on_host(self.lengths)
        return None if lengths is None else Table(pages, lengths, self.page, self.key.shape[0])

    def _checked(self, name: str, given: Any, most: int | None) -> Any:
        """Return integers as an array, of the host unless they are of the cache's library."""
        numbers = as_array(name, given)
        numbers = numbers if is_array(numbers) else np.asarray(numbers)
        here = is_host(numbers)  # the host waits for no other numbers
        wrong = "int" not in facts_of(numbers).dtype or (here and (numbers < 0).any())
        if wrong or (here and most is not None and (numbers > most).any()):
            limit = "" if most is None else f" to {most}"
            raise ValueError(f"{name} must be integers from 0{limit}; got {given}")
        if here:
            return np.asarray(numbers, np.int64)
        return library_of(numbers).xp.astype(numbers, self.lengths.dtype)

    def _check_items(self, what: str, given: Array, dtype: str | None = None) -> None:
        """Raise if there is not one number for each item."""
        facts, (items,) = facts_of(given), self.lengths.shape
        if facts.shape != (items,) or facts.dtype != (dtype or facts.dtype):
            raise ValueError(f"{what} for each of the {items} items; got {facts}")

    def _numbers(self, name: str, given: Any, most: int | None) -> Array:
        """Return integers in the library and on the device of the lengths."""
        numbers = self._checked(name, given, most)
        return to_device(numbers, self.lengths) if is_host(numbers) else numbers
