"""Masks that name the keys of each row, one by one or in blocks, by arrays of their numbers.

The numbers of a row are in ascending order, so that a search finds one: −1 stands for none.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from polyattn._base.arguments import got
from polyattn._base.arrays import (
    Array,
    ArrayFacts,
    as_index,
    broadcast_shapes,
    cast,
    clip,
    index_range,
    is_array,
    library_of,
    numbers_like,
    with_rank,
    zeros,
)
from polyattn._base.host import is_host
from polyattn._base.scatter import scatter
from polyattn._core.expressions.coverage import UNKNOWN, Block, Coverage
from polyattn._core.expressions.indices import INDEX_LIMIT, ScoreDims, ScoreIndices
from polyattn._core.expressions.intervals import Intervals, Rows
from polyattn._core.expressions.masks import And, Mask

#: Beyond so many comparisons of numbers and tiles it is not asked which tiles are empty.
MOST_COMPARED = 2**24


class Selection(Mask):
    """Keys, or blocks of keys, by their numbers in lists (..., H, rows, K)."""

    #: The numbers of the blocks that the rows of each block see, ascending.
    lists: Any
    first_row: Any = None
    first_key: Any = 0

    @property
    def sizes(self) -> tuple[int | None, int]:
        """The rows and the keys of a block; None for the rows if all have one list."""
        raise NotImplementedError

    @property
    def most_keys(self) -> int:
        """The number of keys that a row may see."""
        return int(self.lists.shape[-1]) * self.sizes[1]

    def seen(self, at: ScoreIndices) -> Array:
        lists, (rows, keys) = self.lists, self.sizes
        shape = (1, 1, *lists.shape)[-max(3, len(lists.shape)) :]
        *lead, heads, _, _ = shape
        number = at.column + self.first_key
        count = math.prod(lead)
        items = at.xp.reshape(index_range(at.xp, 0, count, lists), tuple(lead))
        item = at.per_item(items) if count > 1 else 0
        head = at.head if heads > 1 else 0
        row = at.row if self.first_row is None else at.row + self.first_row
        row = 0 if rows is None else row // rows
        lists = as_index(at.xp, at.xp.reshape(lists, (count, *shape[-3:])))
        return at.is_listed(lists, (item, head, row), number, keys)

    def _coverage(self, block: Block) -> Coverage:
        lists, (rows, keys) = self.lists, self.sizes
        xp = library_of(lists).xp

        def blocks(ends: tuple[Any, Any], start: Any, size: int) -> tuple[Array, Array]:
            """Return the first block and the one after the last of each tile."""
            first = 0 if start is None else start
            begin, stop = ((end + first) // size for end in (ends[0], ends[1] - 1))
            begin, stop = (
                xp.reshape(x, (-1,)) if is_array(x) else numbers_like(xp, [x], None, lists)
                for x in (begin, stop + 1)
            )
            return begin, stop

        top, bottom = blocks(block.rows, self.first_row, rows or INDEX_LIMIT)
        left, right = blocks(block.columns, self.first_key, keys)
        if math.prod(lists.shape) * left.shape[0] > MOST_COMPARED:
            return UNKNOWN
        lists, row = as_index(xp, lists)[..., None], index_range(xp, 0, lists.shape[-2], lists)
        first, stop = (with_rank(x, len(lists.shape)) for x in (left, right))
        is_inside = (lists >= first) & (lists < stop)
        is_inside = is_inside & ~repeated(xp, lists[..., 0])[..., None]
        counts = xp.sum(cast(xp, is_inside, xp.float32), axis=-2)
        is_row = (row[None, :] >= top[:, None]) & (row[None, :] < bottom[:, None])
        is_row = with_rank(cast(xp, is_row, xp.float32), len(counts.shape))
        total = xp.matmul(is_row, counts)  # (..., H, tiles, tiles)
        whole = cast(xp, (bottom - top)[:, None] * (right - left)[None, :], xp.float32)
        some, every = total > 0, total >= with_rank(whole, len(total.shape))
        if is_array(block.rows[0]):
            rank = len(block.rows[0].shape)
            return Coverage(with_rank(some, rank), with_rank(every, rank))
        return Coverage(xp.any(some), xp.all(every))

    def _intervals(self, rows: Rows, within: Intervals | None) -> Intervals:
        of_rows, size = self.sizes
        lists = rows.integers(self.lists)
        own = (1, 1, *lists.shape)[-3:]
        if math.prod(lists.shape[:-3]) != 1:
            lists = rows.xp.broadcast_to(lists, (*rows.batch, *own))
        lists = lists.reshape(-1, *own)
        if of_rows is not None:
            first = 0 if self.first_row is None else self.first_row
            lists = lists[..., (rows.xp.arange(rows.length) + first) // of_rows, :]
        return rows.of_lists(lists, size, self.first_key)


@dataclass(frozen=True, eq=False, repr=False)
class Selected(Selection):
    name: ClassVar[str] = "selected"
    axes: ClassVar[dict[str, str]] = {"lists": ".HL-", "first_key": "."}
    lists: Any  # (..., H, L, K)
    first_key: Any = 0

    @property
    def sizes(self) -> tuple[int | None, int]:
        return None if self.lists.shape[-2] == 1 else 1, 1

    def check(self, dims: ScoreDims) -> None:
        _check_lists("masks.selected: indices", self.lists, dims, "L", dims.query_length)


@dataclass(frozen=True, eq=False, repr=False)
class Blocks(Selection):
    name: ClassVar[str] = "blocks"
    axes: ClassVar[dict[str, str]] = {"lists": ".H--", "first_key": ".", "first_row": "."}
    lists: Any  # (..., H, blocks of rows, K)
    size: tuple[int, int]  # the rows and the keys of a block
    first_key: Any = 0
    first_row: Any = None

    @property
    def sizes(self) -> tuple[int | None, int]:
        return None if self.lists.shape[-2] == 1 else self.size[0], self.size[1]

    def check(self, dims: ScoreDims) -> None:
        if self.first_row is not None:  # a part, whose table is that of all rows
            return
        rows = None if dims.query_length is None else -(-dims.query_length // self.size[0])
        _check_lists("masks.blocks: table", self.lists, dims, "ceil(L / rows)", rows)


def _check_lists(
    name: str, facts: ArrayFacts, dims: ScoreDims, many: str, rows: int | None
) -> None:
    """Raise unless lists (..., H, rows, K) fit the scores; one of 1 may stand for all rows."""
    lead = facts.shape[:-1]
    whole: tuple[Any, ...] = (*dims.scores[:-2], rows)
    array = name.split()[-1]
    if len(lead) == 2 < len(whole) and lead[0] != 1:
        raise ValueError(
            f"{name} {_shape(lead)} has 3 axes, so its first could be batch or heads: write"
            f" {array}[:, None] for one per batch item, {array}[None] for one per head"
        )
    if not lead or len(lead) > len(whole) or broadcast_shapes(lead, whole) != whole:
        raise ValueError(
            f"{name} must broadcast to (..., H, {many}, K) = ({', '.join(map(str, whole))}, K); got"
            f" {_shape(lead)}"
        )


def _shape(lead: tuple[Any, ...]) -> str:
    """Return the shape of lists, whose last axis may be longer than what was given."""
    return f"({', '.join([*map(str, lead), 'K'])})"


def repeated(xp: Any, lists: Array) -> Array:
    """Return whether a number of ascending lists (..., K) is that before it, or none."""
    is_same = lists[..., 1:] == lists[..., :-1]
    return xp.concat([xp.zeros_like(lists[..., :1], dtype=xp.bool), is_same], axis=-1) | (lists < 0)


def sorted_lists(name: str, numbers: Array, size: int = 1) -> Array:
    """Return a copy whose last axis ascends; raise if a number of the host is below −1.

    Numbers whose block of `size` ends beyond the dtype become the last before, which names no key.
    """
    if not numbers.shape:
        raise ValueError(f"{name} must have an axis for the numbers of each row; {got(numbers)}")
    xp = library_of(numbers, name).xp
    if not numbers.shape[-1]:  # none for all, so that each list has a number
        numbers = zeros(xp, (*numbers.shape[:-1], 1), xp.int64, numbers) - 1
    # Numbers of 32 bits take half the memory.
    is_kept = is_host(numbers) and numbers.dtype == xp.int32
    ascending = xp.sort(numbers if is_kept else as_index(xp, numbers), axis=-1)
    if is_host(ascending) and (least := ascending.min(initial=0)) < -1:
        raise ValueError(
            f"{name} must be the numbers of keys or blocks, at least 0, or -1 for none; got {least}"
        )
    if size == 1:
        return ascending
    return clip(xp, ascending, -1, int(xp.iinfo(ascending.dtype).max) // size - 1)


def lists_of_edges(rows: Array, keys: Array, query_length: int) -> Array:
    """Return the keys of each row, ascending and −1 for none, (L, most), from pairs of both."""
    xp = library_of(rows, "masks.edges: rows").xp
    rows, keys = (as_index(xp, x) for x in (rows, keys))
    for name, numbers, stop in (("rows", rows, query_length), ("keys", keys, None)):
        least, most = (int(xp.min(numbers)), int(xp.max(numbers))) if numbers.shape[0] else (0, -1)
        if least < 0 or (stop is not None and most >= stop):
            until = "" if stop is None else f" and below query_length = {stop}"
            wrong = least if least < 0 else most
            raise ValueError(f"masks.edges: {name} must be at least 0{until}; got {wrong}")
    order = xp.argsort(keys, stable=True)
    order = xp.take(order, xp.argsort(xp.take(rows, order), stable=True))
    rows, keys = xp.take(rows, order), xp.take(keys, order)
    starts = as_index(xp, xp.searchsorted(rows, index_range(xp, 0, query_length + 1, rows)))
    counts = starts[1:] - starts[:-1]
    most = max(1, int(xp.max(counts))) if rows.shape[0] else 1
    place = index_range(xp, 0, rows.shape[0], rows) - xp.take(starts, rows)
    lists = zeros(xp, (query_length, most), keys.dtype, keys) - 1
    return scatter(lists, (rows, most - xp.take(counts, rows) + place), keys)


def selection_of(mask: Any) -> tuple[Any, Mask | None]:
    """Return the `Selection` of a mask that is one, or one and others, or None; and the others.

    Of several it is that with the fewest keys for a row.
    """
    conditions = mask.conditions if isinstance(mask, Mask) else ()
    least: Any = None
    for one in conditions:  # a loop, which torch.compile traces
        if isinstance(one, Selection) and (least is None or one.most_keys < least.most_keys):
            least = one
    if least is None:
        return None, mask
    rest = tuple([one for one in conditions if one is not least])
    return least, And(rest) if len(rest) > 1 else (*rest, None)[0]
