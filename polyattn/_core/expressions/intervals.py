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

from polyattn._base.arrays import Array
from polyattn._core.expressions.indices import PointIndices

#: Positions beyond it could overflow when a window is added: they are left to the elements.
FARTHEST = 2**61
#: The elements of a mask that are evaluated at once.
AT_ONCE = 2**22


class Intervals(NamedTuple):
    """The intervals of keys that each row sees, int64 (items or 1, heads or 1, L or 1, n)."""

    first: Array
    stop: Array

    def band(self) -> tuple[int | None, int | None, int, int] | None:
        """Return low, high, start and stop where row i sees i + low <= j <= i + high of some keys.

        These are start <= j < stop, and an end of the band that hides no key is None. The
        result is None for other masks, and where no row sees a key.
        """
        seen = self.first < self.stop
        if seen.shape[:2] != (1, 1) or seen.shape[3] != 1 or not seen.any():
            return None
        xp = self.first.__array_namespace__()
        first, stop, seen = (x[0, 0, :, 0] for x in (self.first, self.stop, seen))
        start, end = int(first[seen].min()), int(stop[seen].max())
        row, low, high = xp.arange(first.size), None, None
        if (is_inside := seen & (first > start)).any():
            low = int((first - row)[is_inside][0])
        if (is_inside := seen & (stop < end)).any():
            high = int((stop - row)[is_inside][0]) - 1
        least = start if low is None else xp.maximum(start, row + low)
        most = end if high is None else xp.minimum(end, row + high + 1)
        is_band = xp.where(seen, (first == least) & (stop == most), least >= most).all()
        return (low, high, start, end) if is_band else None

    def documents(self, length: int) -> tuple[Array, Array, bool] | None:
        """Return cu_seqlens of L queries and of keys, int32, and whether documents are causal.

        That is for functions of packed sequences. A causal row counts from the last row and key of
        its document. The result is None for masks that are not one document after the other, and
        where items or heads differ. Rows at the end without keys are a document without keys.
        """
        if (self.first.shape[:2], self.first.shape[3]) != ((1, 1), 1) or not length:
            return None
        xp = self.first.__array_namespace__()
        first, stop = (xp.broadcast_to(end[0, 0, :, 0], length) for end in self)
        last = stop.max(where=first < stop, initial=0)
        first, stop = (xp.where(first < stop, end, last) for end in (first, stop))
        starts = xp.flatnonzero(xp.diff(first, prepend=-1))
        rows = xp.append(starts, first.size)
        keys = xp.append(first[starts], last)
        document = xp.arange(starts.size).repeat(xp.diff(rows))
        ends, after = keys[1:][document], rows[1:][document] - xp.arange(first.size) - 1
        is_full = (stop == ends).all()
        is_causal = (stop == xp.maximum(first, ends - after)).all()
        if keys[0] or (xp.diff(keys) < 0).any() or not (is_full or is_causal):
            return None
        return rows.astype("int32"), keys.astype("int32"), not is_full

    def tiles(self, lengths: tuple[int, int], size: tuple[int, int]) -> tuple[Array, Array]:
        """Return whether any and whether all keys of each tile are seen, for L, S and their tile.

        Both are bool, (items or 1, heads or 1, tiles down, tiles across).
        """
        xp = self.first.__array_namespace__()
        lead, (length, keys) = self.first.shape[:2], lengths
        first, stop = (xp.broadcast_to(end, (*lead, length, end.shape[-1])) for end in self)
        down, across = -(-length // size[0]), -(-keys // size[1])
        line = xp.arange(math.prod(lead)).reshape(*lead, 1, 1) * down
        line = line + (xp.arange(length) // size[0])[:, None]

        def counted(begin: Array, end: Array) -> Array:
            """Count for each tile the intervals that have it, from one tile to another."""
            is_one, many = (first < stop) & (begin < end), math.prod(lead) * down * (across + 1)
            begins, ends = (
                xp.bincount((line * (across + 1) + at)[is_one], minlength=many)
                for at in (begin, end)
            )
            return (begins - ends).reshape(*lead, down, -1)[..., :-1].cumsum(-1)

        some = counted(first // size[1], -(-stop // size[1])) > 0
        whole = xp.where(stop == keys, across, stop // size[1])
        rows = xp.minimum(size[0], length - xp.arange(down) * size[0])[:, None]
        return some, counted(-(-first // size[1]), whole) == rows


class TooManyError(Exception):
    """A row sees more intervals than are asked for, or only the elements say which."""


class Rows(NamedTuple):
    """The rows of a call and how many keys there are, as masks count them."""

    xp: Any  # NumPy, which is imported when intervals are asked for
    batch: tuple[int, ...]
    heads: int
    length: int
    keys: int
    offset: Any  # of the first row among the keys: a number, or one for each flat batch item
    position: Array  # of each row, (items or 1, 1, L)
    most: int  # intervals of a row on the way to the answer, which `Mask.intervals` counts itself
    evaluates: bool  # whether masks may be evaluated that are known by their elements
    is_far: bool  # whether a position could overflow, so that only the elements say what is seen

    def per_item(self, numbers: Any) -> Array:
        """Return the number of each flat item, (items or 1, 1, 1)."""
        numbers = self.integers(numbers)
        if numbers.size != 1:
            numbers = self.xp.broadcast_to(numbers, self.batch)
        return numbers.reshape(-1, 1, 1)

    def per_token(self, numbers: Any) -> Array:
        """Return the number of each token of each flat item, (items or 1, tokens)."""
        numbers = self.xp.asarray(numbers)
        if math.prod(numbers.shape[:-1]) != 1:
            numbers = self.xp.broadcast_to(numbers, (*self.batch, numbers.shape[-1]))
        return numbers.reshape(-1, numbers.shape[-1])

    def integers(self, numbers: Any) -> Array:
        """Return integers of any dtype as int64."""
        return _integers(self.xp, numbers)

    # ---- sets ----

    def packed(self, first: Array, stop: Array) -> Intervals:
        """Limit intervals, which do not overlap, to the keys, and leave out the empty ones."""
        first, stop = (
            self.xp.clip(end, 0, self.keys) for end in self.xp.broadcast_arrays(first, stop)
        )
        is_empty = first >= stop
        first, stop = (self.xp.where(is_empty, self.keys, end) for end in (first, stop))
        if first.shape[-1] > 1:
            order = self.xp.argsort(first, axis=-1, kind="stable")
            first, stop = (self.xp.take_along_axis(end, order, axis=-1) for end in (first, stop))
            count = max(1, int((~is_empty).sum(axis=-1).max(initial=0)))
            if count > self.most:
                raise TooManyError
            first, stop = first[..., :count], stop[..., :count]
        return Intervals(first, stop)

    def one(self, first: Any, stop: Any) -> Intervals:
        """Return one interval for each row."""
        return self.packed(
            *[self.xp.asarray(end).reshape(*self.xp.shape(end), 1) for end in (first, stop)]
        )

    def both(self, one: Intervals, other: Intervals) -> Intervals:
        """Return the keys that are in both sets."""
        first = self.xp.maximum(one.first[..., :, None], other.first[..., None, :])
        stop = self.xp.minimum(one.stop[..., :, None], other.stop[..., None, :])
        shape = (*first.shape[:-2], first.shape[-2] * first.shape[-1])
        return self.packed(first.reshape(shape), stop.reshape(shape))

    def complement(self, one: Intervals) -> Intervals:
        """Return the keys between intervals."""
        end = self.xp.full((*one.first.shape[:-1], 1), self.keys)
        first = self.xp.concatenate([self.xp.zeros_like(end), one.stop], axis=-1)
        return self.packed(first, self.xp.concatenate([one.first, end], axis=-1))

    def either(self, one: Intervals, other: Intervals) -> Intervals:
        """Return the keys that are in one set or the other."""
        free = self._replace(most=(self.most + 1) ** 2)  # gaps are one more than intervals
        return self.complement(free.both(free.complement(one), free.complement(other)))

    # ---- what masks are made of ----

    def multiples(self, step: int, within: Intervals | None) -> Intervals:
        """Return each key whose distance from the row is a multiple of `step`, within a set."""
        least: Any = 0
        end: Any = self.xp.asarray(self.keys)
        if within is not None:
            least = within.first[..., 0]
            end = within.stop.max(axis=-1, where=within.first < within.stop, initial=0)
        first = least + (self.position - least) % step
        count = int(((end - first + step - 1) // step).max(initial=0))
        if count > self.most:
            raise TooManyError
        keys = first[..., None] + step * self.xp.arange(max(1, count))
        return self.packed(keys, self.xp.where(keys < end[..., None], keys + 1, 0))

    def of_ids(self, of_rows: Array, of_keys: Array) -> Intervals:
        """Return the keys with the id of each row, from ids (items or 1, L) and (items or 1, S)."""
        if of_rows.dtype.kind != of_keys.dtype.kind:
            of_rows, of_keys = self.integers(of_rows), self.integers(of_keys)
        items = range(max(len(of_rows), len(of_keys)))
        found = [self._of_item(of_rows[n % len(of_rows)], of_keys[n % len(of_keys)]) for n in items]
        return self._stacked(found)

    def _of_item(self, of_rows: Any, of_keys: Any) -> Intervals:
        """Return the runs of keys with the id of each row, of one batch item: (L, n)."""
        begins = self.xp.flatnonzero(self.xp.concatenate([[True], of_keys[1:] != of_keys[:-1]]))
        begins = begins[: of_keys.size]
        ends = self.xp.concatenate([begins[1:], [of_keys.size]])[: begins.size]
        order = self.xp.argsort(of_keys[begins], kind="stable")
        ids = of_keys[begins][order]
        low, high = (
            self.xp.searchsorted(ids, of_rows, side)[:, None] for side in ("left", "right")
        )
        count = int((high - low).max(initial=0))
        if count > self.most:
            raise TooManyError
        at = low + self.xp.arange(max(1, count))
        at = self.xp.where(at < high, at, len(order))
        return Intervals(*[self.xp.append(x[order], self.keys)[at] for x in (begins, ends)])

    def of_lists(self, lists: Array, size: int, first: int) -> Intervals:
        """Return the keys of the blocks in ascending lists (items, heads, L, K), as runs of them.

        A block has `size` keys, and `first` is the number of the first key.
        """
        xp = self.xp
        is_one = (lists >= 0) & (lists * size < first + self.keys) & ((lists + 1) * size > first)
        follows = is_one[..., 1:] & is_one[..., :-1] & (lists[..., 1:] - lists[..., :-1] <= 1)
        edge = xp.zeros((*lists.shape[:-1], 1), bool)
        begins = is_one & ~xp.concatenate([edge, follows], -1)[..., : lists.shape[-1]]
        ends = is_one & ~xp.concatenate([follows, edge], -1)[..., : lists.shape[-1]]
        count = int(begins.sum(-1).max(initial=0))
        if count > self.most:
            raise TooManyError
        if not count:
            return self.one(xp.zeros((*lists.shape[:-2], self.length), int), 0)
        # The nth run begins at the nth of the first and ends at the nth of the last.
        bounds = [
            xp.sort(xp.where(which, keys - first, self.keys + size), -1)[..., :count]
            for which, keys in ((begins, lists * size), (ends, (lists + 1) * size))
        ]
        return self.packed(*bounds)

    def by_position(self, of_keys: Array, seen: Intervals) -> Intervals:
        """Return the keys whose positions (items or 1, S) are in intervals of positions.

        Keys whose positions fall begin another run, as those of a rolling cache do once.
        """
        found = []
        for item in range(max(len(of_keys), len(seen.first))):
            positions = of_keys[item % len(of_keys)]
            ends = [end[item % len(end), 0] for end in seen]
            first, stop = (self.xp.broadcast_to(end, (self.length, end.shape[-1])) for end in ends)
            starts = self.xp.flatnonzero(positions[1:] < positions[:-1]) + 1
            bounds = [0, *starts.tolist(), self.keys]
            if len(bounds) - 1 > self.most:
                raise TooManyError
            parts = [
                [a + self.xp.searchsorted(positions[a:b], end, "left") for end in (first, stop)]
                for a, b in itertools.pairwise(bounds)
            ]
            found.append(Intervals(*[self.xp.concatenate(x, -1) for x in zip(*parts, strict=True)]))
        free = self._replace(most=self.most**2 + 1)
        # Intervals of positions that no key has between them are one.
        return self.complement(free.complement(free.packed(*self._stacked(found))))

    def _stacked(self, found: list[Intervals]) -> Intervals:
        """Return the intervals (L, n) of all batch items as one array."""
        widest = max([1, *(one.first.shape[-1] for one in found)])
        first, stop = self.xp.full((2, max(1, len(found)), 1, self.length, widest), self.keys)
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
        b = self.xp.arange(items).reshape(-1, 1, 1, 1)
        h = self.xp.arange(self.heads).reshape(-1, 1, 1)
        keys = self.xp.arange(self.keys).reshape(1, -1)
        most_rows = max(1, AT_ONCE // max(1, items * self.heads * self.keys))
        found = []
        for start in range(0, self.length, most_rows):
            i = self.xp.arange(start, min(start + most_rows, self.length)).reshape(-1, 1)
            at = PointIndices(b, h, i, keys, offset=self.offset, batch=self.batch)
            seen = self.xp.asarray(mask.seen(at))
            seen = seen.reshape((1,) * (4 - seen.ndim) + seen.shape)
            seen = self.xp.broadcast_to(seen, (*seen.shape[:2], i.size, self.keys))
            found.append(self._runs(seen))
        widest = max(one.first.shape[-1] for one in found)

        def whole(end: Array) -> Array:
            more = [(0, 0)] * 3 + [(0, widest - end.shape[-1])]
            return self.xp.pad(end, more, constant_values=self.keys)

        ends = zip(*found, strict=True)
        return Intervals(*[self.xp.concatenate(list(map(whole, end)), axis=2) for end in ends])

    def _runs(self, seen: Array) -> Intervals:
        """Return the runs of True in each row."""
        edges = self.xp.diff(seen.astype(self.xp.int8), axis=-1, prepend=0, append=0)
        lines = math.prod(seen.shape[:-1])
        row, first = self.xp.nonzero(edges.reshape(lines, -1) == 1)
        stop = self.xp.nonzero(edges.reshape(lines, -1) == -1)[1]
        counts = self.xp.bincount(row, minlength=lines)
        count = max(1, int(counts.max(initial=0)))
        if count > self.most:
            raise TooManyError
        slot = self.xp.arange(row.size) - self.xp.repeat(self.xp.cumsum(counts) - counts, counts)
        ends = self.xp.full((2, lines, count), self.keys)
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
    import numpy as np

    if not isinstance(offset, int):
        offset = np.asarray(offset)
        offset = np.broadcast_to(offset, batch).reshape(-1) if offset.size != 1 else offset.item()
    is_far = farthest(np.asarray(offset)) > FARTHEST
    position = np.arange(lengths[0])[None, None]
    if not is_far:
        position = position + _integers(np, offset).reshape(-1, 1, 1)
    return Rows(np, batch, heads, *lengths, offset, position, most, evaluates, is_far)


def _integers(xp: Any, numbers: Any) -> Array:
    """Return integers of any dtype as int64; larger ones are beyond all keys anyway."""
    numbers = xp.asarray(numbers)
    if numbers.dtype.kind == "u" and numbers.dtype.itemsize == 8:
        numbers = xp.minimum(numbers, xp.uint64(2 * FARTHEST))
    return numbers.astype(xp.int64)


def farthest(numbers: Array) -> int:
    """Return the greatest absolute value of integers."""
    return max(abs(int(end)) for end in (numbers.min(initial=0), numbers.max(initial=0)))
