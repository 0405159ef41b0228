"""How a call is cut: into pieces, which threads take in any order, and a piece into tiles.

Where an item of a batch is cut depends on nothing but its own shape: neither on how many items
there are nor on how many threads. So its result has the same bits whatever they are.

Sizes
-----
A tile is a block of about 512 query rows (grouped heads count as rows) by 512 keys: 1 MiB of
float32, which stays in a core's second-level cache through the two products and the exponential,
and half a millisecond of work, beside which what Python does between the calls is nothing. Where
the rows of one head do not fill a tile, several heads, and then several items, share the calls.
Only where a band cuts a tile is it cut further, into strips of 128 rows: what is computed for
nothing is then half a strip's square. The cells of a table (`table`) are as high as strips.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple

from polyattn.plugin import Problem, Span, column_span, full_span, is_full

__all__ = [
    "Patch",
    "Piece",
    "Tile",
    "even",
    "even_count",
    "is_tabled",
    "pieces",
    "row_sizes",
    "tiles",
]

#: Rows and keys among which some are hidden.
Patch = tuple[Span, Span]

STRIP = 128
# Below this many pieces an item's keys are split as well, so that threads have something to share.
FEW = 8
# Keys of a part: enough that joining the parts costs nothing beside them.
PART = 8192
# Tiles of an item's scores, below which cutting by a table costs more than the tiles it spares.
TABLED = 4
# Multiply-adds that are worth a thread's waking, about half a millisecond.
TASK = 2**25
# Multiply-adds of a piece, about two milliseconds, beside which what Python does around it is
# nothing: Python runs on one thread at a time.
PIECE = 2**27
# Pieces for each thread, where they are as large: enough that none waits long for the last.
ROUNDS = 3


class Piece(NamedTuple):
    """Some rows of some heads of some batch items, over all the keys they see or a part of them.

    Attributes
    ----------
    outer : tuple of int
        An index into all batch axes but the last.
    batch, heads : Span
        Along the last batch axis, and the key/value heads.
    rows, columns : Span
        The query rows, and the keys outside which they see none of this piece.
    part, parts : int
        Which part of the keys of these rows it has, of how many.
    """

    outer: tuple[int, ...]
    batch: Span
    heads: Span
    rows: Span
    columns: Span
    part: int
    parts: int

    @property
    def units(self) -> int:
        """The number of key/value heads in it, over all items."""
        return self.batch.length * self.heads.length

    def alone(self) -> Iterator[Piece]:
        """Return the same piece a head at a time."""
        for item, head in product(range(*self.batch), range(*self.heads)):
            yield self._replace(batch=Span(item, item + 1), heads=Span(head, head + 1))

    def within(self, shape: tuple[int, ...], *spans: Span | None) -> tuple[Any, ...]:
        """Return where an array with the axes (outer..., batch, G, ...) has it.

        Parameters
        ----------
        shape : tuple of int
            The array's; an axis of length 1 is for all.
        *spans : Span or None
            Of its further axes, None for the whole of one.
        """
        index: list[Any] = [0 if n == 1 else i for i, n in zip(self.outer, shape, strict=False)]
        axes = shape[len(index) :]
        for span, n in zip((self.batch, self.heads, *spans), axes, strict=False):
            index.append(slice(None) if span is None or n == 1 else slice(*span))
        return tuple(index)

    def own(self, tile: Tile) -> tuple[slice, Span]:
        """Return which of its heads and rows a tile has."""
        first, row = self.heads.start, self.rows.start
        heads = slice(tile.heads.start - first, tile.heads.stop - first)
        return heads, Span(tile.rows.start - row, tile.rows.stop - row)


class Tile(NamedTuple):
    """Some heads, rows and keys, and whether the band hides some of these from some of those.

    It may be wider than a tile is meant to be: `width` says by how many keys to go through it.
    Where a table is known, the `patches` are where masks hide something, and the rest is full.
    """

    heads: Span
    rows: Span
    columns: Span
    ragged: bool
    width: int
    patches: tuple[Patch, ...] | None = None


def even(length: int, most: int) -> int:
    """Return a size of at most `most` that cuts `length` into as few blocks, and about equal."""
    blocks = -(-length // most)
    return min(most, -(-length // (16 * blocks)) * 16)


def is_tabled(problem: Problem, tile: int) -> bool:
    """Whether a table of what masks leave is worth making: for an item of some tiles of scores.

    What causal and window leave at a known offset is known without, and of a function alone a table
    says nothing.
    """
    banded_by_item = problem.query_offset is None and problem.masks_by_position
    given = problem.mask is not None or problem.mask_spec is not None or banded_by_item
    return given and math.prod(problem.scores[-3:]) >= TABLED * tile


def row_sizes(problem: Problem, tile: int) -> tuple[int, int]:
    """Return how many rows a piece has, and how many of them are taken at a time in strips."""
    most = max(1, math.isqrt(tile) // (problem.heads // problem.key_heads))
    rows = even(problem.query_length, most)
    if not is_tabled(problem, tile):
        return rows, strip_of(problem, rows, tile) if problem.masks_by_position else rows
    # A table has one height of strips, so pieces are whole numbers of them.
    strip = min(rows, max(1, STRIP * math.isqrt(tile) // 512))
    blocks = -(-problem.query_length // (most // strip * strip))
    return -(-problem.query_length // (blocks * strip)) * strip, strip


@lru_cache(maxsize=32)
def pieces(problem: Problem, tile: int, threads: int, *, pooled: bool = True) -> tuple[Piece, ...]:
    """Cut a call into pieces, those with most work first.

    Parameters
    ----------
    problem : Problem
        The facts of the call.
    tile : int
        How many scores a tile may hold.
    threads : int
        How many threads will share the pieces.
    pooled : bool
        Whether items may share one: not where each has a table of its own, by which it is cut.

    Returns
    -------
    tuple of Piece
        The pieces; parts of the same rows stand in the order of their keys.
    """
    side = math.isqrt(tile)
    members = problem.heads // problem.key_heads
    rows, height = row_sizes(problem, tile)
    blocks = [
        (block, column_span(problem, block)) for block in Span(0, problem.query_length).split(rows)
    ]
    blocks.sort(key=lambda block: -block[1].length)
    part = problem.key_length
    if problem.key_heads * len(blocks) < FEW:
        part = max(PART * tile // 2**18, 1)
    *outer, items = problem.batch or (1,)
    # How many heads fill a tile, and of how many one piece holds the sums.
    fit = max(1, tile // (height * members * min(side, problem.key_length)))
    most = max(fit, tile // (rows * members * max(problem.value_size, 64)))
    if threads > 1:
        units = math.prod(outer) * items * problem.key_heads * len(blocks)
        head = rows * members * problem.key_length * (problem.head_size + problem.value_size)
        rounds = min(max(units * head // (threads * PIECE), 1), ROUNDS)
        share = -(-units // (threads * rounds))
        fit, most = min(fit, share), min(most, share)
    heads = even_count(problem.key_heads, most)
    batch = max(1, fit // heads) if pooled and heads == problem.key_heads else 1
    found = []
    for block, columns in blocks:
        parts = list(columns.split(part)) or [columns]
        whole = len(parts) == 1
        found += [
            Piece(index, some, few, block, keys, number, len(parts))
            for index in product(*map(range, outer))
            for some in Span(0, items).split(batch if whole else 1)
            for few in Span(0, problem.key_heads).split(heads if whole else 1)
            for number, keys in enumerate(parts)
        ]
    return tuple(found)


def even_count(number: int, most: int) -> int:
    """Return a count of at most `most` that deals `number` out evenly."""
    return -(-number // -(-number // most))


def strip_of(problem: Problem, rows: int, tile: int) -> int:
    """Return how many of `rows` rows are taken at a time where a band cuts a tile."""
    if problem.query_offset is None:  # nothing is known of where it lies
        return rows
    return min(rows, max(1, STRIP * math.isqrt(tile) // 512))


def within(span: Span, bounds: Span) -> Span:
    """Return what of a span lies in bounds, its ends moved inwards to where vectors begin."""
    start, stop = max(span.start, bounds.start), min(span.stop, bounds.stop)
    start = start if start == bounds.start else -(-start // 16) * 16
    stop = stop if stop == bounds.stop else stop // 16 * 16
    return Span(start, stop) if start < stop else Span(bounds.start, bounds.start)


def tiles(problem: Problem, piece: Piece, tile: int) -> Iterator[Tile]:
    """Cut a piece into tiles; none that the band leaves empty is among them.

    Parameters
    ----------
    problem : Problem
        The facts of the call.
    piece : Piece
        The piece.
    tile : int
        How many scores a tile may hold.

    Yields
    ------
    Tile
        First of all the piece's rows, then of strips of them.
    """
    side = math.isqrt(tile)
    members = problem.heads // problem.key_heads
    common = within(full_span(problem, piece.rows), piece.columns)
    if common.length:
        width = even(common.length, side)
        few = tile // (piece.batch.length * piece.rows.length * members * width)
        for heads in piece.heads.split(max(1, few)):
            yield Tile(heads, piece.rows, common, False, width)
    if common == piece.columns:
        return
    for strip in piece.rows.split(strip_of(problem, piece.rows.length, tile)):
        seen = column_span(problem, strip)
        start, stop = max(seen.start, piece.columns.start), min(seen.stop, piece.columns.stop)
        edges = [Span(start, common.start), Span(common.stop, stop)]
        if not common.length:
            edges = [Span(start, stop)]
        for edge in edges:
            if edge.length > 0:
                ragged = not is_full(problem, strip, edge)
                yield Tile(piece.heads, strip, edge, ragged, even(edge.length, side))
