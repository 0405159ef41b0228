"""A pass over the tiles of a task, of one of three kinds.

fast
    Weights are exp(score), with no row maximum to find and subtract; those of hidden scores are
    multiplied by 0. The result shows row by row whether it is reliable. The sum of a row's weights
    bounds each of them: if it and the output are finite, nothing overflowed, and if it is not
    small, nothing that counts was lost in underflow.
poison_safe
    NaN or infinity behind a mask makes a fast result look unreliable. This pass leaves out what is
    hidden; where nothing hidden is NaN or infinite it gives the same bits as the fast one.
stable
    The running maximum is subtracted too, for the rows that remain: they have large scores, or see
    NaN or infinity.

The pass that gives a row's result depends only on what the row sees, and so does each of its bits.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np

from polyattn.plugin import Array, Span
from polyattn_numpy.prepared import PreparedCall
from polyattn_numpy.scratch import Scratch, ones
from polyattn_numpy.softmax_sums import SoftmaxSums, product_of_seen, weighted_sum
from polyattn_numpy.tile_scores import TileScores, convert
from polyattn_numpy.tile_visibility import RegionMask
from polyattn_numpy.tiling import ScoreTile, ThreadTask

# Sums of weights below this may lack weights below float32's range.
LEAST = 2.0**-20


class Sweep(TileScores):
    """A pass over the tiles of a task; the result stays in `scratch` until that is lent again."""

    def __init__(
        self,
        call: PreparedCall,
        task: ThreadTask,
        scratch: Scratch,
        kind: Literal["fast", "poison_safe", "stable"] = "fast",
    ) -> None:
        super().__init__(call, task, scratch)
        problem, x = call.problem, call.x
        self.fast, self.stable = kind == "fast", kind == "stable"
        modified = problem.softcap is not None or x.score_mod is not None or x.bias is not None
        masked = x.mask is not None or problem.query_offset is None
        # Whether weights are the exponentials of products, but for tiles that a band crosses. To
        # look for masks in each tile then takes up to 1.1 times as long for one row.
        self.direct = self.fast and not (modified or masked or problem.dropout)
        query = task.view(call.query, None, task.rows).swapaxes(2, 3)
        self.query = self._per_row("query", problem.head_size)
        scaled = self.query.reshape(query.shape)
        if query.dtype != self.dtype:
            convert(query, scaled)
            query = scaled
        np.multiply(query, self.query_factor, out=scaled)

    def run(self) -> SoftmaxSums:
        """Add up all tiles."""
        state = self._start()
        for tile in self.visibility.tiles():
            self._add(state, tile)
        return state

    def reliable_rows(self, state: SoftmaxSums) -> Array | bool:
        """Return the rows in which a pass without maxima was accurate, or True for all."""
        output, total, parts = state.output, state.total, self.task.parts
        # A sum is finite only if all its terms are, and needs only one pass over them.
        is_finite = parts == 1 and math.isfinite(output.sum())
        if is_finite and total.min() >= LEAST and total.max() < math.inf:
            return True
        # The sums of the parts of the keys must not overflow when they are added up either.
        most = np.finfo(self.dtype).max / parts
        enough = total >= LEAST
        # A row without visible keys and sinks is reliable: its sums are 0.
        if self.call.x.sinks is None and not enough.all():
            enough |= self.visibility.empty_rows()
        reliable: Array = (
            enough & (total <= most) & (np.abs(output) <= most).all(axis=-1, keepdims=True)
        )
        return reliable if not reliable.all() else True

    def inputs_are_finite(self) -> bool:
        """Return whether the sums of all keys and values are finite, so that they are."""
        x = self.call.x
        if x.bias is not None or x.score_mod is not None:
            return False
        return all(math.isfinite(x.sum(dtype=self.dtype)) for x in (self.key, self.value))

    # ---- sums ----

    def _start(self) -> SoftmaxSums:
        """Return the state before any key."""
        output, total = self._per_row("output", self.problem.value_size), self._per_row("total", 1)
        reference = np.zeros((1, 1, 1, 1), self.dtype)
        if self.stable:
            reference = self._per_row("reference", 1)
            reference[...] = -math.inf
        output[...] = 0
        total[...] = 0
        if self.call.x.sinks is not None and self.task.part == 0:
            self._add_sinks(reference, total)
        return SoftmaxSums(output, reference, total)

    def _add_sinks(self, reference: Array, total: Array) -> None:
        sinks = np.asarray(self.call.x.sinks, self.dtype).reshape(-1, 1, self.group_size, 1)
        sinks = sinks[slice(*self.task.heads)]
        by_head = (*self.shape, self.group_size, 1)
        if self.stable:
            reference.reshape(by_head)[...] = sinks * self.dtype.type(self.exp_factor)
            total.reshape(by_head)[...] = sinks != -math.inf
        else:
            total.reshape(by_head)[...] = self.exp(sinks * self.dtype.type(self.exp_factor))

    def _add(self, state: SoftmaxSums, tile: ScoreTile) -> None:
        """Add the weights and weighted values of a tile to the sums of its rows."""
        heads, (first, last) = self.task.relative(tile)
        where = (slice(None), heads, slice(first * self.group_size, last * self.group_size))
        query, output, total = self.query[where], state.output[where], state.total[where]
        product = self.scratch("product", output.shape, self.dtype)
        sums = self.scratch("sums", total.shape, self.dtype)
        direct = self.direct and not tile.crosses_band
        for columns in tile.columns.split(tile.width):
            self.call.check()
            part = tile if direct else tile._replace(columns=columns)
            masks = [] if direct else self.visibility.masks(part)
            if masks is None:
                continue
            s = self._scores(query, heads, columns)
            seen = None
            if direct:
                self.exp(s, s)
            elif self.fast:
                self._weigh(s, part, masks)
            else:
                tile_state = SoftmaxSums(output, state.reference[where], total)
                seen = self._weigh_seen(s, part, masks, tile_state)
            np.matmul(s, ones(columns.length, self.dtype), sums)
            if self.problem.dropout:
                weights = self._by_head(s)
                weights *= self.call.by_row(self._indices(part).keep_mask())
            self._weigh_values(s, seen, heads, columns, product)
            np.add(total, sums, total)
            np.add(output, product, output)

    # ---- scores and weights of a tile ----

    def _of_tile(self, name: str, array: Array, heads: slice, columns: Span) -> Array:
        """Return the keys or values of a tile."""
        return self._block(name, array[:, heads, slice(*columns)])

    def _scores(self, query: Array, heads: slice, columns: Span) -> Array:
        """Return scale · q·k or another similarity, times `exp_factor` unless scores are capped."""
        s = self.scratch("scores", (*query.shape[:-1], columns.length), self.dtype)
        self._products(query, self._of_tile("keys", self.key, heads, columns), s)
        return s

    def _weigh_values(
        self, s: Array, seen: Array | None, heads: slice, columns: Span, out: Array
    ) -> None:
        """Write weights · values; where `seen` is known, whatever hidden values are."""
        value = self._of_tile("values", self.value, heads, columns)
        if seen is not None and not np.isfinite(value).all():
            out[...] = product_of_seen(s, seen, value)
        else:
            weighted_sum(s, value, out)

    def _modify(self, s: Array, tile: ScoreTile) -> None:
        """Apply softcap, score function and bias to scores by head."""
        if self.problem.softcap is not None:
            self._cap(s)
        if self.call.x.score_mod is not None:
            self._apply_score_mod(s, tile)
        if self.call.bias is not None:
            s += self._bias(tile)

    def _weigh(self, s: Array, tile: ScoreTile, masks: list[RegionMask]) -> None:
        """Turn scores into weights, with no maximum subtracted."""
        by_head = self._by_head(s)
        self._modify(by_head, tile)
        self.exp(s, s)
        for where, seen in masks:
            by_head[where] *= seen

    def _weigh_seen(
        self, s: Array, tile: ScoreTile, masks: list[RegionMask], state: SoftmaxSums
    ) -> Array:
        """Turn scores into weights, whatever the hidden scores are, and return which are seen."""
        self._modify(self._by_head(s), tile)
        seen = self._hide(tile, masks, s)
        if self.stable:
            self._shift(s, *state)
        self.exp(s, s)
        return seen

    def _shift(self, s: Array, output: Array, reference: Array, total: Array) -> None:
        """Subtract the running maximum from scores, and rescale the sums where it rises."""
        highest = np.maximum(reference, s.max(axis=-1, keepdims=True))
        shift = np.where(highest == -math.inf, 0, highest)
        s -= shift
        shrink = self.exp(reference - shift)
        output *= shrink
        total *= shrink
        reference[...] = highest
