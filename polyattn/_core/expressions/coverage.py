"""The coverage of a block of scores by a mask, found without a look at each key.

A block gives bounds, as Python numbers or as arrays of them. A coverage is conservative: an empty
block may be reported as non-empty, which costs time; the reverse would give a wrong result.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from polyattn._base.arrays import Array
from polyattn._base.tracing import constant_when_traced
from polyattn._core.expressions.parts import Part


class Coverage(NamedTuple):
    """The visibility of a block: bools, or arrays of them with the axes (..., H, rows, keys)."""

    any_visible: Any  # False where surely no row of the block sees a key of it
    all_visible: Any  # True where surely every row of the block sees all its keys

    def __and__(self, other: Coverage) -> Coverage:
        return Coverage(self[0] & other[0], self[1] & other[1])

    def __or__(self, other: Coverage) -> Coverage:
        return Coverage(self[0] | other[0], self[1] | other[1])


UNKNOWN = Coverage(True, False)


class Bounds:
    """The least and the greatest of the rows, keys or numbers of a block.

    Compared with others, or with a number that all have, they give the coverage where that holds.
    """

    __slots__ = ("greatest", "least")

    def __init__(self, least: Any, greatest: Any) -> None:
        self.least, self.greatest = least, greatest

    # Each looks at the other itself: they are called for each tile.
    def __le__(self, other: Any) -> Coverage:
        low, high = (other.least, other.greatest) if type(other) is Bounds else (other, other)
        return Coverage(self.least <= high, self.greatest <= low)

    def __lt__(self, other: Any) -> Coverage:
        low, high = (other.least, other.greatest) if type(other) is Bounds else (other, other)
        return Coverage(self.least < high, self.greatest < low)

    def __ge__(self, other: Any) -> Coverage:
        low, high = (other.least, other.greatest) if type(other) is Bounds else (other, other)
        return Coverage(self.greatest >= low, self.least >= high)

    def __eq__(self, other: Any) -> Coverage:  # type: ignore[override]
        low, high = (other.least, other.greatest) if type(other) is Bounds else (other, other)
        some = (self.least <= high) & (low <= self.greatest)
        return Coverage(some, some & (self.least == self.greatest) & (low == high))


class TileTable(NamedTuple):
    """The coverage of each tile of a mask, as bytes of 0 and 1."""

    size: int  # rows and keys of a tile
    shape: tuple[int, int, int, int]  # batch items, heads (1 where all are alike), tiles each way
    any_visible: bytes
    all_visible: bytes

    def of_block(self, rows: tuple[int, int], columns: tuple[int, int]) -> Coverage:
        """Return the coverage of a block of any bounds, over all batch items and heads."""
        # Numbers of tiles, which torch.compile makes constants even where a length is a symbol.
        down, across = (
            tuple(range(first // self.size, -(-stop // self.size)))
            for first, stop in (rows, columns)
        )
        return Coverage(*_of_tiles(self.any_visible, self.all_visible, self.shape, down, across))

    def of_part(self, part: Part) -> TileTable:
        """Return the table of a part of the scores, whose first row and key begin a tile."""
        items, heads, height, width = self.shape
        at_items = part.flat_items if items > 1 else [0]
        at_heads = range(part.heads.start, part.heads.stop) if heads > 1 else [0]
        down, across = (
            range(span.start // self.size, -(-span.stop // self.size))
            for span in (part.rows, part.columns)
        )
        lines = [
            ((item * heads + head) * height + row) * width + across.start
            for item in at_items
            for head in at_heads
            for row in down
        ]
        any_visible, all_visible = (
            b"".join([half[line : line + len(across)] for line in lines])
            for half in (self.any_visible, self.all_visible)
        )
        shape = len(at_items), len(at_heads), len(down), len(across)
        return TileTable(self.size, shape, any_visible, all_visible)


@constant_when_traced
def _of_tiles(
    any_visible: bytes,
    all_visible: bytes,
    shape: tuple[int, int, int, int],
    down: tuple[int, ...],
    across: tuple[int, ...],
) -> tuple[bool, bool]:
    items, heads, height, width = shape
    left, right = across[0], across[-1] + 1
    starts = [(table * height + row) * width for table in range(items * heads) for row in down]
    lines = [slice(start + left, start + right) for start in starts]
    return any(1 in any_visible[x] for x in lines), all(0 not in all_visible[x] for x in lines)


class Block(Protocol):
    """Some rows and keys, each the first and the one after the last; `TileQuery` documents it.

    It may be many such blocks at once: then the bounds are arrays. `reads` says whether arrays may
    be read. Masks that compare indices and numbers take it as `ScoreIndices`.
    """

    @property
    def rows(self) -> tuple[Any, Any]: ...
    @property
    def columns(self) -> tuple[Any, Any]: ...
    @property
    def reads(self) -> bool: ...
    @property
    def positioned(self) -> bool: ...
    def position(self, shift: int = 0) -> Bounds: ...
    def per_item(self, numbers: int | Array) -> Any: ...
    def any_and_all(self, visible: Array) -> tuple[Array, Array]: ...
    def table(self, table: TileTable) -> Coverage: ...


def logical_not(flags: Any) -> Any:
    """Return the opposite of a bool, or of an array of bools."""
    return not flags if isinstance(flags, bool) else ~flags


def complement(seen: Any) -> Any:
    """Return the opposite of an array, or of a coverage, whose `~` torch.compile cannot trace."""
    if isinstance(seen, Coverage):
        return Coverage(logical_not(seen.all_visible), logical_not(seen.any_visible))
    return ~seen
