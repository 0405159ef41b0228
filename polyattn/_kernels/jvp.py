"""The directional derivative of attention, a tile of scores at a time: forward mode.

With weights p, the tangent of the output is Σ p·(t − m)·v + p·(tangent of v), where t is the
tangent of a score and m = Σ p·t that of the logsumexp.
"""

from __future__ import annotations

from polyattn._base.arrays import Array, cast, with_rank
from polyattn._base.span import Span
from polyattn._core.call.operands import Operands, Residuals, Tangents
from polyattn._core.call.problem import Problem
from polyattn._core.tiles.axes import part_of, scaled, unfold_heads
from polyattn._kernels.dense import dropped
from polyattn._kernels.recomputed import RowBlock, Scored, per_head, score_tile
from polyattn._kernels.visible import visible_tiles, weighted_sum
from polyattn.plugin import Backend

#: The features of the calls that the steps below differentiate.
DIFFERENTIATED = frozenset({
    "batch_broadcast", "bias", "causal", "dropout", "grouped_heads", "mask", "mask_expression",
    "mask_mod", "normalizer", "query_offset", "query_offset_array", "scale", "score_expression",
    "score_mod", "score_norm", "similarity", "sinks", "softcap", "value_size", "window",
})  # fmt: skip


def pushforward(
    problem: Problem,
    x: Operands,
    residuals: Residuals,
    tangents: Tangents,
    backend: Backend,
    row_block: int,
    column_block: int,
) -> tuple[Array, Array]:
    """Return the tangents of output and logsumexp, in the accumulator's dtype, by tiles."""
    xp, output = backend.xp, residuals.output
    tangents_of_rows = [
        _of_rows(problem, x, residuals, tangents, backend, rows, column_block)
        for rows in Span(0, problem.query_length).split(row_block)
    ]
    if not tangents_of_rows:
        zeros = xp.zeros_like(output, dtype=getattr(xp, problem.accumulator))
        return zeros, xp.sum(zeros, axis=-1)
    outputs, logsumexps = zip(*tangents_of_rows, strict=True)
    return xp.concat(outputs, axis=-2), xp.concat(logsumexps, axis=-1)


def _of_rows(
    problem: Problem, x: Operands, residuals: Residuals, tangents: Tangents, backend: Backend,
    rows: Span, column_block: int,
) -> tuple[Array, Array]:  # fmt: skip
    """Return the tangents of output and logsumexp of some rows."""
    xp = backend.xp
    output = part_of(problem, residuals.output, rows, xp)
    block = RowBlock.of(problem, x, residuals.logsumexp, backend, rows)
    tangent = xp.zeros_like(output)
    mean = xp.sum(tangent, axis=-1, keepdims=True)  # 0, also where there are no values
    if tangents.sinks is not None:
        mean = mean + block.sink_weights * per_head(xp, tangents.sinks, mean)
    tiles = Span(0, problem.key_length).split(column_block)
    for columns, masked in visible_tiles(problem, x, backend, rows, tiles):
        tile = score_tile(problem, x, backend, block, columns, masked)
        t, weights = _of_scores(problem, x, tangents, backend, block, tile), tile.weights
        if problem.normalizer is None:
            t = weights * t
            mean = mean + xp.sum(t, axis=-1, keepdims=True)
        else:
            t = problem.normalizer.pullback(weights, t, xp)  # its Jacobian is symmetric
        if problem.masks:
            t = xp.where(tile.seen, t, xp.zeros_like(t))
        t, weights = dropped(problem, tile.at, t, weights)
        value, s = part_of(problem, x.value, columns, xp), tile.scores.final
        tangent = tangent + weighted_sum(problem, backend, t, s, value)
        if tangents.value is not None:
            value_tangent = part_of(problem, tangents.value, columns, xp)
            tangent = tangent + weighted_sum(problem, backend, weights, s, value_tangent)
    return tangent - mean * output, mean[..., 0]


def _of_scores(
    problem: Problem, x: Operands, tangents: Tangents, backend: Backend, block: RowBlock,
    tile: Scored,
) -> Array:  # fmt: skip
    """Return the tangent of a tile of scores, 0 where a key is absent."""
    xp, rows, query, key = backend.xp, block.rows, block.query, tile.key
    query_tangent, key_tangent = xp.zeros_like(query), xp.zeros_like(key)
    if tangents.query is not None:
        query_tangent = scaled(problem, tangents.query[..., rows.start : rows.stop, :], xp)
    if tangents.key is not None:
        key_tangent = part_of(problem, tangents.key, tile.columns, xp)
    if x.similarity is None:
        t = backend.matmul(query_tangent, xp.matrix_transpose(key))
        t = t + backend.matmul(query, xp.matrix_transpose(key_tangent))
        t = unfold_heads(problem, t, xp)
    else:
        key, key_tangent = (with_rank(one, len(query.shape)) for one in (key, key_tangent))
        t = x.similarity.pushforward(query, key, (query_tangent, key_tangent), backend)
        t = problem.scale * unfold_heads(problem, t, xp)
    zeros = xp.zeros_like(tile.weights)
    if problem.score_norm is not None:
        t = problem.score_norm.pullback(tile.scores.product, tile.scores.visible, t, xp)
    if problem.masks:
        t = xp.where(tile.seen, t, zeros)
    if problem.softcap is not None:
        bent = xp.tanh(tile.scores.normed / problem.softcap)
        t = t * (1 - bent * bent)
    # Each score depends on itself only, so that the pullback is the pushforward too.
    t, _ = tile.at.score_pullback(tile.scores.capped, t, backend.pullback)
    if tangents.bias is not None:
        t = t + cast(xp, tile.at.of_bias(tangents.bias), t.dtype)
    return xp.where(tile.seen, t, zeros) if problem.masks else t
