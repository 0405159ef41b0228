"""The keys that rows see, as the compiled library takes them.

Masks of lengths, prefixes, windows and sorted ids are a first and a last key for each row, and
compositions of them a few such ranges; an array is read in place. All others are computed as an
array, for some rows at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache, reduce
from importlib import import_module
from operator import and_
from typing import Any, NamedTuple

import numpy as np

from polyattn.plugin import (
    Expression,
    Indices,
    Mask,
    Operands,
    PointIndices,
    Problem,
    Span,
    TileGrid,
    band,
    combined_mask,
    saturating_sum,
)
from polyattn_native.arrays import FAR

# As polyattn does: array_api_compat imports all of NumPy, which takes longer than a first call.
xp: Any = np if hasattr(np, "cumulative_sum") else import_module("array_api_compat.numpy")
#: The ranges that a row may have, as `src/interface.h` says.
MOST_RANGES = 8
#: The rows and keys of a tile that is known to be empty, full or mixed.
TILE = 128, 64
#: The elements of a mask that are made at once: their indices, of 8 bytes, stay in a cache.
AT_ONCE = 2**17


class Visible(NamedTuple):
    """The keys that rows see, but for what numbers of the call say, such as most windows."""

    #: int32 (items or 1, heads or 1, L or 1, n): the first key of each range that a row may see
    first: Any = None
    stop: Any = None  #: likewise, after the last
    array: Any = None  #: bool, broadcasts to (..., H, L, S)
    by_rows: bool = False  #: whether the array is to be made by `Made`


def ends_of_band(problem: Problem) -> tuple[int | None, int | None]:
    """Return causal and window as numbers of the call, None where an end is not one."""
    ends = band(problem)
    if problem.query_offset is not None:  # it is part of them
        low, high = [end if end is None else max(-FAR, min(end, FAR)) for end in ends]
        return low, high
    return (None, None) if _is_wide(ends) else ends


def _is_wide(ends: tuple[int | None, int | None]) -> bool:
    """Return whether the sum of an end and an offset may be beyond `FAR` and before the keys."""
    return any(end is not None and abs(end) > FAR // 2 for end in ends)


def visible(problem: Problem, x: Operands) -> Visible:
    """Return the keys that rows see by ``mask=``, and by what `ends_of_band` leaves out."""
    ranges, array = Ranges(problem, x), None
    conditions: tuple[Any, ...] = ()
    left: list[Any] = []
    if isinstance(x.mask, Mask):
        conditions = x.mask.conditions
    elif x.mask is not None:
        array = x.mask
    if problem.query_offset is None and problem.band is not None and _is_wide(band(problem)):
        conditions = (*conditions, problem.band)
    read: Any = None  # the condition that the array says
    for mask in conditions:
        if array is None and kind_of(mask) == "dense":
            read, array = mask, mask.array
        elif ranges.add(mask):
            continue
        elif array is None and (view := _view_of(problem, x, mask)) is not None:
            read, array = mask, view
        else:
            left.append(mask)
    first, stop = (
        None if end is None else end[:, None, :, None] for end in (ranges.first, ranges.stop)
    )
    if not left:
        return Visible(first, stop, array)
    ends = None
    if not any(kind_of(mask) == "dense" for mask in left):
        ends = _ends(problem, x, reduce(and_, [mask for mask in conditions if mask is not read]))
    return Visible(first, stop, by_rows=True) if ends is None else Visible(*ends, array)


def _view_of(problem: Problem, x: Operands, mask: Any) -> Any:
    """Return a mask as a view of a smaller array, None if it is none."""
    rows, keys = problem.query_length, problem.key_length
    is_whole = kind_of(mask) == "tree" and mask.first_row is None
    if is_whole and problem.query_offset == 0 == keys - rows:
        return np.asarray(mask.ancestors)[..., None, :, :]
    if not _goes_by_distance(mask):
        return None
    # A row shows what the row before it shows, one key later: so the rows are windows of one row.
    offset: Any = problem.query_offset
    item = np.zeros((1, 1, 1, 1), np.int64)
    if offset is None:
        offset = np.broadcast_to(np.asarray(x.query_offset)[..., 0, 0, 0], problem.batch)
        item, offset = np.arange(offset.size).reshape(*problem.batch, 1, 1, 1), offset.reshape(-1)
    at = PointIndices(item, item * 0, item * 0, np.arange(1 - rows, keys), offset=offset)
    line = mask.seen(at)
    return np.lib.stride_tricks.sliding_window_view(line[..., 0, :], keys, -1)[..., ::-1, :]


def _goes_by_distance(mask: Any) -> bool:
    """Return whether a mask is composed of dilations and windows only."""
    parts = mask.within()
    if not parts:
        is_bounded = kind_of(mask) == "window" and (mask.left, mask.right) != (None, None)
        return is_bounded or kind_of(mask) == "dilated"
    # A class of the caller's own may shift what is within it.
    is_composed = type(mask).__module__ == Mask.__module__
    return is_composed and all(map(_goes_by_distance, parts))


def _ends(problem: Problem, x: Operands, mask: Mask) -> tuple[Any, Any] | None:
    """Return the ends of the few ranges that a mask shows to each row, or None."""
    offset: Any = problem.query_offset
    if offset is None:
        offset = np.asarray(x.query_offset)[..., 0, 0, 0]
    lengths = problem.query_length, problem.key_length
    is_known = not mask.carried() and isinstance(offset, int)
    known = known_ends if is_known else known_ends.__wrapped__
    return known(mask, lengths, offset, problem.batch, problem.heads)


@lru_cache(maxsize=16)
def known_ends(
    mask: Mask, lengths: tuple[int, int], offset: Any, batch: tuple[int, ...], heads: int
) -> tuple[Any, Any] | None:
    """Return the ends of the few ranges that a mask shows to each row, or None."""
    found = mask.intervals(
        lengths, offset, batch=batch, heads=heads, most=MOST_RANGES, evaluates=False
    )
    return None if found is None else (found.first.astype("int32"), found.stop.astype("int32"))


def kind_of(expression: Expression) -> str:
    """Return the function of `polyattn.masks` or `polyattn.scores` that makes an expression."""
    return getattr(expression, "name", "")


class Ranges:
    """The first and last keys of the rows, narrowed by one mask after the other."""

    def __init__(self, problem: Problem, x: Operands, library: Any = np) -> None:
        self.problem, self.x, self.xp = problem, x, library
        self.integer = library.asarray(0).dtype
        self.first: Any = None
        self.stop: Any = None

    def add(self, mask: Mask) -> bool:
        """Narrow the ranges by a mask; return False if it does not leave ranges."""
        narrow = _NARROWED_BY.get(kind_of(mask))
        return narrow is not None and narrow(self, mask) is not False

    def _narrow(self, first: Any, stop: Any, *, is_within: bool = False) -> None:
        """Narrow the ranges to ends, which may be beyond the keys unless `is_within`."""
        xp, keys = self.xp, self.problem.key_length
        if first is not None:
            first = first if is_within else xp.minimum(xp.maximum(first, 0), keys)
            first = first.astype("int32")
            self.first = first if self.first is None else xp.maximum(self.first, first)
        if stop is not None:
            stop = stop if is_within else xp.minimum(xp.maximum(stop, 0), keys)
            stop = stop.astype("int32")
            self.stop = stop if self.stop is None else xp.minimum(self.stop, stop)

    def _positions(self, shift: int) -> Any:
        """Return the position of each row plus `shift`, limited to the keys, (items or 1, L)."""
        problem = self.problem
        offset: Any = problem.query_offset
        if offset is None:
            given: Any = self.x.query_offset
            offset = self._by_item(given[..., 0, 0, 0])
        limit = problem.query_length + problem.key_length
        first = saturating_sum(offset, shift, self.xp, self.integer, limit)
        return self.xp.asarray(first).reshape(-1, 1) + self._rows()

    def _rows(self) -> Any:
        return self.xp.arange(self.problem.query_length, dtype=self.integer)[None, :]

    def _numbers(self, lengths: Any) -> Any:
        if isinstance(lengths, int):
            return self.xp.full((1, 1), min(lengths, 2**31 - 1), self.integer)
        counts = saturating_sum(self._by_item(lengths), 0, self.xp, self.integer, 2**31 - 1)
        return counts.reshape(-1, 1)

    def _by_item(self, array: Any) -> Any:
        """Return a number for each flat batch item, or one for all."""
        array = self.xp.asarray(array)
        return array if array.size == 1 else self.xp.broadcast_to(array, self.problem.batch)

    def _by_window(self, mask: Any) -> None:
        self._narrow(
            None if mask.left is None else self._positions(-mask.left),
            None if mask.right is None else self._positions(mask.right + 1),
        )

    def _by_prefix(self, mask: Any) -> None:
        self._narrow(None, self._numbers(mask.lengths))

    def _by_padding(self, mask: Any) -> None:
        if mask.key_lengths is not None:
            self._narrow(None, self._numbers(mask.key_lengths))
        if mask.query_lengths is not None:
            inside = self._rows() < self._numbers(mask.query_lengths)
            self._narrow(None, self.xp.where(inside, self.problem.key_length, 0))

    def _by_segments(self, mask: Any) -> bool:
        rows = np.asarray(mask.query_ids)
        keys = rows if mask.key_ids is None else np.asarray(mask.key_ids)
        if rows.dtype.kind != keys.dtype.kind and "u" in rows.dtype.kind + keys.dtype.kind:
            return False
        if (keys[..., 1:] < keys[..., :-1]).any():
            return False
        self._narrow(*_bounds(self._per_token(rows), self._per_token(keys)), is_within=True)
        return True

    def _per_token(self, ids: Any) -> Any:
        """Return the id of each token of each flat batch item, or those that all items share."""
        lead, batch = ids.shape[:-1], self.problem.batch
        if lead != batch and math.prod(lead) != 1:
            ids = np.broadcast_to(ids, (*batch, ids.shape[-1]))
        return ids.reshape(-1, ids.shape[-1])


def _bounds(rows: Any, keys: Any) -> tuple[Any, Any]:
    """Return the first key with the id of each row, and the one after the last.

    The ids (items or 1, L) and (items or 1, S) of the keys are sorted. Those of an item are moved
    above those of the one before, so that all are sorted as one::

        0 0 1 | 0 1 1   ->   0 0 1 2 3 3
    """
    if len(keys) == 1:
        (one,) = keys
        return one.searchsorted(rows, "left"), one.searchsorted(rows, "right")
    ends = [int(end) for ids in (rows, keys) for end in (ids.min(), ids.max())]
    low, span = min(ends), max(ends) - min(ends) + 1
    if max(map(abs, ends)) >= FAR or span * len(keys) >= FAR:  # their order is enough
        ids = np.concatenate([rows.reshape(-1), keys.reshape(-1)])
        found, places = np.unique(ids, return_inverse=True)
        rows, keys = (
            places[: rows.size].reshape(rows.shape),
            places[rows.size :].reshape(keys.shape),
        )
        low, span = 0, len(found)
    item = np.arange(len(keys))[:, None]
    rows, keys = (x.astype("int64") + (item * span - low) for x in (rows, keys))
    before = item * keys.shape[-1]
    first, stop = (keys.reshape(-1).searchsorted(rows, side) for side in ("left", "right"))
    return first - before, stop - before


# By the name of the function that makes the mask; the others narrow nothing.
_NARROWED_BY: dict[str, Callable[[Ranges, Any], bool | None]] = {
    "window": Ranges._by_window,
    "prefix": Ranges._by_prefix,
    "padding": Ranges._by_padding,
    "segments": Ranges._by_segments,
}


class Made:
    """A mask that is made as an array for some rows at a time, where tiles are mixed."""

    def __init__(self, problem: Problem, x: Operands) -> None:
        self.problem, self.x = problem, x
        grid = TileGrid(problem, x, xp, TILE, x.query)
        # The library hides what causal and window do: a tile that they cut may be full by itself.
        own = problem._replace(is_causal=False, window=(None, None))
        some: Any = grid.of(combined_mask(problem, x)).any_visible  # type: ignore[arg-type]
        every: Any = grid.of(combined_mask(own, x)).all_visible  # type: ignore[arg-type]
        # Of all items and heads.
        some, every = (
            fold(seen, axis=tuple(range(seen.ndim - 2)))
            for fold, seen in ((np.any, some), (np.all, every))
        )
        tiles = some & every, some & ~every
        self._full, self._mixed = (_runs(flags, problem.key_length) for flags in tiles)
        self._lead = self._seen(Span(0, 1), Span(0, 1)).shape[:-2]
        self.bytes_per_row = max(1, math.prod(self._lead) * problem.key_length)

    def _seen(self, rows: Span, keys: Span) -> Any:
        at = Indices(self.problem, xp, self.x, rows, keys)
        return reduce(and_, at.visible(banded=False))

    def array_of(self, rows: Span) -> Any:
        """Return the mask of rows from the first of a tile on: bool, broadcasts to (..., H, l, S).

        Of tiles that no row sees by causal and window too, it is False.
        """
        high, wide = TILE
        keys = self.problem.key_length
        made = np.zeros((*self._lead, rows.length, keys), bool)
        at_once = max(1, AT_ONCE * keys // (high * wide * self.bytes_per_row)) * wide
        for strip in rows.split(high):
            of_strip = made[..., strip.start - rows.start : strip.stop - rows.start, :]
            for full in self._full[strip.start // high]:
                of_strip[..., full.start : full.stop] = True
            for mixed in self._mixed[strip.start // high]:
                for span in mixed.split(at_once):
                    of_strip[..., span.start : span.stop] = self._seen(strip, span)
        return made


def _runs(flags: Any, keys: int) -> list[list[Span]]:
    """Return the keys of each run of tiles whose flag is true, for each strip of tiles."""
    strips, edges = np.nonzero(np.diff(flags, prepend=False, append=False))
    edges = np.minimum(edges * TILE[1], keys)
    runs: list[list[Span]] = [[] for _ in flags]
    for strip, *run in zip(
        *(x.tolist() for x in (strips[::2], edges[::2], edges[1::2])), strict=True
    ):
        runs[strip].append(Span(*run))
    return runs
