"""The keys that the rows of a mask see, as a few intervals for each row.

Each kind of mask gives its intervals by itself, and a composition joins them, so no array of all
rows and keys is made. Only a mask that is known by its elements (a function, an array, a tree) is
evaluated, some rows at a time. An interval is a first key and the one after the last; the intervals
of a row are in order and do not touch. A row with fewer than others ends with empty ones::

    causal() & (window(2, 0) | prefix(1)), 5 tokens     first       stop
    x . . . .                                           [[0, 5],    [[1, 5],
    x x . . .                                            [0, 5],     [2, 5],
    x x x . .                                            [0, 5],     [3, 5],
    x x x x .                                            [0, 5],     [4, 5],
    x . x x x                                            [0, 2]]     [1, 5]]
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from polyattn._base.arrays import Array
from polyattn._core.expressions.indices import INDEX_LIMIT, PointIndices
from polyattn._core.expressions.masks import And, DenseMask, Mask, Not, Or
from polyattn._core.expressions.patterns import (
    Band,
    Dilated,
    GlobalTokens,
    Padding,
    Positions,
    Prefix,
    Segments,
    runs_of,
)

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
    most: int
    evaluates: bool  # whether masks may be evaluated that are known by their elements

    @property
    def items(self) -> int:
        return math.prod(self.batch)

    def per_item(self, numbers: Any) -> Array:
        """Return the number of each flat item, (items or 1, 1, 1)."""
        numbers = _int64(numbers)
        if numbers.size != 1:
            numbers = np.broadcast_to(numbers, self.batch)
        return numbers.reshape(-1, 1, 1)

    def per_token(self, numbers: Any) -> Array:
        """Return the number of each token of each flat item, (items or 1, tokens)."""
        numbers = np.asarray(numbers)
        if math.prod(numbers.shape[:-1]) != 1:
            numbers = np.broadcast_to(numbers, (*self.batch, numbers.shape[-1]))
        return numbers.reshape(-1, numbers.shape[-1])


Within: TypeAlias = Intervals | None


def intervals_of(
    mask: Mask,
    batch: tuple[int, ...],
    heads: int,
    lengths: tuple[int, int],
    offset: Any,
    *,
    most: int,
    evaluates: bool = True,
) -> Intervals | None:
    """Return the intervals of a mask, at most `most` a row, or None if it has more.

    `offset` is the position of the first row: a number, or an array that broadcasts to the batch
    axes. Without `evaluates`, None also for a mask that only its elements know.
    """
    rows, keys = lengths
    if not isinstance(offset, int):
        offset = np.clip(_int64(offset), -FARTHEST, FARTHEST)
        offset = np.broadcast_to(offset, batch).reshape(-1) if offset.size != 1 else offset.item()
    position = np.arange(rows)[None, None] + np.reshape(offset, (-1, 1, 1))
    # Parts of a mask may have more intervals than the whole.
    call = Rows(batch, heads, rows, keys, offset, position, max(4 * most, 64), evaluates)
    try:
        found = _of(mask, call, None)
    except TooManyError:
        return None
    return found if found.first.shape[-1] <= most else None


def _of(mask: Mask, rows: Rows, within: Within) -> Intervals:
    """Return the intervals of a mask; beyond `within`, where it is given, any keys may be left."""
    known = _KNOWN.get(type(mask))
    if known is not None:
        return known(mask, rows, within)
    inner = getattr(mask, "mask", None)
    if type(mask).__name__ == "Compiled" and isinstance(inner, Mask):
        return _of(inner, rows, within)
    return _of_elements(mask, rows)


# ---- sets of intervals ----


def _int64(numbers: Any) -> Array:
    """Return integers of any dtype as int64; larger ones are beyond all keys anyway."""
    numbers = np.asarray(numbers)
    if numbers.dtype.kind == "u" and numbers.dtype.itemsize == 8:
        numbers = np.minimum(numbers, np.uint64(2 * FARTHEST))
    return numbers.astype(np.int64)


def _packed(first: Array, stop: Array, rows: Rows) -> Intervals:
    """Limit intervals to the keys, and leave out the empty ones; the others do not overlap."""
    first, stop = (np.clip(end, 0, rows.keys) for end in np.broadcast_arrays(first, stop))
    is_empty = first >= stop
    first, stop = (np.where(is_empty, rows.keys, end) for end in (first, stop))
    if first.shape[-1] > 1:
        order = np.argsort(first, axis=-1, kind="stable")
        first, stop = (np.take_along_axis(end, order, axis=-1) for end in (first, stop))
        count = max(1, int((~is_empty).sum(axis=-1).max(initial=0)))
        if count > rows.most:
            raise TooManyError
        first, stop = first[..., :count], stop[..., :count]
    return Intervals(first, stop)


def _one(first: Any, stop: Any, rows: Rows) -> Intervals:
    """Return one interval for each row."""
    return _packed(np.asarray(first)[..., None], np.asarray(stop)[..., None], rows)


def _everything(rows: Rows) -> Intervals:
    return _one(np.zeros((1, 1, 1), np.int64), rows.keys, rows)


def _both(one: Intervals, other: Intervals, rows: Rows) -> Intervals:
    first = np.maximum(one.first[..., :, None], other.first[..., None, :])
    stop = np.minimum(one.stop[..., :, None], other.stop[..., None, :])
    shape = (*first.shape[:-2], first.shape[-2] * first.shape[-1])
    return _packed(first.reshape(shape), stop.reshape(shape), rows)


def _complement(one: Intervals, rows: Rows) -> Intervals:
    """Return the keys between intervals."""
    end = np.full((*one.first.shape[:-1], 1), rows.keys)
    first = np.concatenate([np.zeros_like(end), one.stop], axis=-1)
    return _packed(first, np.concatenate([one.first, end], axis=-1), rows)


def _either(one: Intervals, other: Intervals, rows: Rows) -> Intervals:
    # Gaps are one more than intervals.
    free = rows._replace(most=(rows.most + 1) ** 2)
    gaps = _both(_complement(one, free), _complement(other, free), free)
    return _complement(gaps, rows)


# ---- masks ----


def _of_and(mask: And, rows: Rows, within: Within) -> Intervals:
    left: list[Mask] = list(mask.parts)
    # A mask of many intervals may have few where the others show keys.
    while left:
        later: list[Mask] = []
        for part in left:
            try:
                found = _of(part, rows, within)
            except TooManyError:
                later.append(part)
            else:
                within = found if within is None else _both(within, found, rows)
        if len(later) == len(left):
            raise TooManyError
        left = later
    assert within is not None
    return within


def _of_or(mask: Or, rows: Rows, within: Within) -> Intervals:
    found = [_of(part, rows, within) for part in mask.parts]
    return functools.reduce(functools.partial(_either, rows=rows), found)


def _of_not(mask: Not, rows: Rows, within: Within) -> Intervals:
    free = rows._replace(most=rows.most + 1)
    return _complement(_of(mask.mask, free, within), rows)


def _of_band(mask: Band, rows: Rows, within: Within) -> Intervals:
    far = 2 * FARTHEST
    first: Any = 0 if mask.left is None else rows.position - min(mask.left, far)
    stop: Any = rows.keys if mask.right is None else rows.position + 1 + min(mask.right, far)
    return _one(*np.broadcast_arrays(first, stop, rows.position[:1, :1, :1])[:2], rows)


def _of_prefix(mask: Prefix, rows: Rows, within: Within) -> Intervals:
    return _one(0, rows.per_item(mask.lengths), rows)


def _of_padding(mask: Padding, rows: Rows, within: Within) -> Intervals:
    stop: Any = rows.per_item(rows.keys if mask.key_lengths is None else mask.key_lengths)
    if mask.query_lengths is not None:
        inside = np.arange(rows.length) < rows.per_item(mask.query_lengths)
        stop = np.where(inside, stop, 0)
    return _one(0, stop, rows)


def _of_global_tokens(mask: GlobalTokens, rows: Rows, within: Within) -> Intervals:
    origin = rows.per_item(mask.first)
    runs = [(first - origin, last + 1 - origin) for first, last in runs_of(mask.positions)]
    if len(runs) > rows.most:
        raise TooManyError
    at = rows.position
    is_one = functools.reduce(np.logical_or, [(first <= at) & (at < stop) for first, stop in runs])
    first, stop = (np.stack(ends, axis=-1) for ends in zip(*runs, strict=True))
    first = np.where(is_one[..., None], 0, first)
    stop = np.where(is_one[..., None], [rows.keys] + [0] * (len(runs) - 1), stop)
    return _packed(first, stop, rows)


def _of_dilated(mask: Dilated, rows: Rows, within: Within) -> Intervals:
    step = min(mask.step, INDEX_LIMIT)
    if step == 1:
        return _everything(rows)
    least: Any = 0
    end: Any = np.asarray(rows.keys)
    if within is not None:
        least = within.first[..., 0]
        end = within.stop.max(axis=-1, where=within.first < within.stop, initial=0)
    first = least + (rows.position - least) % step
    count = int(((end - first + step - 1) // step).max(initial=0))
    if count > rows.most:
        raise TooManyError
    keys = first[..., None] + step * np.arange(max(1, count))
    return _packed(keys, np.where(keys < end[..., None], keys + 1, 0), rows)


def _of_segments(mask: Segments, rows: Rows, within: Within) -> Intervals:
    of_rows = rows.per_token(mask.query_ids)
    of_keys = of_rows if mask.key_ids is None else rows.per_token(mask.key_ids)
    if of_rows.dtype.kind != of_keys.dtype.kind:
        of_rows, of_keys = _int64(of_rows), _int64(of_keys)
    items = range(max(len(of_rows), len(of_keys)))
    found = [_of_ids(of_rows[n % len(of_rows)], of_keys[n % len(of_keys)], rows) for n in items]
    return _stacked(found, rows)


def _of_ids(of_rows: Array, of_keys: Array, rows: Rows) -> Intervals:
    """Return the runs of keys with the id of each row, of one batch item: (L, n)."""
    begins = np.flatnonzero(np.concatenate([[True], of_keys[1:] != of_keys[:-1]]))[: of_keys.size]
    ends = np.concatenate([begins[1:], [of_keys.size]])[: begins.size]
    order = np.argsort(of_keys[begins], kind="stable")
    ids = of_keys[begins][order]
    low, high = (np.searchsorted(ids, of_rows, side)[:, None] for side in ("left", "right"))
    count = int((high - low).max(initial=0))
    if count > rows.most:
        raise TooManyError
    at = low + np.arange(max(1, count))
    begins, ends = (np.append(x[order], rows.keys) for x in (begins, ends))
    at = np.where(at < high, at, len(order))
    return Intervals(begins[at], ends[at])


def _stacked(found: list[Intervals], rows: Rows) -> Intervals:
    """Return the intervals (L, n) of all batch items as one array."""
    widest = max([1, *(one.first.shape[-1] for one in found)])
    first, stop = np.full((2, max(1, len(found)), 1, rows.length, widest), rows.keys)
    for item, one in enumerate(found):
        first[item, 0, :, : one.first.shape[-1]] = one.first
        stop[item, 0, :, : one.stop.shape[-1]] = one.stop
    return Intervals(first, stop)


def _of_positions(mask: Positions, rows: Rows, within: Within) -> Intervals:
    """Find intervals of positions, then the keys whose positions are in them.

    Keys whose positions fall begin another run, as those of a rolling cache do once.
    """
    of_rows, of_keys = (
        _int64(rows.per_token(x)) for x in (mask.query_positions, mask.key_positions)
    )
    if max(_farthest(of_rows), _farthest(of_keys)) > FARTHEST:
        return _of_elements(mask, rows)
    last = int(of_keys.max(initial=-1))
    counted = rows._replace(keys=last + 1, position=of_rows[:, None], evaluates=False)
    inner = _of(mask.mask, counted, None)
    items = max(len(of_keys), len(inner.first))
    found = []
    for item in range(items):
        positions = of_keys[item % len(of_keys)]
        ends = [end[item % len(end), 0] for end in inner]
        first, stop = (np.broadcast_to(end, (rows.length, end.shape[-1])) for end in ends)
        starts = np.flatnonzero(positions[1:] < positions[:-1]) + 1
        bounds = [0, *starts.tolist(), rows.keys]
        if len(bounds) - 1 > rows.most:
            raise TooManyError
        parts = [
            [a + np.searchsorted(positions[a:b], end, "left") for end in (first, stop)]
            for a, b in zip(bounds[:-1], bounds[1:], strict=True)
        ]
        found.append(Intervals(*[np.concatenate(x, -1) for x in zip(*parts, strict=True)]))
    free = rows._replace(most=rows.most**2 + 1)
    # Intervals of positions that no key has between them are one.
    return _complement(_complement(_packed(*_stacked(found, rows), free), free), rows)


def _farthest(numbers: Array) -> int:
    return max(abs(int(end)) for end in (numbers.min(initial=0), numbers.max(initial=0)))


# ---- elements ----


def _of_elements(mask: Mask, rows: Rows) -> Intervals:
    """Evaluate a mask, some rows at a time."""
    if not rows.evaluates or not rows.length:
        raise TooManyError
    b = np.arange(rows.items).reshape(-1, 1, 1, 1)
    h = np.arange(rows.heads).reshape(-1, 1, 1)
    keys = np.arange(rows.keys).reshape(1, -1)
    most_rows = max(1, AT_ONCE // max(1, rows.items * rows.heads * rows.keys))
    found = []
    for start in range(0, rows.length, most_rows):
        i = np.arange(start, min(start + most_rows, rows.length)).reshape(-1, 1)
        at = PointIndices(b, h, i, keys, offset=rows.offset, batch=rows.batch)
        seen = np.asarray(mask.seen(at))
        seen = seen.reshape((1,) * (4 - seen.ndim) + seen.shape)
        found.append(_of_seen(np.broadcast_to(seen, (*seen.shape[:2], i.size, rows.keys)), rows))
    widest = max(one.first.shape[-1] for one in found)
    whole = [
        [np.pad(end, [(0, 0)] * 3 + [(0, widest - end.shape[-1])], constant_values=rows.keys)
         for end in one]
        for one in found
    ]  # fmt: skip
    return Intervals(*[np.concatenate(ends, axis=2) for ends in zip(*whole, strict=True)])


def _of_seen(seen: Array, rows: Rows) -> Intervals:
    """Return the runs of True in each row."""
    edges = np.diff(seen.astype(np.int8), axis=-1, prepend=0, append=0)
    lines = math.prod(seen.shape[:-1])
    row, first = np.nonzero(edges.reshape(lines, -1) == 1)
    stop = np.nonzero(edges.reshape(lines, -1) == -1)[1]
    counts = np.bincount(row, minlength=lines)
    count = max(1, int(counts.max(initial=0)))
    if count > rows.most:
        raise TooManyError
    slot = np.arange(row.size) - np.repeat(np.cumsum(counts) - counts, counts)
    ends = np.full((2, lines, count), rows.keys)
    ends[0, row, slot], ends[1, row, slot] = first, stop
    return Intervals(*ends.reshape(2, *seen.shape[:-1], count))


_KNOWN: dict[type, Callable[[Any, Rows, Within], Intervals]] = {
    And: _of_and,
    Or: _of_or,
    Not: _of_not,
    Band: _of_band,
    Prefix: _of_prefix,
    Padding: _of_padding,
    GlobalTokens: _of_global_tokens,
    Dilated: _of_dilated,
    Segments: _of_segments,
    Positions: _of_positions,
    DenseMask: lambda mask, rows, within: _of_elements(mask, rows),
}
_KNOWN |= {cls: _of_padding for cls in Padding.__subclasses__()}
