"""The visible scores in the tiles of a task, by the mask table if there is one, else by the band.

Masks of a tile have the axes (b, k, row, g, key): items, key/value heads, rows, the query heads of
a group, keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from operator import and_
from typing import Any

import numpy as np

from polyattn.plugin import Array, band
from polyattn_numpy.mask_table import MaskTable
from polyattn_numpy.prepared import PreparedCall
from polyattn_numpy.scratch import band_tile
from polyattn_numpy.tiling import Region, ScoreTile, ThreadTask, tiles

#: An index into a tile's scores, and which of the scores there are visible.
RegionMask = tuple[Any, Array]


class TileVisibility:
    """The tiles of a task, and the scores that are visible in them."""

    def __init__(self, call: PreparedCall, task: ThreadTask) -> None:
        self.call, self.task, self.problem = call, task, call.problem
        self._banded_by_item = self.problem.masks_by_position and self.problem.query_offset is None
        self._last: tuple[Any, list[RegionMask]] = (None, [])

    def tiles(self) -> Iterator[ScoreTile]:
        """Cut the task into the tiles that are not known to be empty."""
        if self.call.table is not None:
            return self.call.table.tiles(self.task)
        return tiles(self.problem, self.task, self.call.tile)

    def masks(self, tile: ScoreTile) -> list[RegionMask] | None:
        """Return the masks of the regions that hide scores, or None if all scores are hidden."""
        table = self.call.table
        if table is not None and tile.regions is not None:
            return self._of_regions(table, tile, tile.regions)
        masks: list[RegionMask] = []
        by_array = self._banded_by_item and tile.crosses_band
        if self.call.x.mask is not None or by_array:
            indices = self.call.indices(self.task, tile.heads, tile.rows, tile.columns)
            seen = self.call.by_row(reduce(and_, indices.visible(banded=by_array)))
            if not seen.any():
                return None
            if not seen.all():
                masks.append((..., seen))
        if tile.crosses_band and not self._banded_by_item:
            masks += self._of_band(tile)
        return masks

    def _of_regions(
        self, table: MaskTable, tile: ScoreTile, regions: tuple[Region, ...]
    ) -> list[RegionMask]:
        """Return the masks of some regions; reuse the previous tile's if only the heads differ."""
        # Made anew for each tile, they add up to a tenth to the time of a call.
        key = (tile.rows, tile.columns)
        if self._last[0] == key:
            return self._last[1]
        masks = []
        for rows, columns in regions:
            seen = table.mask.seen(self.call.indices(self.task, tile.heads, rows, columns))
            first, start = tile.rows.start, tile.columns.start
            down = slice(rows.start - first, rows.stop - first)
            across = slice(columns.start - start, columns.stop - start)
            masks.append(((..., down, slice(None), across), self.call.by_row(seen)))
        self._last = (key if table.same_for_all_heads else None, masks)
        return masks

    def _of_band(self, tile: ScoreTile) -> Iterator[RegionMask]:
        """Yield a mask for each edge of the band that crosses a tile."""
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

    def empty_rows(self) -> Array:
        """Return which rows see no key, with the axes (b, k, rows · g, 1) of a sum of weights."""
        group_size = self.problem.group_size
        batch, rows = self.task.batch.length, self.task.rows
        nonempty = np.zeros((batch, self.task.heads.length, rows.length, group_size), bool)
        for tile in self.tiles():
            heads, relative = self.task.relative(tile)
            for columns in tile.columns.split(tile.width):
                masks = self.masks(tile._replace(columns=columns))
                if masks is None:
                    continue
                shape = (batch, tile.heads.length, relative.length, group_size, columns.length)
                seen = np.ones(shape, bool)
                for where, part in masks:
                    seen[where] &= part
                nonempty[:, heads, slice(*relative)] |= seen.any(axis=-1)
        return ~nonempty.reshape(*nonempty.shape[:2], -1, 1)
