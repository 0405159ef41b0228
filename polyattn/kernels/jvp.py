"""The directional derivative of attention, a tile of scores at a time: forward mode.

With weights p, the tangent of the output is Σ p·(t − m)·v + p·(tangent of v), where t is the
tangent of a score and m = Σ p·t that of the logsumexp.
"""

from __future__ import annotations

import math

from polyattn.arrays import Array, cast, with_rank
from polyattn.call.operands import Operands, Residuals, Tangents
from polyattn.call.problem import Problem
from polyattn.kernels.backward import RowBlock, Scored, score_tile, visible_tiles
from polyattn.kernels.masked_sum import weighted_sum
from polyattn.plugin import Backend
from polyattn.span import Span
from polyattn.tiles.grouped_heads import scaled, unfold_heads
from polyattn.tiles.indices import Indices

__all__ = ["pushforward"]


def pushforward(
    problem: Problem, x: Operands, residuals: Residuals, tangents: Tangents, backend: Backend,
    row_block: int, column_block: int,
) -> tuple[Array, Array]:  # fmt: skip
    """Return the tangents of output and logsumexp, in the accumulator's dtype.

    Parameters
    ----------
    problem, x, residuals, tangents, backend
        As a kernel is given them.
    row_block, column_block : int
        The rows and keys of a tile.
    """
    xp, output = backend.xp, residuals.output
    found = [
        _of_rows(problem, x, residuals, tangents, backend, rows, column_block)
        for rows in Span(0, problem.query_length).split(row_block)
    ]
    if not found:
        zeros = xp.zeros_like(output, dtype=getattr(xp, problem.accumulator))
        return zeros, xp.sum(zeros, axis=-1)
    outputs, logsumexps = zip(*found, strict=True)
    return xp.concat(outputs, axis=-2), xp.concat(logsumexps, axis=-1)


def _of_rows(
    problem: Problem, x: Operands, residuals: Residuals, tangents: Tangents, backend: Backend,
    rows: Span, column_block: int,
) -> tuple[Array, Array]:  # fmt: skip
    xp, dtype = backend.xp, getattr(backend.xp, problem.accumulator)
    output = cast(xp, residuals.output[..., rows.start : rows.stop, :], dtype)
    block = RowBlock.of(problem, x, residuals, None, backend, rows)
    tangent = xp.zeros_like(output)
    mean = xp.sum(tangent, axis=-1, keepdims=True)  # 0, also where there are no values
    if tangents.sinks is not None:
        sinks, t = (
            with_rank(xp.reshape(cast(xp, array, output.dtype), (-1, 1, 1)), len(output.shape))
            for array in (x.sinks, tangents.sinks)
        )
        mean = mean + xp.exp(sinks - block.logsumexp) * t
    for columns, masked in visible_tiles(problem, x, backend, rows, column_block):
        key, value = (
            cast(xp, array[..., columns.start : columns.stop, :], output.dtype)
            for array in (x.key, x.value)
        )
        at = Indices(problem, xp, x, rows, columns)
        tile = score_tile(problem, x, backend, block, key, at, masked)
        t = _of_scores(problem, x, tangents, backend, block, columns, key, at, tile)
        weights = tile.weights
        if problem.normalizer is None:
            t = weights * t
            mean = mean + xp.sum(t, axis=-1, keepdims=True)
        else:
            t = problem.normalizer.pullback(weights, t, xp)  # its Jacobian is symmetric
        if problem.masks:
            t = xp.where(tile.seen, t, xp.zeros_like(t))
        if problem.dropout:
            keep = at.keep_mask()
            t, weights = (
                xp.where(keep, one / (1 - problem.dropout), xp.zeros_like(one))
                for one in (t, weights)
            )
        marked = xp.where(tile.seen, xp.zeros_like(t), -math.inf)
        tangent = tangent + weighted_sum(problem, backend, t, marked, value)
        if tangents.value is not None:
            moved = cast(xp, tangents.value[..., columns.start : columns.stop, :], output.dtype)
            tangent = tangent + weighted_sum(problem, backend, weights, marked, moved)
    return tangent - mean * output, mean[..., 0]


def _of_scores(
    problem: Problem,
    x: Operands,
    tangents: Tangents,
    backend: Backend,
    block: RowBlock,
    columns: Span,
    key: Array,
    at: Indices,
    tile: Scored,
) -> Array:
    """Return the tangent of a tile of scores, 0 where a key is absent."""
    xp = backend.xp
    moved_query, moved_key = (
        None if array is None else array[..., span.start : span.stop, :]
        for array, span in ((tangents.query, block.rows), (tangents.key, columns))
    )
    moved_query = (
        xp.zeros_like(block.query) if moved_query is None else scaled(problem, moved_query, xp)
    )
    moved_key = xp.zeros_like(key) if moved_key is None else cast(xp, moved_key, key.dtype)
    if x.similarity is None:
        t = backend.matmul(moved_query, xp.matrix_transpose(key))
        t = t + backend.matmul(block.query, xp.matrix_transpose(moved_key))
        t = unfold_heads(problem, t, xp)
    else:
        key, moved_key = (with_rank(one, len(block.query.shape)) for one in (key, moved_key))
        t = x.similarity.pushforward(block.query, key, moved_query, moved_key, backend)
        t = problem.scale * unfold_heads(problem, t, xp)
    zeros = xp.zeros_like(tile.weights)
    if problem.score_norm is not None:
        for seen in tile.hidden:
            t = xp.where(seen, t, zeros)
        t = problem.score_norm.pullback(tile.product, tile.hidden, t, xp)
    if problem.masks:
        t = xp.where(tile.seen, t, zeros)
    if problem.softcap is not None:
        bent = xp.tanh(tile.normed / problem.softcap)
        t = t * (1 - bent * bent)
    # Each score depends on itself only, so that the pullback is the pushforward too.
    t, _ = at.score_pullback(tile.capped, t, backend.pullback)
    if tangents.bias is not None:
        t = t + cast(xp, at.of_scores(tangents.bias), t.dtype)
    return xp.where(tile.seen, t, zeros) if problem.masks else t
