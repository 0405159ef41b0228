"""The gradients of attention, a tile of scores at a time.

The weights are computed again from the scores and the logsumexp, so that memory is for one tile
beside the gradients. The logsumexp may be that of more keys than are given: then these are the
shares of the given keys, and the shares of all parts add up.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from polyattn._base.arrays import Array, with_rank
from polyattn._base.span import Span
from polyattn._core.call.gradients import Gradients
from polyattn._core.call.operands import Cotangents, Operands, Residuals
from polyattn._core.call.problem import Problem
from polyattn._core.expressions.derivatives import finite
from polyattn._core.expressions.replacements import Similarity
from polyattn._core.tiles.batch_axes import part_of
from polyattn._core.tiles.grouped_heads import fold_heads, unfold_heads
from polyattn._kernels.masked_sum import visible_product
from polyattn._kernels.recomputed import RowBlock, Scored, score_tile
from polyattn._kernels.sums import GradientSums
from polyattn._kernels.visible_tiles import visible_tiles
from polyattn.plugin import Backend


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
        given = _Given.of(problem, residuals.output, cotangents, backend, block)
        if total.wants("sinks"):
            of_sinks = backend.xp.sum(block.sink_weights * given.delta, axis=(-2, -1))
            total.add("sinks", -of_sinks, rows, keys)
        tiles = keys.split(column_block)
        for columns, masked in visible_tiles(problem, x, backend, rows, tiles):
            # Without a name here, so that one tile is let go before the next is computed.
            _add_tile(
                problem, x, backend, block, given,
                score_tile(problem, x, backend, block, columns, masked), total,
            )  # fmt: skip
    return total.total()


class _Given(NamedTuple):
    """The gradients of the results of some rows."""

    output: Array  # (..., G, H/G · l, E)
    delta: Array  # Σ output · output gradient − logsumexp gradient, (..., H, l, 1)

    @classmethod
    def of(
        cls,
        problem: Problem,
        output: Array,
        cotangents: Cotangents,
        backend: Backend,
        block: RowBlock,
    ) -> _Given:
        xp, rows = backend.xp, block.rows
        gradient = part_of(problem, cotangents.output, rows, xp)
        delta = xp.sum(part_of(problem, output, rows, xp) * gradient, axis=-1, keepdims=True)
        if cotangents.logsumexp is not None:
            delta = delta - part_of(problem, cotangents.logsumexp[..., None], rows, xp)
        if block.empty is not None:
            delta = xp.where(block.empty, xp.zeros_like(delta), delta)
        return cls(fold_heads(problem, gradient, xp), delta)


def _add_tile(
    problem: Problem,
    x: Operands,
    backend: Backend,
    block: RowBlock,
    given: _Given,
    tile: Scored,
    total: GradientSums,
) -> None:
    """Add what a tile gives to the gradients: the steps of the formula, from the last."""
    xp = backend.xp
    d_weights = _through_sum(problem, x, backend, block, given.output, tile, total)  # 9, 8
    if problem.normalizer is None:
        ds = tile.weights * (d_weights - given.delta)  # 7
    else:
        ds = problem.normalizer.pullback(tile.weights, d_weights, xp)
    if problem.masks:
        ds = xp.where(tile.seen, ds, xp.zeros_like(ds))  # 5
    ds = _through_scores(problem, backend, block, tile, ds, total)  # 4 to 2
    if x.similarity is None:  # 1
        _add_product(problem, backend, block, tile, ds, total)
    else:
        _add_similarity(problem, x.similarity, backend, block, tile, ds, total)


def _through_sum(
    problem: Problem,
    x: Operands,
    backend: Backend,
    block: RowBlock,
    gradient: Array,
    tile: Scored,
    total: GradientSums,
) -> Array:
    """Add to the gradient of the value, and return that of the weights before dropout."""
    xp, weights = backend.xp, tile.weights
    value = part_of(problem, x.value, tile.columns, xp)
    d_weights = backend.matmul(gradient, xp.matrix_transpose(value))
    d_weights = unfold_heads(problem, d_weights, xp)
    if problem.dropout:
        keep, zeros = tile.at.keep_mask(), xp.zeros_like(weights)
        weights, d_weights = (
            xp.where(keep, one / (1 - problem.dropout), zeros) for one in (weights, d_weights)
        )
    if total.wants("value"):
        by_key, seen = (_transposed(problem, one, xp) for one in (weights, tile.seen))
        d_value = visible_product(problem, backend, by_key, seen, gradient)
        total.add("value", d_value, block.rows, tile.columns)
    return d_weights


def _through_scores(
    problem: Problem,
    backend: Backend,
    block: RowBlock,
    tile: Scored,
    ds: Array,
    total: GradientSums,
) -> Array:
    """Add to the gradients of bias, score_mod and softcap, and return that of the products."""
    xp, rows, columns = backend.xp, block.rows, tile.columns
    if total.wants("bias"):
        total.add("bias", ds, rows, columns)
    ds, of_score = tile.at.score_pullback(tile.scores.capped, ds, backend.pullback)
    total.add_carried("score_mod", of_score)
    if problem.softcap is not None:
        bent = xp.tanh(tile.scores.normed / problem.softcap)
        slope = 1 - bent * bent
        of_softcap = ds * (bent - tile.scores.normed / problem.softcap * slope)
        total.add("softcap", of_softcap, rows, columns)
        ds = ds * slope
    if problem.score_norm is not None:
        ds = problem.score_norm.pullback(tile.scores.product, tile.scores.visible, ds, xp)
    return ds


def _add_product(
    problem: Problem, backend: Backend, block: RowBlock, tile: Scored, ds: Array,
    total: GradientSums,
) -> None:  # fmt: skip
    """Add to the gradients of query and key, through q·k."""
    xp = backend.xp
    if total.wants("query"):
        by_row, seen = (fold_heads(problem, one, xp) for one in (ds, tile.seen))
        d_query = visible_product(problem, backend, by_row, seen, tile.key)
        total.add("query", unfold_heads(problem, d_query, xp), block.rows, tile.columns)
    if total.wants("key"):
        by_key, seen = (_transposed(problem, one, xp) for one in (ds, tile.seen))
        d_key = visible_product(problem, backend, by_key, seen, block.query)
        total.add("key", d_key, block.rows, tile.columns)


def _add_similarity(
    problem: Problem, similarity: Similarity, backend: Backend, block: RowBlock, tile: Scored,
    ds: Array, total: GradientSums,
) -> None:  # fmt: skip
    """Add to the gradients of query, key, scale and what a similarity carries."""
    xp = backend.xp
    total.add("scale", ds * tile.scores.similar, block.rows, tile.columns)
    query, key = block.query, with_rank(tile.key, len(block.query.shape))
    if problem.masks:  # a visible entry that is not finite has made NaN of `ds` already
        query, key = finite(xp, query), finite(xp, key)
    ds = problem.scale * fold_heads(problem, ds, xp)
    d_query, d_key, of_similarity = similarity.pullback(query, key, ds, backend)
    total.add_carried("similarity", of_similarity)
    total.add("query", unfold_heads(problem, d_query, xp), block.rows, tile.columns)
    total.add("key", d_key, block.rows, tile.columns)


def _transposed(problem: Problem, array: Array, xp: Any) -> Array:
    """Turn (..., H, l, s) into (..., G, s, H/G · l)."""
    return xp.matrix_transpose(fold_heads(problem, array, xp))
