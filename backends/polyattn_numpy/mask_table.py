"""Which cells of the scores masks leave empty, mixed or full, and the tiles that come of it.

The table is made once a call, of what masks answer about blocks of 128 rows and 64 keys; nothing as
large as the scores is built for it. How a head is cut by it depends on that head's own mask: heads
whose masks differ are cut apart, and items whose masks differ are not taken in one piece.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, pairwise
from math import isqrt
from typing import Any

import numpy as np

from polyattn.plugin import Array, Indices, Mask, Operands, Problem, Span, TileGrid
from polyattn_numpy.blocks import Patch, Piece, Tile, even, even_count, is_tabled, row_sizes

__all__ = ["Table"]

EMPTY, MIXED, FULL = range(3)
# Keys of a cell, where a tile has 512: fewer than rows, for products lose less by being narrow.
CELL = 64
# One row of so many is looked at first, to see that a mask array is mixed everywhere.
SAMPLE = 8
# Cells that all rows of a piece must see for one product with all of them to be worth it.
TOGETHER = 8


@dataclass(frozen=True)
class Table:
    """A table of cells.

    Attributes
    ----------
    kinds : Array of int8
        EMPTY, MIXED or FULL, with the axes (outer..., batch, G, cells down, cells across), of which
        those before the last two are 1 where all are alike.
    strip, cell : int
        How many rows and keys a cell has.
    side : int
        How many keys a tile has at most.
    members : int
        How many query heads there are to a key/value head.
    alike : bool
        Whether all heads see the same keys.
    """

    kinds: Array
    strip: int
    cell: int
    side: int
    members: int
    alike: bool

    @classmethod
    def of(cls, mask: Mask, problem: Problem, x: Operands, xp: Any, tile: int) -> Table | None:
        """Return the table of a call, or None where there is nothing to gain by it."""
        if not is_tabled(problem, tile):
            return None
        side, strip = isqrt(tile), row_sizes(problem, tile)[1]
        cell = max(1, CELL * side // 512)
        groups, members = problem.key_heads, problem.heads // problem.key_heads
        grid = Cells(problem, x, xp, (strip, cell), x.query)
        some, every = np.broadcast_arrays(*grid.of(mask))
        lead = (1,) * (len(problem.batch or (1,)) + 3 - some.ndim)
        *batch, heads, down, across = lead + some.shape
        split = (1, 1) if heads == 1 else (groups, members)
        some, every = (flags.reshape(*batch, *split, down, across) for flags in (some, every))
        kinds = some.any(axis=-3).astype(np.int8) + (some & every).all(axis=-3)
        corner = mask.seen(Indices(problem, xp, x, Span(0, 1), Span(0, 1)))
        alike = problem.heads == 1 or corner.ndim < 3 or corner.shape[-3] == 1
        return cls(kinds, strip, cell, side, members, alike)

    @property
    def differs_by_item(self) -> bool:
        """Whether the items along the last batch axis may have masks of their own."""
        return bool(self.kinds.shape[-4] != 1)

    def _of(self, piece: Piece) -> tuple[Array, int]:
        """Return the kinds of a piece's cells, (heads or 1, down, across), and the first key."""
        rows = Span(piece.rows.start // self.strip, -(-piece.rows.stop // self.strip))
        columns = Span(piece.columns.start // self.cell, -(-piece.columns.stop // self.cell))
        kinds = self.kinds[piece.within(self.kinds.shape, rows, columns)]
        return kinds[0], columns.start * self.cell

    def visible(self, piece: Piece) -> int:
        """Return how many cells there are to visit in a piece, over all its heads and items."""
        kinds, _ = self._of(piece)
        return int(np.count_nonzero(kinds)) * piece.units // len(kinds)

    def tiles(self, piece: Piece) -> Iterator[Tile]:
        """Cut a piece into tiles of the cells that are not empty."""
        kinds, first = self._of(piece)
        each = piece.heads.length if kinds.shape[0] == 1 else 1
        for own, heads in zip(kinds, piece.heads.split(each), strict=True):
            yield from self._cut(own, first, piece._replace(heads=heads))

    def _cut(self, kinds: Array, first: int, piece: Piece) -> Iterator[Tile]:
        """Cut a piece of heads that are alike: first all its rows, then strips of them."""
        seen = kinds != EMPTY
        together = np.zeros(kinds.shape[1], bool)
        for start, stop in _runs(seen.all(axis=0)):
            if stop - start >= TOGETHER or len(kinds) == 1:
                together[start:stop] = True
                yield from self._blocks(kinds, first, Span(start, stop), piece)
        for number, rows in enumerate(piece.rows.split(self.strip)):
            for start, stop in _runs(seen[number] & ~together):
                strip = piece._replace(rows=rows)
                yield from self._blocks(kinds[number : number + 1], first, Span(start, stop), strip)

    def _blocks(self, kinds: Array, first: int, cells: Span, piece: Piece) -> Iterator[Tile]:
        """Cut a run of cells into tiles, a block of keys by as many heads as fill a tile."""
        most = even(cells.length * self.cell, self.side) // self.cell
        for block in cells.split(max(1, most)):
            own = kinds[:, slice(*block)]
            start = first + block.start * self.cell
            columns = _both(Span(start, start + own.shape[1] * self.cell), piece.columns)
            patches = tuple(self._patches(own == MIXED, start, piece.rows, columns))
            area = piece.batch.length * piece.rows.length * self.members * columns.length
            few = even_count(piece.heads.length, max(1, self.side**2 // area))
            for heads in piece.heads.split(few):
                yield Tile(heads, piece.rows, columns, False, columns.length, patches)

    def _patches(self, mixed: Array, start: int, rows: Span, columns: Span) -> Iterator[Patch]:
        """Yield the rows and keys among which masks hide some."""
        strips = [rows] if (mixed == mixed[:1]).all() else rows.split(self.strip)
        for strip, line in zip(strips, mixed, strict=False):
            for run in _runs(line):
                low, high = (start + edge * self.cell for edge in run)
                yield strip, _both(Span(low, high), columns)


class Cells(TileGrid):
    """All cells at once, of mask arrays at the speed at which they can be read."""

    def any_and_all(self, seen: Array) -> tuple[Array, Array]:
        """Return whether any and whether all of each block of a mask array holds."""
        if seen.ndim < 2 or seen.shape[-2] == 1:
            return super().any_and_all(seen)
        size, length = self._size[0], self._lengths[0]
        blocks = [seen[..., slice(*rows), :] for rows in Span(0, length).split(size)]
        found = zip(*map(self._of_rows, blocks), strict=True)
        some, every = (np.concatenate(flags, axis=-2) for flags in found)
        return some, every

    def _of_rows(self, seen: Array) -> tuple[Array, Array]:
        """Return the same of one block of rows."""
        some, every = self._reduced(seen[..., ::SAMPLE, :])
        if some.all() and not every.any():
            return some, every
        return self._reduced(seen)

    def _reduced(self, seen: Array) -> tuple[Array, Array]:
        some, every = seen.any(axis=-2, keepdims=True), seen.all(axis=-2, keepdims=True)
        if seen.shape[-1] == 1:
            return some, every
        return self._folded(some, 1, np.any), self._folded(every, 1, np.all)


def _runs(flags: Array) -> Iterator[tuple[int, int]]:
    """Yield the first of each run of what holds, and the one after its last."""
    if not len(flags):  # a piece whose rows see no key by position has no cells
        return iter(())
    edges = (np.flatnonzero(flags[1:] != flags[:-1]) + 1).tolist()
    edges = [0, *edges, len(flags)]
    # Every other run holds, from the first or the second on.
    return islice(pairwise(edges), not flags[0], None, 2)


def _both(one: Span, other: Span) -> Span:
    return Span(max(one.start, other.start), min(one.stop, other.stop))
