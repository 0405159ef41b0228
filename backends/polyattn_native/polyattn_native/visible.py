"""The keys that rows see, as the compiled library takes them.

Masks of lengths, prefixes, windows and sorted ids are a first and a last key for each row, and
compositions of them a few such ranges; an array is read in place. All others are computed as an
array, for some rows at a time.
"""

from __future__ import annotations

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

    #: int32 (items or 1, heads or 1, L, n): the first key of each range that a row may see
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
    if problem.query_offset is None and problem.band is not None and _is_wide(band(problem)):
        ranges.add(problem.band)
    conditions: tuple[Any, ...] = ()
    left: list[Any] = []
    if isinstance(x.mask, Mask):
        conditions = x.mask.conditions
    elif x.mask is not None:
        array = x.mask
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
    composed = reduce(and_, [mask for mask in conditions if kind_of(mask) != "dense"])
    ends = _ends(problem, x, composed)
    if ends is None or sum(kind_of(mask) == "dense" for mask in conditions) > 1:
        return Visible(first, stop, by_rows=True)
    return Visible(*ends, array)


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

    def _narrow(self, first: Any, stop: Any) -> None:
        xp, keys = self.xp, self.problem.key_length
        if first is not None:
            first = xp.clip(first, 0, keys).astype("int32")
            self.first = first if self.first is None else xp.maximum(self.first, first)
        if stop is not None:
            stop = xp.clip(stop, 0, keys).astype("int32")
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
        lead = np.broadcast_shapes(rows.shape[:-1], keys.shape[:-1])
        if lead:
            lead = self.problem.batch
        rows = np.broadcast_to(rows, (*lead, rows.shape[-1])).reshape(-1, rows.shape[-1])
        keys = np.broadcast_to(keys, (*lead, keys.shape[-1])).reshape(-1, keys.shape[-1])
        pairs = list(zip(keys, rows, strict=True))
        self._narrow(
            *[
                np.stack([np.searchsorted(k, r, side) for k, r in pairs])
                for side in ("left", "right")
            ]
        )
        return True


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
