"""Sets of keys as a few intervals for each row, which masks make and compositions join.

An interval is a first key and the one after the last; the intervals of a row are in order and do
not touch. A row with fewer than others ends with empty ones. So no array of all rows and keys is
made::

    causal() & (window(1, 0) | prefix(1)), 4 tokens     first       stop
    x . . .                                             [[0, 4],    [[1, 4],
    x x . .                                              [0, 4],     [2, 4],
    x x x .                                              [0, 4],     [3, 4],
    x . x x                                              [0, 2]]     [1, 4]]
"""

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple

import numpy as np

from polyattn._base.arrays import Array
from polyattn._core.expressions.indices import PointIndices

#: Positions beyond it could overflow when a window is added: they are left to the elements.
FARTHEST = 2**61
#: The elements of a mask that are evaluated at once.
AT_ONCE = 2**22


class Intervals(NamedTuple):
    """The intervals of keys that each row sees, int64 (items or 1, heads or 1, L, n)."""

    first: Array
    stop: Array


class TooManyError(Exception):
    """A row sees more intervals than are asked for, or only the elements say which."""


class Rows(NamedTuple):
    """The rows of a call and how many keys there are, as masks count them."""

    batch: tuple[int, ...]
    heads: int
    length: int
    keys: int
    offset: Any  # of the first row among the keys: a number, or one for each flat batch item
    position: Array  # of each row, (items or 1, 1, L)
    most: int  # intervals of a row
    evaluates: bool  # whether masks may be evaluated that are known by their elements

    def per_item(self, numbers: Any) -> Array:
        """Return the number of each flat item, (items or 1, 1, 1)."""
        numbers = as_int64(numbers)
        if numbers.size != 1:
            numbers = np.broadcast_to(numbers, self.batch)
        return numbers.reshape(-1, 1, 1)

    def per_token(self, numbers: Any) -> Array:
        """Return the number of each token of each flat item, (items or 1, tokens)."""
        numbers = np.asarray(numbers)
        if math.prod(numbers.shape[:-1]) != 1:
            numbers = np.broadcast_to(numbers, (*self.batch, numbers.shape[-1]))
        return numbers.reshape(-1, numbers.shape[-1])

    # ---- sets ----

    def packed(self, first: Array, stop: Array) -> Intervals:
        """Limit intervals, which do not overlap, to the keys, and leave out the empty ones."""
        first, stop = (np.clip(end, 0, self.keys) for end in np.broadcast_arrays(first, stop))
        is_empty = first >= stop
        first, stop = (np.where(is_empty, self.keys, end) for end in (first, stop))
        if first.shape[-1] > 1:
            order = np.argsort(first, axis=-1, kind="stable")
            first, stop = (np.take_along_axis(end, order, axis=-1) for end in (first, stop))
            count = max(1, int((~is_empty).sum(axis=-1).max(initial=0)))
            if count > self.most:
                raise TooManyError
            first, stop = first[..., :count], stop[..., :count]
        return Intervals(first, stop)

    def one(self, first: Any, stop: Any) -> Intervals:
        """Return one interval for each row."""
        return self.packed(*[np.asarray(end).reshape(*np.shape(end), 1) for end in (first, stop)])

    def both(self, one: Intervals, other: Intervals) -> Intervals:
        """Return the keys that are in both sets."""
        first = np.maximum(one.first[..., :, None], other.first[..., None, :])
        stop = np.minimum(one.stop[..., :, None], other.stop[..., None, :])
        shape = (*first.shape[:-2], first.shape[-2] * first.shape[-1])
        return self.packed(first.reshape(shape), stop.reshape(shape))

    def complement(self, one: Intervals) -> Intervals:
        """Return the keys between intervals."""
        end = np.full((*one.first.shape[:-1], 1), self.keys)
        first = np.concatenate([np.zeros_like(end), one.stop], axis=-1)
        return self.packed(first, np.concatenate([one.first, end], axis=-1))

    def either(self, one: Intervals, other: Intervals) -> Intervals:
        """Return the keys that are in one set or the other."""
        free = self._replace(most=(self.most + 1) ** 2)  # gaps are one more than intervals
        return self.complement(free.both(free.complement(one), free.complement(other)))

    # ---- what masks are made of ----

    def multiples(self, step: int, within: Intervals | None) -> Intervals:
        """Return each key whose distance from the row is a multiple of `step`, within a set."""
        least: Any = 0
        end: Any = np.asarray(self.keys)
        if within is not None:
            least = within.first[..., 0]
            end = within.stop.max(axis=-1, where=within.first < within.stop, initial=0)
        first = least + (self.position - least) % step
        count = int(((end - first + step - 1) // step).max(initial=0))
        if count > self.most:
            raise TooManyError
        keys = first[..., None] + step * np.arange(max(1, count))
        return self.packed(keys, np.where(keys < end[..., None], keys + 1, 0))

    def of_ids(self, of_rows: Array, of_keys: Array) -> Intervals:
        """Return the keys with the id of each row, from ids (items or 1, L) and (items or 1, S)."""
        if of_rows.dtype.kind != of_keys.dtype.kind:
            of_rows, of_keys = as_int64(of_rows), as_int64(of_keys)
        items = range(max(len(of_rows), len(of_keys)))
        found = [self._of_item(of_rows[n % len(of_rows)], of_keys[n % len(of_keys)]) for n in items]
        return self._stacked(found)

    def _of_item(self, of_rows: Any, of_keys: Any) -> Intervals:
        """Return the runs of keys with the id of each row, of one batch item: (L, n)."""
        begins = np.flatnonzero(np.concatenate([[True], of_keys[1:] != of_keys[:-1]]))
        begins = begins[: of_keys.size]
        ends = np.concatenate([begins[1:], [of_keys.size]])[: begins.size]
        order = np.argsort(of_keys[begins], kind="stable")
        ids = of_keys[begins][order]
        low, high = (np.searchsorted(ids, of_rows, side)[:, None] for side in ("left", "right"))
        count = int((high - low).max(initial=0))
        if count > self.most:
            raise TooManyError
        at = low + np.arange(max(1, count))
        at = np.where(at < high, at, len(order))
        return Intervals(*[np.append(x[order], self.keys)[at] for x in (begins, ends)])

    def by_position(self, of_keys: Array, seen: Intervals) -> Intervals:
        """Return the keys whose positions (items or 1, S) are in intervals of positions.

        Keys whose positions fall begin another run, as those of a rolling cache do once.
        """
        found = []
        for item in range(max(len(of_keys), len(seen.first))):
            positions = of_keys[item % len(of_keys)]
            ends = [end[item % len(end), 0] for end in seen]
            first, stop = (np.broadcast_to(end, (self.length, end.shape[-1])) for end in ends)
            starts = np.flatnonzero(positions[1:] < positions[:-1]) + 1
            bounds = [0, *starts.tolist(), self.keys]
            if len(bounds) - 1 > self.most:
                raise TooManyError
            parts = [
                [a + np.searchsorted(positions[a:b], end, "left") for end in (first, stop)]
                for a, b in itertools.pairwise(bounds)
            ]
            found.append(Intervals(*[np.concatenate(x, -1) for x in zip(*parts, strict=True)]))
        free = self._replace(most=self.most**2 + 1)
        # Intervals of positions that no key has between them are one.
        return self.complement(free.complement(free.packed(*self._stacked(found))))

    def _stacked(self, found: list[Intervals]) -> Intervals:
        """Return the intervals (L, n) of all batch items as one array."""
        widest = max([1, *(one.first.shape[-1] for one in found)])
        first, stop = np.full((2, max(1, len(found)), 1, self.length, widest), self.keys)
        for item, one in enumerate(found):
            first[item, 0, :, : one.first.shape[-1]] = one.first
            stop[item, 0, :, : one.stop.shape[-1]] = one.stop
        return Intervals(first, stop)

    # ---- elements ----

    def of_elements(self, mask: Any) -> Intervals:
        """Evaluate a mask, some rows at a time."""
        if not self.evaluates or not self.length:
            raise TooManyError
        items = math.prod(self.batch)
        b = np.arange(items).reshape(-1, 1, 1, 1)
        h = np.arange(self.heads).reshape(-1, 1, 1)
        keys = np.arange(self.keys).reshape(1, -1)
        most_rows = max(1, AT_ONCE // max(1, items * self.heads * self.keys))
        found = []
        for start in range(0, self.length, most_rows):
            i = np.arange(start, min(start + most_rows, self.length)).reshape(-1, 1)
            at = PointIndices(b, h, i, keys, offset=self.offset, batch=self.batch)
            seen = np.asarray(mask.seen(at))
            seen = seen.reshape((1,) * (4 - seen.ndim) + seen.shape)
            seen = np.broadcast_to(seen, (*seen.shape[:2], i.size, self.keys))
            found.append(self._runs(seen))
        widest = max(one.first.shape[-1] for one in found)
        whole = [
            [np.pad(end, [(0, 0)] * 3 + [(0, widest - end.shape[-1])], constant_values=self.keys)
             for end in one]
            for one in found
        ]  # fmt: skip
        return Intervals(*[np.concatenate(ends, axis=2) for ends in zip(*whole, strict=True)])

    def _runs(self, seen: Array) -> Intervals:
        """Return the runs of True in each row."""
        edges = np.diff(seen.astype(np.int8), axis=-1, prepend=0, append=0)
        lines = math.prod(seen.shape[:-1])
        row, first = np.nonzero(edges.reshape(lines, -1) == 1)
        stop = np.nonzero(edges.reshape(lines, -1) == -1)[1]
        counts = np.bincount(row, minlength=lines)
        count = max(1, int(counts.max(initial=0)))
        if count > self.most:
            raise TooManyError
        slot = np.arange(row.size) - np.repeat(np.cumsum(counts) - counts, counts)
        ends = np.full((2, lines, count), self.keys)
        ends[0, row, slot], ends[1, row, slot] = first, stop
        return Intervals(*ends.reshape(2, *seen.shape[:-1], count))


def rows_of(
    batch: tuple[int, ...],
    heads: int,
    lengths: tuple[int, int],
    offset: Any,
    most: int,
    evaluates: bool,
) -> Rows:
    """Return the rows of a call; `offset` is a number, or broadcasts to the batch axes."""
    if not isinstance(offset, int):
        offset = np.clip(as_int64(offset), -FARTHEST, FARTHEST)
        offset = np.broadcast_to(offset, batch).reshape(-1) if offset.size != 1 else offset.item()
    position = np.arange(lengths[0])[None, None] + np.reshape(offset, (-1, 1, 1))
    return Rows(batch, heads, *lengths, offset, position, most, evaluates)


def as_int64(numbers: Any) -> Array:
    """Return integers of any dtype as int64; larger ones are beyond all keys anyway."""
    numbers = np.asarray(numbers)
    if numbers.dtype.kind == "u" and numbers.dtype.itemsize == 8:
        numbers = np.minimum(numbers, np.uint64(2 * FARTHEST))
    return numbers.astype(np.int64)


def farthest(numbers: Array) -> int:
    """Return the greatest absolute value of integers."""
    return max(abs(int(end)) for end in (numbers.min(initial=0), numbers.max(initial=0)))
