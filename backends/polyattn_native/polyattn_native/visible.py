"""The keys that rows see, as the compiled library takes them.

Masks of lengths, prefixes, windows and sorted ids are a first and a last key for each row, and
compositions of them a few such ranges; an array is read in place. All others are computed as an
array, for some rows at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache, reduce
from operator import and_
from typing import Any, NamedTuple

import array_api_compat.numpy as xp
import numpy as np

from polyattn.plugin import (
    Expression,
    Indices,
    Mask,
    Operands,
    Problem,
    Span,
    band,
    saturating_sum,
)
from polyattn_native.arrays import FAR

#: The ranges that a row may have, as `src/interface.h` says.
MOST_RANGES = 8


class Visible(NamedTuple):
    """The keys that rows see, but for what numbers of the call say, such as most windows."""

    #: int32 (items or 1, heads or 1, L or 1, n): the first key of each range that a row may see
    first: Any = None
    stop: Any = None  #: likewise, after the last
    array: Any = None  #: bool, broadcasts to (..., H, L, S)
    by_rows: bool = False  #: whether the array is to be made by `array_of`


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
    for mask in conditions:
        if array is None and kind_of(mask) == "dense":
            array = mask.array
        elif not ranges.add(mask):
            left.append(mask)
    first, stop = (
        None if end is None else end[:, None, :, None] for end in (ranges.first, ranges.stop)
    )
    if not left:
        return Visible(first, stop, array)
    ends = None
    if not any(kind_of(mask) == "dense" for mask in left):
        composed = reduce(and_, [mask for mask in conditions if kind_of(mask) != "dense"])
        ends = _ends(problem, x, composed)
    return Visible(first, stop, by_rows=True) if ends is None else Visible(*ends, array)


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
        return self._by_item(lengths).reshape(-1, 1)

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


def array_of(problem: Problem, x: Operands, rows: Span) -> Any:
    """Return ``mask=`` for some rows as a bool array that broadcasts to (..., H, l, S)."""
    at = Indices(problem, xp, x, rows, Span(0, problem.key_length))
    return reduce(and_, at.visible(banded=False))


def bytes_per_row(problem: Problem, x: Operands) -> int:
    """Return how large `array_of` is for one row."""
    size: int = array_of(problem, x, Span(0, 1)).size
    return max(1, size)
