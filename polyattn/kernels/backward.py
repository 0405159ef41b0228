"""The gradients of attention, a tile of scores at a time.

The weights are computed again from the scores and the logsumexp, so that memory is for one tile
beside the gradients. The logsumexp may be that of more keys than are given: then these are the
shares of the given keys, and the shares of all parts add up.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from polyattn.arrays import Array, cast, with_rank
from polyattn.call.gradients import Gradients
from polyattn.call.operands import Cotangents, Operands, Residuals
from polyattn.call.problem import Problem
from polyattn.expressions.masks import Mask
from polyattn.kernels.masked_sum import hide, visible_product
from polyattn.kernels.sums import Sums
from polyattn.plugin import Backend
from polyattn.span import Span
from polyattn.tiles.band import column_span
from polyattn.tiles.coverage import TileQuery, combined_mask
from polyattn.tiles.grouped_heads import fold_heads, scaled, unfold_heads
from polyattn.tiles.indices import Indices

__all__ = ["RowBlock", "Scored", "gradients", "score_tile", "visible_tiles"]


def gradients(
    problem: Problem, x: Operands, residuals: Residuals, cotangents: Cotangents, backend: Backend,
    row_block: int, column_block: int,
) -> Gradients:  # fmt: skip
    """Return the gradients of a call, in the accumulator's dtype.

    Parameters
    ----------
    problem, x, residuals, cotangents, backend
        As a kernel is given them.
    row_block, column_block : int
        The rows and keys of a tile.

    Returns
    -------
    Gradients
        In the shapes of the operands.
    """
    total = Sums(problem, x, backend.xp, (row_block, column_block))
    for rows in Span(0, problem.query_length).split(row_block):
        block = RowBlock.of(problem, x, residuals, cotangents, backend, rows)
        if block.logsumexp is not None:
            total.add_sinks(block.logsumexp, block.delta)
        for columns, masked in visible_tiles(problem, x, backend, rows, column_block):
            _add_tile(problem, x, backend, block, columns, masked, total)
        total.end_rows(rows)
    return total.total()


def visible_tiles(
    problem: Problem, x: Operands, backend: Backend, rows: Span, column_block: int
) -> Iterator[tuple[Span, bool]]:
    """Yield the keys of each tile that may hold a visible score, and whether it hides some."""
    if 0 in problem.scores:
        return
    mask: Mask | None = combined_mask(problem, x)
    reads = not problem.transforms and not problem.traced and backend.is_eager(x.query)
    seen = column_span(problem, rows)
    for columns in Span(0, problem.key_length).split(column_block):
        if columns.stop <= seen.start or columns.start >= seen.stop:
            continue
        if mask is None:
            yield columns, False
            continue
        answer = TileQuery(problem, x, backend.xp, rows, columns, reads=reads).of(mask)
        if answer.any_visible:
            yield columns, not answer.all_visible


class RowBlock(NamedTuple):
    """What the tiles of some rows share, in the accumulator's dtype.

    Attributes
    ----------
    rows : Span
        The query rows.
    query : Array
        scale · query, or the query for another similarity, shape (..., G, H/G · l, D).
    output_gradient : Array or None
        The gradient of the output, shape (..., G, H/G · l, E); None in forward mode.
    logsumexp : Array or None
        0 where it is −inf, shape (..., H, l, 1); None with another normalizer.
    delta : Array or None
        Σ output · output gradient − logsumexp gradient, shape (..., H, l, 1).
    """

    rows: Span
    query: Array
    output_gradient: Array | None
    logsumexp: Array | None
    delta: Array | None

    @classmethod
    def of(
        cls, problem: Problem, x: Operands, residuals: Residuals, cotangents: Cotangents | None,
        backend: Backend, rows: Span,
    ) -> RowBlock:  # fmt: skip
        """Return those of a call."""
        xp = backend.xp
        dtype = getattr(xp, problem.accumulator)

        def part(array: Array) -> Array:
            return cast(xp, array[..., rows.start : rows.stop, :], dtype)

        query = scaled(problem, x.query[..., rows.start : rows.stop, :], xp)
        empty = logsumexp = None
        if problem.normalizer is None:
            logsumexp = part(residuals.logsumexp[..., None])
            empty = logsumexp == -math.inf
            logsumexp = xp.where(empty, xp.zeros_like(logsumexp), logsumexp)
        if cotangents is None:
            return cls(rows, query, None, logsumexp, None)
        gradient = part(cotangents.output)
        delta = xp.sum(part(residuals.output) * gradient, axis=-1, keepdims=True)
        if cotangents.logsumexp is not None:
            delta = delta - part(cotangents.logsumexp[..., None])
        if empty is not None:
            delta = xp.where(empty, xp.zeros_like(delta), delta)
        return cls(rows, query, fold_heads(problem, gradient, xp), logsumexp, delta)


class Scored(NamedTuple):
    """The steps of the formula in a tile, all of shape (..., H, l, s).

    Attributes
    ----------
    similar : Array or None
        The similarity of query and key, before the scale; None for the product q·k.
    product : Array
        scale · q·k, or scale · similar.
    normed, capped : Array
        The scores before and after the softcap.
    seen : Array of bool
        Whether the key is visible.
    weights : Array
        The weights before dropout, 0 where a key is absent.
    hidden : list of Array of bool
        The masks of the tile.
    """

    similar: Array | None
    product: Array
    normed: Array
    capped: Array
    seen: Array
    weights: Array
    hidden: list[Array]


def score_tile(
    problem: Problem,
    x: Operands,
    backend: Backend,
    block: RowBlock,
    key: Array,
    at: Indices,
    masked: bool,
) -> Scored:
    """Return the scores of a tile and its weights, by the logsumexp that is known."""
    xp, similar = backend.xp, None
    if x.similarity is None:
        product = backend.matmul(block.query, xp.matrix_transpose(key))
        product = unfold_heads(problem, product, xp)
    else:
        key = with_rank(key, len(block.query.shape))
        similar = x.similarity.between(block.query, key, backend)
        similar = unfold_heads(problem, similar, xp)
        product = problem.scale * similar
    hidden = list(at.visible()) if masked else []
    normed = product
    if problem.score_norm is not None:
        normed = problem.score_norm.apply(product, hidden, xp)
    capped = normed
    if problem.softcap is not None:
        capped = problem.softcap * xp.tanh(normed / problem.softcap)
    s = at.modified(capped)
    if x.bias is not None:
        bias = cast(xp, at.of_scores(x.bias), s.dtype)
        s = hide(xp, s + bias, bias != -math.inf)
    for one in hidden:
        s = hide(xp, s, one)
    seen = s != -math.inf
    if problem.normalizer is not None:
        weights = problem.normalizer.weights(s, backend)
    else:
        weights = xp.exp(s - block.logsumexp)
    nothing = xp.zeros_like(weights)
    if problem.masks:
        weights = xp.where(seen, weights, nothing)
        # A derivative is taken at every score: where none is seen, at 0.
        normed, capped = (xp.where(seen, one, nothing) for one in (normed, capped))
        # The norm of a row counts the keys that the bias hides.
        for one in hidden if problem.score_norm else [seen]:
            product = xp.where(one, product, nothing)
        if similar is not None:
            similar = xp.where(seen, similar, nothing)
    return Scored(similar, product, normed, capped, seen, weights, hidden)


def _add_tile(
    problem: Problem,
    x: Operands,
    backend: Backend,
    block: RowBlock,
    columns: Span,
    masked: bool,
    total: Sums,
) -> None:
    """Add what a tile gives to the gradients."""
    xp = backend.xp
    dtype = block.query.dtype
    key, value = (
        cast(xp, array[..., columns.start : columns.stop, :], dtype) for array in (x.key, x.value)
    )
    at = Indices(problem, xp, x, block.rows, columns)
    tile = score_tile(problem, x, backend, block, key, at, masked)

    # The values, and the weights.
    weights, seen, nothing = tile.weights, tile.seen, xp.zeros_like(tile.weights)
    d_weights = backend.matmul(block.output_gradient, xp.matrix_transpose(value))
    d_weights = unfold_heads(problem, d_weights, xp)
    if problem.dropout:
        keep = at.keep_mask()
        weights, d_weights = (
            xp.where(keep, one / (1 - problem.dropout), nothing) for one in (weights, d_weights)
        )
    over_keys = _transposed(problem, seen, xp)
    if total.wants("value"):
        by_key = _transposed(problem, weights, xp)
        found = visible_product(problem, backend, by_key, over_keys, block.output_gradient)
        total.add_value(found, columns)

    # The scores, backwards through the steps 5 to 2.
    if problem.normalizer is None:
        ds = tile.weights * (d_weights - block.delta)
    else:
        ds = problem.normalizer.pullback(tile.weights, d_weights, xp)
    if problem.masks:
        ds = xp.where(seen, ds, nothing)
    total.add_bias(ds, block.rows, columns)
    ds, of_score = at.score_pullback(tile.capped, ds, backend.pullback)
    total.add_score(of_score)
    if problem.softcap is not None:
        bent = xp.tanh(tile.normed / problem.softcap)
        slope = 1 - bent * bent
        total.add_softcap(xp.sum(ds * (bent - tile.normed / problem.softcap * slope)))
        ds = ds * slope
    if problem.score_norm is not None:
        ds = problem.score_norm.pullback(tile.product, tile.hidden, ds, xp)

    # Query and key, step 1.
    folded = fold_heads(problem, ds, xp)
    if x.similarity is None:
        if total.wants("query"):
            seen = fold_heads(problem, seen, xp)
            d_query = visible_product(problem, backend, folded, seen, key)
            total.add_query(unfold_heads(problem, d_query, xp), block.rows)
        if total.wants("key"):
            by_key = _transposed(problem, ds, xp)
            d_key = visible_product(problem, backend, by_key, over_keys, block.query)
            total.add_key(d_key, columns)
    else:
        total.add_scale(xp.sum(ds * tile.similar))
        key = with_rank(key, len(block.query.shape))
        query, key = (_finite(problem, xp, one) for one in (block.query, key))
        d_query, d_key, of_similarity = x.similarity.pullback(
            query, key, problem.scale * folded, backend
        )
        total.add_similarity(of_similarity)
        total.add_query(unfold_heads(problem, d_query, xp), block.rows)
        total.add_key(d_key, columns)


def _finite(problem: Problem, xp: Any, array: Array) -> Array:
    """Return 0 for what is not finite: where it is seen, the scores' gradients are NaN already."""
    return xp.where(xp.isfinite(array), array, xp.zeros_like(array)) if problem.masks else array


def _transposed(problem: Problem, array: Array, xp: Any) -> Array:
    """Turn (..., H, l, s) into (..., G, s, H/G · l)."""
    return xp.matrix_transpose(fold_heads(problem, array, xp))
