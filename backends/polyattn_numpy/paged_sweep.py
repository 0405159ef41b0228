"""Attention over paged keys and values, without gathering them.

Gathering the pages of a decoding step takes four to five times as long as the step. Slots that an
item does not use are not read. A tile of 8 keys from the first, with pages of 4 slots::

    table of an item [5, 2, 7, …]   PageSlots(page=5, slots=0:4, columns=0:4)
    lengths          6              PageSlots(page=2, slots=0:2, columns=4:6)
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from polyattn.plugin import Array, Span
from polyattn_numpy.forward_sweep import Sweep
from polyattn_numpy.prepared import PreparedCall
from polyattn_numpy.scratch import Scratch
from polyattn_numpy.tile_scores import VECTORS
from polyattn_numpy.tiling import ThreadTask


class PageSlots(NamedTuple):
    """The used slots of one page that belong to a tile."""

    page: int
    slots: slice  # in the page
    columns: slice  # counted from the first key of the tile


class PagedSweep(Sweep):
    """A pass over the tiles of a task whose keys and values are pools of pages."""

    def __init__(self, call: PreparedCall, task: ThreadTask, scratch: Scratch, *kind: Any) -> None:
        super().__init__(call, task, scratch, *kind)
        self._table: Any = call.pages
        self._lengths: Any = call.lengths
        self._last: tuple[Any, list[list[PageSlots]]] = (None, [])

    def inputs_are_finite(self) -> bool:
        return False  # the next pass looks only at used slots

    def _pieces(self, columns: Span) -> list[list[PageSlots]]:
        """Return the used slots of a tile, page by page, for each item of the task."""
        # Kept from keys to values: found twice, a call takes 1.07 to 1.16 times as long.
        if self._last[0] != columns:
            items = range(*self.task.batch)
            self._last = (columns, [self._of_item(item, columns) for item in items])
        return self._last[1]

    def _of_item(self, item: int, columns: Span) -> list[PageSlots]:
        at, size = (*self.task.outer, item), self.key.shape[2]
        start, stop = columns.start, min(columns.stop, int(self._lengths[at]))
        pieces: list[PageSlots] = []
        if stop <= start:  # it may end in the page in which the tile begins
            return pieces
        pages = self._table[at][start // size : -(-stop // size)].tolist()
        for page, first in zip(pages, range(start // size * size, stop, size), strict=False):
            low, high = max(start, first), min(stop, first + size)
            pieces.append(
                PageSlots(page, slice(low - first, high - first), slice(low - start, high - start))
            )
        return pieces

    def _of_tile(self, name: str, array: Array, heads: slice, columns: Span) -> Array:
        """Return a copy of the keys or values of a tile, with 0 in unused slots."""
        heads = self._whole(heads)
        shape = (self.shape[0], heads.stop - heads.start, columns.length, array.shape[-1])
        copy = self.scratch(name, shape, self.dtype)
        copy[...] = 0
        for item, pieces in enumerate(self._pieces(columns)):
            for page, slots, where in pieces:
                copy[item, :, where] = array[page, heads, slots]
        return copy

    def _whole(self, heads: slice) -> slice:
        """Return the heads of a tile counted from the first of the call."""
        first = self.task.heads.start
        return slice(first + heads.start, first + heads.stop)

    def _fits_blas(self, array: Array) -> bool:
        return bool(array.dtype == self.dtype and array.strides[-1] == self.dtype.itemsize)

    def _scores(self, query: Array, heads: slice, columns: Span) -> Array:
        if self.call.x.similarity is not None or not self._fits_blas(self.key):
            return super()._scores(query, heads, columns)
        s = self.scratch("scores", (*query.shape[:-1], columns.length), self.dtype)
        heads, key = self._whole(heads), self.key
        for rows, to, pieces in zip(query, s, self._pieces(columns), strict=True):
            for page, slots, where in pieces:
                if rows.shape[1] <= VECTORS:
                    np.matmul(key[page, heads, None, slots], rows[..., None], to[:, :, where, None])
                else:
                    np.matmul(rows, key[page, heads, slots].swapaxes(1, 2), to[:, :, where])
            last = pieces[-1].columns.stop if pieces else 0
            to[:, :, last:] = 0  # which the mask hides
        return s

    def _weigh_values(
        self, s: Array, seen: Array | None, heads: slice, columns: Span, out: Array
    ) -> None:
        if seen is not None or not self._fits_blas(self.value):
            super()._weigh_values(s, seen, heads, columns, out)
            return
        heads, value = self._whole(heads), self.value
        for weights, to, pieces in zip(s, out, self._pieces(columns), strict=True):
            products = self.scratch("pages", (len(pieces), *to.shape), self.dtype)
            for (page, slots, where), product in zip(pieces, products, strict=True):
                np.matmul(weights[:, :, where], value[page, heads, slots], product)
            np.add.reduce(products, axis=0, out=to)
