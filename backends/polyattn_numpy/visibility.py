"""What masks hide of the tiles of a piece: by the table where there is one, else by the band.

What it says is of the axes (b, k, row, g, key): items, key/value heads, rows, members, keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from operator import and_
from typing import Any

import numpy as np

from polyattn.plugin import Array, band
from polyattn_numpy.blocks import Patch, Piece, Tile, tiles
from polyattn_numpy.prepared import Call
from polyattn_numpy.scratch import band_tile

__all__ = ["Hidden", "Sight"]

#: Where keys may be hidden, and which are seen there.
Hidden = tuple[Any, Array]


class Sight:
    """The tiles of a piece, and what masks hide of them.

    Parameters
    ----------
    call : Call
        The call.
    piece : Piece
        Which part of it.
    """

    def __init__(self, call: Call, piece: Piece) -> None:
        self.call, self.piece, self.problem = call, piece, call.problem
        self._banded = self.problem.masks_by_position and self.problem.query_offset is None
        self._last: tuple[Any, list[Hidden]] = (None, [])

    def tiles(self) -> Iterator[Tile]:
        """Cut the piece into tiles; none that is known to be empty is among them."""
        if self.call.table is not None:
            return self.call.table.tiles(self.piece)
        return tiles(self.problem, self.piece, self.call.tile)

    def hidden(self, tile: Tile) -> list[Hidden] | None:
        """Return where keys of a tile are hidden, or None where all of them are."""
        if tile.patches is not None:
            return self._in_patches(tile, tile.patches)
        found: list[Hidden] = []
        if self.call.x.mask is not None or (self._banded and tile.ragged):
            indices = self.call.indices(self.piece, tile.heads, tile.rows, tile.columns)
            visible = indices.visible(banded=self._banded and tile.ragged)
            seen = self._split_heads(reduce(and_, visible))
            if not seen.any():
                return None
            if not seen.all():
                found.append((..., seen))
        if tile.ragged and not self._banded:
            found += self._corners(tile)
        return found

    def _in_patches(self, tile: Tile, patches: tuple[Patch, ...]) -> list[Hidden]:
        """Return what is seen in patches, that of the last tile again where heads are alike."""
        assert self.call.mask is not None
        assert self.call.table is not None
        key = (tile.rows, tile.columns)
        if self._last[0] == key:
            return self._last[1]
        found = []
        for rows, columns in patches:
            seen = self.call.mask.seen(self.call.indices(self.piece, tile.heads, rows, columns))
            first, start = tile.rows.start, tile.columns.start
            down = slice(rows.start - first, rows.stop - first)
            across = slice(columns.start - start, columns.stop - start)
            found.append(((..., down, slice(None), across), self._split_heads(seen)))
        self._last = (key if self.call.table.alike else None, found)
        return found

    def _split_heads(self, seen: Array) -> Array:
        """Turn what broadcasts to (b, H, row, key) into the axes (b, k, row, g, key)."""
        members = self.problem.heads // self.problem.key_heads
        seen = seen.reshape((1,) * (4 - seen.ndim) + seen.shape)
        b, heads, rows, size = seen.shape
        split = (1, 1) if heads == 1 else (heads // members, members)
        return seen.reshape(b, *split, rows, size).swapaxes(2, 3)

    def _corners(self, tile: Tile) -> Iterator[Hidden]:
        """Yield where the band hides keys of some of the rows, and which it shows, a side each."""
        low, high = band(self.problem)
        (first, last), (start, stop) = tile.rows, tile.columns
        if low is not None and start < last - 1 + low:
            edge = min(stop, last - 1 + low)
            yield (
                (..., slice(0, edge - start)),
                band_tile(last - first, edge - start, first + low - start, None),
            )
        if high is not None and stop > first + high + 1:
            edge = max(start, first + high + 1)
            yield (
                (..., slice(edge - start, stop - start)),
                band_tile(last - first, stop - edge, None, first + high - edge),
            )

    def is_nothing(self) -> Array:
        """Return which rows see no key, with the axes (b, k, rows · g, 1) of a sum of weights."""
        members = self.problem.heads // self.problem.key_heads
        batch, rows = self.piece.batch.length, self.piece.rows
        found = np.zeros((batch, self.piece.heads.length, rows.length, members), bool)
        for tile in self.tiles():
            heads, own = self.piece.own(tile)
            for columns in tile.columns.split(tile.width):
                part = tile._replace(columns=columns)
                shape = (batch, tile.heads.length, own.length, members, columns.length)
                hidden = self.hidden(part)
                if hidden is None:
                    continue
                seen = np.ones(shape, bool)
                for where, some in hidden:
                    seen[where] &= some
                found[:, heads, slice(*own)] |= seen.any(axis=-1)
        return ~found.reshape(*found.shape[:2], -1, 1)
