"""Cut a call into tasks, which threads take in any order, and a task into tiles.

The cuts of a batch item depend only on its own shape. So its result has the same bits for any
number of items and threads.

Glossary
--------
group
    A key/value head and the `group_size` query heads that read it.
task
    The work that a thread takes at once: some query rows of some groups of some batch items, with
    all keys that they see or one part of these keys.
tile
    The scores that are computed at once: about 512 query rows (each query head of a group adds its
    rows) by 512 keys. They are 1 MiB of float32, which stays in a core's second-level cache through
    the two products and the exponential, and half a millisecond of work, so Python's share is
    small. Where one group has too few rows for a tile, several groups, then several items, share
    one.
strip
    128 query rows. Where the edge of a band crosses a tile, the tile is cut into strips: at most
    half of a strip's square is then computed for nothing.
cell
    An entry of the mask table: one strip by 64 keys, empty, mixed or full.
region
    A rectangle of rows and keys in a tile, where a mask hides some of the scores.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple

from polyattn._core.tiles.band import full_span, is_full
from polyattn.plugin import Array, Problem, Span, column_span, thread_count
from polyattn_numpy import thread_pool

Region = tuple[Span, Span]

STRIP = 128
# Up to this many scores of an item, few calls of NumPy are faster than tiles.
TINY = 2**12
# With fewer tasks than this, an item's keys are cut as well, to give every thread some work.
FEW_TASKS = 8
# Keys of a part: enough to make the cost of combining parts negligible.
PART_KEYS = 8192
# With fewer tiles than this in an item's scores, a mask table costs more than it saves.
TABLE_TILES = 4
# To read keys and values from memory takes as long as to multiply so many rows with them.
FEW_ROWS = 32
# Multiply-adds that are worth waking a thread, about a sixth of a millisecond.
THREAD_WORK = 3 * 2**21
# Multiply-adds of a task, about two milliseconds: Python, which runs on one thread at a time, then
# takes a negligible share.
TASK_WORK = 2**27
# Tasks of that size for each thread: enough that no thread waits long for the last task.
ROUNDS = 3


class ScoreTile(NamedTuple):
    """Scores of some key/value heads, rows and keys; it may be wider than a tile should be."""

    heads: Span
    rows: Span
    columns: Span
    crosses_band: bool  # whether a band hides some of the scores
    width: int  # how many keys to take at once
    regions: tuple[Region, ...] | None = None  # that a mask hides in part, if there is a table


class ThreadTask(NamedTuple):
    """The work that a thread takes at once."""

    outer: tuple[int, ...]  # an index into all batch axes but the last
    batch: Span  # along the last batch axis
    heads: Span  # the key/value heads
    rows: Span
    columns: Span  # its rows see no other keys of this task
    part: int  # the number of this part of the keys, of `parts`
    parts: int

    @property
    def head_count(self) -> int:
        """The number of key/value heads over all items."""
        return self.batch.length * self.heads.length

    def single_heads(self) -> Iterator[ThreadTask]:
        """Yield the task one key/value head of one item at a time."""
        for item, head in product(range(*self.batch), range(*self.heads)):
            yield self._replace(batch=Span(item, item + 1), heads=Span(head, head + 1))

    def view(self, array: Array, *spans: Span | None) -> Array:
        """Return the task's view of an array (outer..., batch, G, ...), and spans of more axes."""
        # An axis of length 1 broadcasts, and a span of None is the whole axis.
        index: list[Any] = [
            0 if n == 1 else i for i, n in zip(self.outer, array.shape, strict=False)
        ]
        axes = array.shape[len(index) :]
        for span, n in zip((self.batch, self.heads, *spans), axes, strict=False):
            index.append(slice(None) if span is None or n == 1 else slice(*span))
        return array[tuple(index)]

    def relative(self, tile: ScoreTile) -> tuple[slice, Span]:
        """Return a tile's heads and rows, counted from the first ones of the task."""
        first, row = self.heads.start, self.rows.start
        heads = slice(tile.heads.start - first, tile.heads.stop - first)
        return heads, Span(tile.rows.start - row, tile.rows.stop - row)


def split_heads(problem: Problem, array: Array, ndim: int | None = None) -> Array:
    """Pad an array's shape to (batch..., H, rows, keys), and split H into (G, H/G)."""
    # It has `ndim` axes before, those of the batch and three by default.
    ndim = ndim or len(problem.batch or (1,)) + 3
    *batch, heads, rows, keys = (1,) * (ndim - array.ndim) + array.shape
    size = problem.group_size
    split = (1, 1) if heads == 1 else (heads // size, size)
    return array.reshape(*batch, *split, rows, keys)


def even_size(length: int, most: int) -> int:
    """Return a size up to `most` that cuts `length` into the fewest blocks, about equally long."""
    blocks = -(-length // most)
    return min(most, -(-length // (16 * blocks)) * 16)


def even_count(number: int, most: int) -> int:
    """Return a count up to `most` that divides `number` into the fewest, about equal shares."""
    return -(-number // -(-number // most))


def uses_table(problem: Problem, tile: int) -> bool:
    """Return whether a mask table can save more than it costs."""
    # Causal and window need none at a known offset, and a bare mask function can have none.
    banded_by_item = problem.query_offset is None and problem.masks_by_position
    masked = problem.mask is not None or problem.mask_spec is not None or banded_by_item
    rows = max(problem.query_length * problem.group_size, FEW_ROWS)
    return masked and problem.key_heads * rows * problem.key_length >= TABLE_TILES * tile


def row_sizes(problem: Problem, tile: int) -> tuple[int, int]:
    """Return how many rows a task has, and a strip of it."""
    most = max(1, math.isqrt(tile) // problem.group_size)
    rows = even_size(problem.query_length, most)
    strip = min(rows, max(1, STRIP * math.isqrt(tile) // 512))
    if not uses_table(problem, tile):
        # The position of each item's band is not known before the call.
        whole = not problem.masks_by_position or problem.query_offset is None
        return rows, rows if whole else strip
    # A table has strips of one height, so tasks are whole numbers of them.
    blocks = -(-problem.query_length // (most // strip * strip))
    return -(-problem.query_length // (blocks * strip)) * strip, strip


def useful_threads(problem: Problem, products: int) -> int:
    """Return how many threads have enough work, of as many products as each tile takes."""
    sizes = problem.head_size + problem.value_size
    work = math.prod(problem.scores) * sizes * products // 2
    if work < 2 * THREAD_WORK:
        return 1
    return min(thread_count(thread_pool.default), work // THREAD_WORK)


@lru_cache(maxsize=32)
def tasks(
    problem: Problem, tile: int, threads: int, *, share_items: bool = True, products: int = 2
) -> tuple[ThreadTask, ...]:
    """Cut a call into tasks, those with the most work first, parts in the order of their keys."""
    # `tile` is the largest number of scores in a tile, and `products` how many products each takes.
    # Items whose mask tables differ share no task.
    side, group_size = math.isqrt(tile), problem.group_size
    rows, strip = row_sizes(problem, tile)
    blocks = [
        (block, column_span(problem, block)) for block in Span(0, problem.query_length).split(rows)
    ]
    blocks.sort(key=lambda block: -block[1].length)
    part = problem.key_length
    if problem.key_heads * len(blocks) < FEW_TASKS:
        part = max(PART_KEYS * tile // 2**18, 1)
    *outer, items = problem.batch or (1,)
    # The number of heads that fill a tile, and the most in a task, which holds their sums.
    width = problem.key_length if has_few_scores(problem, tile) else min(side, problem.key_length)
    fit = max(1, tile // (strip * group_size * width))
    most = max(fit, tile // (rows * group_size * max(problem.value_size, 64)))
    if threads > 1:
        head_count = math.prod(outer) * items * problem.key_heads * len(blocks)
        sizes = (problem.head_size + problem.value_size) * products // 2
        work = head_count * rows * group_size * problem.key_length * sizes
        rounds = min(max(work // (threads * TASK_WORK), 1), ROUNDS)
        share = -(-head_count // (threads * rounds))
        fit, most = min(fit, share), min(most, share)
    heads = even_count(problem.key_heads, most)
    batch = max(1, fit // heads) if share_items and heads == problem.key_heads else 1
    result = []
    for block, columns in blocks:
        parts = list(columns.split(part)) or [columns]
        whole = len(parts) == 1
        result += [
            ThreadTask(
                outer=index,
                batch=some_items,
                heads=some_heads,
                rows=block,
                columns=keys,
                part=number,
                parts=len(parts),
            )
            for index in product(*map(range, outer))
            for some_items in Span(0, items).split(batch if whole else 1)
            for some_heads in Span(0, problem.key_heads).split(heads if whole else 1)
            for number, keys in enumerate(parts)
        ]
    return tuple(result)


def is_tiny(problem: Problem) -> bool:
    """Return whether few calls of NumPy are faster than tiles."""
    # Decided by the shape of one item, so that an item is computed alike in any batch.
    return problem.heads * problem.query_length * problem.key_length <= TINY


def has_few_scores(problem: Problem, tile: int) -> bool:
    """Return whether the gradient is that of the dense kernel: an item has so few scores."""
    return problem.heads * problem.query_length * problem.key_length <= min(TINY, tile)


def aligned_within(span: Span, bounds: Span) -> Span:
    """Return the part of a span within bounds, its other ends moved inwards to multiples of 16."""
    start, stop = max(span.start, bounds.start), min(span.stop, bounds.stop)
    start = start if start == bounds.start else -(-start // 16) * 16
    stop = stop if stop == bounds.stop else stop // 16 * 16
    return Span(start, stop) if start < stop else Span(bounds.start, bounds.start)


def tiles(problem: Problem, task: ThreadTask, tile: int) -> Iterator[ScoreTile]:
    """Cut a task into the tiles that a band does not leave empty: of all its rows, then strips."""
    side = math.isqrt(tile)
    if has_few_scores(problem, tile):
        # The gradient is that of the dense kernel, and the bits of a product depend on its shape.
        if task.columns.length:
            crosses = not is_full(problem, task.rows, task.columns)
            yield ScoreTile(task.heads, task.rows, task.columns, crosses, task.columns.length)
        return
    common = aligned_within(full_span(problem, task.rows), task.columns)
    if common.length:
        width = even_size(common.length, side)
        row_count = task.batch.length * task.rows.length * problem.group_size
        for heads in task.heads.split(max(1, tile // (row_count * width))):
            yield ScoreTile(heads, task.rows, common, False, width)
    if common == task.columns:
        return
    for strip in task.rows.split(row_sizes(problem, tile)[1]):
        seen = column_span(problem, strip)
        start, stop = max(seen.start, task.columns.start), min(seen.stop, task.columns.stop)
        edges = [Span(start, common.start), Span(common.stop, stop)]
        if not common.length:
            edges = [Span(start, stop)]
        for edge in edges:
            if edge.length > 0:
                crosses = not is_full(problem, strip, edge)
                yield ScoreTile(task.heads, strip, edge, crosses, even_size(edge.length, side))
