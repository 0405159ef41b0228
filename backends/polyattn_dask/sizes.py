"""Count the bytes that a task holds, and from them the chunks of keys that it reads."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from operator import attrgetter
from typing import Any, NamedTuple

from dask import config
from dask.utils import parse_bytes

from polyattn.plugin import Problem, Span
from polyattn_dask.grid import Axes, Grid, Index

BYTES = {"bool": 1, "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}


class OptionArray(NamedTuple):
    """An array among the options, cut as the grid is, or its facts."""

    option: str
    axes: Axes
    array: Any


def needs_whole_rows(problem: Problem) -> bool:
    """Return whether a task needs all the keys of its rows at once."""
    return problem.normalizer is not None or problem.score_norm is not None


def limit() -> int:
    """Return how many bytes of keys and values, or of partials, a task may join."""
    return int(parse_bytes(config.get("polyattn.group-size", "64 MiB")))


def _items_in(grid: Grid, at: Index) -> int:
    return math.prod([spans[n].length for spans, n in zip(grid.batch, at.items, strict=True)])


def rows_in(grid: Grid, at: Index) -> int:
    """Return the number of query rows of a block, over all its items and heads."""
    return _items_in(grid, at) * grid.heads[at.head].length * grid.rows[at.row].length


def query_bytes(problem: Problem, grid: Grid, at: Index) -> int:
    """Return the bytes of a block of query rows."""
    return rows_in(grid, at) * problem.head_size * BYTES[problem.dtype]


def partial_bytes(problem: Problem, grid: Grid, at: Index) -> int:
    """Return the bytes of the partial of a block of rows."""
    return rows_in(grid, at) * (problem.value_size + 1) * BYTES[problem.accumulator]


def bytes_of_a_key(problem: Problem, grid: Grid, at: Index, arrays: Sequence[OptionArray]) -> int:
    """Return the bytes that one key adds to a block, its value and the options' part included."""
    group = grid.groups[grid.group_of[at.head]].length
    each = _items_in(grid, at) * group * (problem.head_size + problem.value_size)
    each *= BYTES[problem.dtype]
    for one in arrays:
        if "S" not in one.axes:
            continue
        places = grid.place(one.axes, at)
        count = [
            n if axis is None else 1 if axis == "S" else grid.spans(axis)[place].length
            for axis, n, place in zip(one.axes, one.array.shape, places, strict=True)
        ]
        each += math.prod(count) * BYTES.get(str(one.array.dtype), 8)
    return each


def grouped(
    columns: Sequence[Span], seen: Sequence[int], each: int, whole_rows: bool
) -> list[list[int]]:
    """Return the numbers of the chunks of keys that a block of rows sees, a list for each task."""
    # A task reads at most the limit, or one chunk; unless it needs all keys, from first to last.
    if whole_rows:
        return [list(range(seen[0], seen[-1] + 1))] if seen else []
    groups: list[list[int]] = []
    room, most = 0, limit()
    for number in seen:
        size = each * columns[number].length
        if not groups or size > room:
            groups.append([])
            room = most
        groups[-1].append(number)
        room -= size
    return groups


def count_groups(
    columns: Sequence[Span], seen: range, each: int, whole_rows: bool
) -> tuple[int, int]:
    """Return how many groups `grouped` makes of consecutive chunks, and the keys of the largest."""
    # No chunk is empty, and none is looked at: explain does this for every block of rows. For 16
    # million tokens in chunks of 4096 it takes 1 second in this way, and 4 to 8 by `grouped`.
    keys = math.inf if whole_rows or not each else limit() // each
    count, largest, first = 0, 0, seen.start
    while first < seen.stop:
        start = columns[first].start
        after = bisect_right(columns, start + keys, first, seen.stop, key=attrgetter("stop"))
        after = max(after, first + 1)
        count, largest, first = count + 1, max(largest, columns[after - 1].stop - start), after
    return count, largest


def widths(count: int, size: int) -> tuple[int, list[int]]:
    """Return how many results a task joins, and how many tasks join them at each level but one."""
    width, levels = max(2, limit() // max(1, size)), []
    while count > width:
        count = -(-count // width)
        levels.append(count)
    return width, levels
