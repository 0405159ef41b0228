"""The chunks of keys that the rows of a chunk may see, by arithmetic while the graph is built."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Any

import array_api_compat.numpy as xp
import numpy as np

from polyattn._base.slices import Slice
from polyattn.plugin import Mask, Operands, Problem, Span, TileQuery, column_span
from polyattn.plugin import combined_mask as combined
from polyattn_dask.grid import Grid, Index, axes_along, axes_of


class ChunkVisibility:
    """The chunks of keys of each block of query rows."""

    # NumPy arrays in a mask are read, dask arrays are not. If the masks would be asked about more
    # than `most_looks` pairs of chunks, they are not: a block sees what causal and window leave.

    def __init__(
        self, problem: Problem, x: Operands, grid: Grid, most_looks: int | None = None
    ) -> None:
        self._problem, self._options, self._grid = problem, x, grid
        mask: Any = combined(problem, x)
        # The parts of masks that are joined by &: those with dask arrays are not read.
        parts = mask.parts if getattr(mask, "sign", "") == "&" else (mask,)
        # The band of an offset that is a number needs no look at single chunks.
        self._masks = [
            one
            for one in parts
            if one is not None and not (one == problem.band and problem.query_offset is not None)
        ]
        self._starts = [span.start for span in grid.columns]
        self._stops = [span.stop for span in grid.columns]
        self._no_empty = all(span.length for span in grid.columns)
        self._found: dict[tuple[Any, ...], Sequence[int]] = {}
        self.is_exact = most_looks is None or self._looks() <= most_looks
        if not self.is_exact:
            self._masks = []

    def of(self, at: Index) -> Sequence[int]:
        """Return the numbers of the chunks that some row of a block may see."""
        # They are a range if no mask is asked and no chunk is empty.
        axes = self._axes()
        items = tuple([n if axis in axes else 0 for axis, n in enumerate(at.items)])
        known = Index(items, at.head if "H" in axes else 0, at.row)
        if known not in self._found:
            self._found[known] = self._look(self._grid.rows[at.row], known)
        return self._found[known]

    def _looks(self) -> int:
        """Return how many pairs of chunks the masks are asked about, at most."""
        if not self._masks:
            return 0
        each = math.prod([len(self._grid.spans(axis)) for axis in self._axes()])
        return each * len(self._masks) * sum([len(self._near(rows)) for rows in self._grid.rows])

    def _axes(self) -> set[Any]:
        return {axis for one in self._masks for axis in self._axes_in(one)}

    def _near(self, rows: Span) -> range:
        """Return the chunks that causal and window leave, by an offset that is a number."""
        seen = column_span(self._problem, rows)
        if not rows.length or not seen.length:
            return range(0)
        return range(bisect_right(self._stops, seen.start), bisect_left(self._starts, seen.stop))

    def _look(self, rows: Span, at: Index) -> Sequence[int]:
        near: Sequence[int] = self._near(rows)
        if not self._no_empty:
            near = [n for n in near if self._grid.columns[n].length]
        problem, x = self._problem, self._options
        # The items and heads of the block, with all rows and keys.
        part = self._grid.part(problem, at)._replace(rows=Slice(0, problem.query_length))
        offset: Any = x.query_offset
        if _is_numpy(offset):
            x = x._replace(query_offset=part.array(offset, ".---"))
        for mask in self._masks:
            reads = not _has_lazy(mask) and (problem.query_offset is not None or _is_numpy(offset))
            own = mask.part(part) if reads else mask
            near = [
                n
                for n in near
                if TileQuery(problem, x, xp, rows, self._grid.columns[n], reads=reads)
                .of(own)
                .any_visible
            ]
        return near

    def _axes_in(self, mask: Mask) -> set[Any]:
        """Return the batch axes and the heads that the answer depends on."""
        axes = {
            axis
            for last, array in mask.arrays()
            if _is_numpy(array)
            for axis in axes_along(last, array.shape, self._problem)
        }
        offset: Any = self._options.query_offset
        if _is_numpy(offset):
            axes |= set(axes_of("query_offset", offset.shape, self._problem))
        return axes - {None, "L", "S"}


def _is_numpy(thing: Any) -> bool:
    return isinstance(thing, np.ndarray)


def _has_lazy(mask: Mask) -> bool:
    return any(hasattr(thing, "dtype") and not _is_numpy(thing) for _, thing in mask.carried())
