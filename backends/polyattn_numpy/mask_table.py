"""Table of the empty, mixed and full cells of the scores, and the tiles that follow from it.

The table is made once a call from the coverage that masks report for cells of 128 rows and 64 keys;
nothing as large as the scores is built for it. How a head is cut depends only on its own mask:
heads with different masks are cut separately, and items with different masks never share a task.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice, pairwise
from math import isqrt
from typing import NamedTuple

import numpy as np

from polyattn.plugin import Array, Indices, Mask, Operands, Problem, Span, TileGrid
from polyattn_numpy.scratch import xp
from polyattn_numpy.tiling import (
    Region,
    ScoreTile,
    ThreadTask,
    even_count,
    even_size,
    row_sizes,
    split_heads,
    uses_table,
)

EMPTY, MIXED, FULL = range(3)
# Keys of a cell if a tile has 512. Fewer than rows: narrow products lose less speed than low ones.
CELL = 64
# How many times as wide as high a tile of few rows is at most.
WIDEST = 4
# Cells that all rows of a task must see to make one product of all rows worthwhile.
SHARED_CELLS = 8


class MaskTable(NamedTuple):
    """The kinds of all cells."""

    mask: Mask
    kinds: Array  # EMPTY, MIXED or FULL: int8 (outer..., batch, G, strips, cells), 1 if all alike
    strip: int  # rows of a cell
    cell: int  # keys of a cell
    side: int  # most keys of a tile
    group_size: int
    same_for_all_heads: bool

    @classmethod
    def of(cls, mask: Mask, problem: Problem, x: Operands, tile: int) -> MaskTable | None:
        """Return the table of a call, or None if it would save nothing."""
        if not uses_table(problem, tile):
            return None
        side, strip = isqrt(tile), row_sizes(problem, tile)[1]
        cell = max(1, CELL * side // 512)
        coverage = np.broadcast_arrays(*TileGrid(problem, x, xp, (strip, cell), x.query).of(mask))
        some, every = (split_heads(problem, flags) for flags in coverage)
        kinds = some.any(axis=-3).astype(np.int8) + (some & every).all(axis=-3)
        corner = mask.seen(Indices(problem, xp, x, Span(0, 1), Span(0, 1)))
        same = problem.heads == 1 or corner.ndim < 3 or corner.shape[-3] == 1
        return cls(
            mask=mask,
            kinds=kinds,
            strip=strip,
            cell=cell,
            side=side,
            group_size=problem.group_size,
            same_for_all_heads=same,
        )

    @property
    def differs_by_item(self) -> bool:
        """Whether the items along the last batch axis may have different masks."""
        return bool(self.kinds.shape[-4] != 1)

    def _cells_of(self, task: ThreadTask) -> tuple[Array, int]:
        """Return the kinds of a task's cells, (heads or 1, strips, cells), and the first key."""
        rows = Span(task.rows.start // self.strip, -(-task.rows.stop // self.strip))
        columns = Span(task.columns.start // self.cell, -(-task.columns.stop // self.cell))
        kinds = task.view(self.kinds, rows, columns)
        return kinds[0], columns.start * self.cell

    def visible_cells(self, task: ThreadTask) -> int:
        """Return how many cells of a task are not empty, over all its heads and items."""
        kinds, _ = self._cells_of(task)
        return int(np.count_nonzero(kinds)) * task.head_count // len(kinds)

    def tiles(self, task: ThreadTask) -> Iterator[ScoreTile]:
        """Cut a task into tiles of the cells that are not empty."""
        kinds, first = self._cells_of(task)
        count = task.heads.length if kinds.shape[0] == 1 else 1
        for head_kinds, heads in zip(kinds, task.heads.split(count), strict=True):
            yield from self._cut(head_kinds, first, task._replace(heads=heads))

    def _cut(self, kinds: Array, first: int, task: ThreadTask) -> Iterator[ScoreTile]:
        """Cut a task whose heads have one mask: first all its rows, then strips of them."""
        seen = kinds != EMPTY
        shared = np.zeros(kinds.shape[1], bool)
        for start, stop in _runs(seen.all(axis=0)):
            if stop - start >= SHARED_CELLS or len(kinds) == 1:
                shared[start:stop] = True
                yield from self._blocks(kinds, first, Span(start, stop), task)
        for number, rows in enumerate(task.rows.split(self.strip)):
            for start, stop in _runs(seen[number] & ~shared):
                strip = task._replace(rows=rows)
                yield from self._blocks(kinds[number : number + 1], first, Span(start, stop), strip)

    def _blocks(
        self, kinds: Array, first: int, cells: Span, task: ThreadTask
    ) -> Iterator[ScoreTile]:
        """Cut a run of cells into tiles: blocks of keys by as many heads as fill a tile."""
        # Of few rows, tiles are wider: each tile costs Python the same. The width does not depend
        # on the other heads of the task, so a head has the same bits without them.
        rows = task.rows.length * self.group_size
        width = max(self.side, min(WIDEST * self.side, self.side**2 // (8 * rows)))
        most = even_size(cells.length * self.cell, width) // self.cell
        for block in cells.split(max(1, most)):
            block_kinds = kinds[:, slice(*block)]
            start = first + block.start * self.cell
            stop = start + block_kinds.shape[1] * self.cell
            columns = _intersection(Span(start, stop), task.columns)
            regions = tuple(self._regions(block_kinds == MIXED, start, task.rows, columns))
            area = task.batch.length * task.rows.length * self.group_size * columns.length
            count = even_count(task.heads.length, max(1, self.side**2 // area))
            for heads in task.heads.split(count):
                yield ScoreTile(heads, task.rows, columns, False, columns.length, regions)

    def _regions(self, mixed: Array, start: int, rows: Span, columns: Span) -> Iterator[Region]:
        """Yield the regions of the mixed cells of a tile."""
        strips = [rows] if (mixed == mixed[:1]).all() else rows.split(self.strip)
        for strip, line in zip(strips, mixed, strict=False):
            for run in _runs(line):
                low, high = (start + edge * self.cell for edge in run)
                yield strip, _intersection(Span(low, high), columns)


def _runs(flags: Array) -> Iterator[tuple[int, int]]:
    """Yield the start and stop of each run of true flags."""
    if not len(flags):  # no row of the task sees a key by position
        return iter(())
    edges = (np.flatnonzero(flags[1:] != flags[:-1]) + 1).tolist()
    edges = [0, *edges, len(flags)]
    # Every other run is true, from the first or the second on.
    return islice(pairwise(edges), not flags[0], None, 2)


def _intersection(one: Span, other: Span) -> Span:
    return Span(max(one.start, other.start), min(one.stop, other.stop))
