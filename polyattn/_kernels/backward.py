"""The gradients of attention, a tile of scores at a time.

The weights are recomputed from the scores and the logsumexp, so memory is for the gradients and
one tile. The logsumexp may cover more keys than are given: then these are the shares of the given
keys, and the shares of all parts add up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from polyattn._base.arrays import Array, with_rank
from polyattn._base.span import Span
from polyattn._core.call.gradients import Gradients
from polyattn._core.call.operands import Cotangents, Operands, Residuals
from polyattn._core.call.problem import Problem
from polyattn._core.expressions.derivatives import finite
from polyattn._core.expressions.replacements import Similarity
from polyattn._core.tiles.axes import fold_heads, part_of, unfold_heads
from polyattn._kernels.dense import dropped
from polyattn._kernels.recomputed import RowBlock, Scored, score_tile
from polyattn._kernels.sums import GradientSums
from polyattn._kernels.visible import visible_product, visible_tiles
from polyattn.plugin import Backend

#: The features of the calls that the steps below differentiate.
DIFFERENTIATED = frozenset({
    "batch_broadcast", "bias", "causal", "dropout", "grouped_heads", "mask", "mask_expression",
    "mask_mod", "normalizer", "query_offset", "query_offset_array", "scale", "score_expression",
    "score_mod", "score_norm", "similarity", "sinks", "softcap", "value_size", "window",
})  # fmt: skip


def gradients(
    problem: Problem,
    x: Operands,
    residuals: Residuals,
    cotangents: Cotangents,
    backend: Backend,
    row_block: int,
    column_block: int,
) -> Gradients:
    """Return the gradients of a call, in the accumulator's dtype, by tiles of such a size."""
    total = GradientSums(problem, x, backend.xp, (row_block, column_block))
    keys = Span(0, problem.key_length)
    for rows in Span(0, problem.query_length).split(row_block):
        block = RowBlock.of(problem, x, residuals.logsumexp, backend, rows)
        output, delta = _of_results(problem, residuals.output, cotangents, backend, block)
        if total.wants("sinks"):
            of_sinks = backend.xp.sum(block.sink_weights * delta, axis=(-2, -1))
            total.add("sinks", -of_sinks, rows, keys)
        tiles = keys.split(column_block)
        for columns, masked in visible_tiles(problem, x, backend, rows, tiles):
            # Without a name here, so that one tile is let go before the next is computed.
            _TilePullback(
                problem, x, backend, block,
                score_tile(problem, x, backend, block, columns, masked), total,
            ).add(output, delta)  # fmt: skip
    return total.total()


def _of_results(
    problem: Problem, output: Array, cotangents: Cotangents, backend: Backend, block: RowBlock
) -> tuple[Array, Array]:
    """Return the gradients of the results of some rows.

    That of the output is (..., G, H/G · l, E). The other, (..., H, l, 1), is Σ output · output
    gradient − logsumexp gradient.
    """
    xp, rows = backend.xp, block.rows
    gradient = part_of(problem, cotangents.output, rows, xp)
    delta = xp.sum(part_of(problem, output, rows, xp) * gradient, axis=-1, keepdims=True)
    if cotangents.logsumexp is not None:
        delta = delta - part_of(problem, cotangents.logsumexp[..., None], rows, xp)
    if block.empty is not None:
        delta = xp.where(block.empty, xp.zeros_like(delta), delta)
    return fold_heads(problem, gradient, xp), delta


@dataclass
class _TilePullback:
    """A tile of scores, and the sums that its gradients are added to."""

    problem: Problem
    x: Operands
    backend: Backend
    block: RowBlock
    scored: Scored
    total: GradientSums

    def add(self, output: Array, delta: Array) -> None:
        """Add its gradients: the steps of the formula, from the last."""
        problem, xp, tile = self.problem, self.backend.xp, self.scored
        d_weights = self._through_sum(output)  # 9, 8
        if problem.normalizer is None:
            ds = tile.weights * (d_weights - delta)  # 7
        else:
            ds = problem.normalizer.pullback(tile.weights, d_weights, xp)
        if problem.masks:
            ds = xp.where(tile.seen, ds, xp.zeros_like(ds))  # 5
        ds = self._through_scores(ds)  # 4 to 2
        if self.x.similarity is None:  # 1
            self._add_product(ds)
        else:
            self._add_similarity(self.x.similarity, ds)

    def _add(self, name: str, gradient: Array) -> None:
        self.total.add(name, gradient, self.block.rows, self.scored.columns)

    def _through_sum(self, gradient: Array) -> Array:
        """Add to the gradient of the value, and return that of the weights before dropout."""
        problem, backend, tile = self.problem, self.backend, self.scored
        xp = backend.xp
        value = part_of(problem, self.x.value, tile.columns, xp)
        d_weights = backend.matmul(gradient, xp.matrix_transpose(value))
        d_weights = unfold_heads(problem, d_weights, xp)
        weights, d_weights = dropped(problem, tile.at, tile.weights, d_weights)
        if self.total.wants("value"):
            by_key, seen = (self._transposed(one) for one in (weights, tile.seen))
            self._add("value", visible_product(problem, backend, by_key, seen, gradient))
        return d_weights

    def _through_scores(self, ds: Array) -> Array:
        """Add to the gradients of bias, score_mod and softcap, and return that of the products."""
        problem, backend, tile = self.problem, self.backend, self.scored
        xp, s = backend.xp, tile.scores
        if self.total.wants("bias"):
            self._add("bias", ds)
        ds, of_score = tile.at.score_pullback(s.capped, ds, backend.pullback)
        self.total.add_carried("score_mod", of_score)
        if problem.softcap is not None:
            bent = xp.tanh(s.normed / problem.softcap)
            slope = 1 - bent * bent
            self._add("softcap", ds * (bent - s.normed / problem.softcap * slope))
            ds = ds * slope
        if problem.score_norm is not None:
            ds = problem.score_norm.pullback(s.product, s.visible, ds, xp)
        return ds

    def _add_product(self, ds: Array) -> None:
        """Add to the gradients of query and key, through q·k."""
        problem, backend, tile = self.problem, self.backend, self.scored
        xp = backend.xp
        if self.total.wants("query"):
            by_row, seen = (fold_heads(problem, one, xp) for one in (ds, tile.seen))
            d_query = visible_product(problem, backend, by_row, seen, tile.key)
            self._add("query", unfold_heads(problem, d_query, xp))
        if self.total.wants("key"):
            by_key, seen = (self._transposed(one) for one in (ds, tile.seen))
            d_key = visible_product(problem, backend, by_key, seen, self.block.query)
            self._add("key", d_key)

    def _add_similarity(self, similarity: Similarity, ds: Array) -> None:
        """Add to the gradients of query, key, scale and the arrays of a similarity."""
        problem, xp, tile = self.problem, self.backend.xp, self.scored
        self._add("scale", ds * tile.scores.similar)
        query, key = self.block.query, with_rank(tile.key, len(self.block.query.shape))
        if problem.masks:  # a visible entry that is not finite has made NaN of `ds` already
            query, key = finite(xp, query), finite(xp, key)
        ds = problem.scale * fold_heads(problem, ds, xp)
        d_query, d_key, of_similarity = similarity.pullback(query, key, ds, self.backend)
        self.total.add_carried("similarity", of_similarity)
        self._add("query", unfold_heads(problem, d_query, xp))
        self._add("key", d_key)

    def _transposed(self, array: Array) -> Array:
        """Turn (..., H, l, s) into (..., G, s, H/G · l)."""
        xp: Any = self.backend.xp
        return xp.matrix_transpose(fold_heads(self.problem, array, xp))
