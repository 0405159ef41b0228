"""Attention by tiles: the running softmax of a block of rows."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

from polyattn._core.tiles.axes import fold_heads, unfold_heads
from polyattn._core.tiles.online_softmax import SoftmaxState, initial_state, normalize, or_zero
from polyattn.plugin import Array, Operands, Problem, Span
from polyattn_jax.mesh import all_finite
from polyattn_jax.tile import finite, materialized, product, scaled_query, tile_scores
from polyattn_jax.tile_loops import LoopBody, Rows, TileArrays, over_tiles


def attend(problem: Problem, tile: int, x: Operands) -> tuple[Array, Array]:
    """Return output, in the problem's dtype, and logsumexp, in tiles of about `tile` scores."""
    body = Forward(problem, x)
    output, logsumexp = over_tiles(problem, tile, x, body, {"query": x.query}, {})
    return output, logsumexp[..., 0]


class Forward(LoopBody):
    """The output and logsumexp of a block of rows."""

    def __init__(self, problem: Problem, x: Operands) -> None:
        self.problem = problem._replace(features=problem.features | {"logsumexp"})
        self.x = x

    def start(self, rows: Rows, count: int) -> tuple[Array, SoftmaxState]:
        """Return the query, and the state that holds the sinks only."""
        state = initial_state(self.problem, self.x, jnp, Span(0, count))
        return scaled_query(self.problem, rows["query"]), state

    def add(self, state: SoftmaxState, block: Array, tile: TileArrays) -> SoftmaxState:
        """Add the keys of a tile."""
        problem, indices, new = self.problem, tile.indices, tile.new

        def scores() -> Array:
            s = tile_scores(indices, block, tile.key)
            return s if new is None else jnp.where(indices.column >= new, s, -math.inf)

        s = scores()
        maximum = jnp.maximum(state.maximum, jnp.max(s, axis=-1, keepdims=True))
        shift = or_zero(jnp, maximum)
        weights = jnp.exp(s - shift)
        shrink = jnp.exp(state.maximum - shift)
        total = jnp.sum(weights, axis=-1, keepdims=True)
        if problem.dropout:
            weights = jnp.where(indices.keep_mask(), weights / (1 - problem.dropout), 0)
        masked = problem.masks or new is not None
        output = weighted_sum(
            problem, weights, scores, tile.key, tile.value.astype(s.dtype), masked
        )
        return SoftmaxState(state.output * shrink + output, maximum, state.total * shrink + total)

    def finish(self, state: SoftmaxState, block: Array) -> tuple[Array, Array]:
        """Return output and logsumexp."""
        results: Any = normalize(self.problem, state, jnp.dtype(self.problem.dtype), jnp)
        return results[0], results[1][..., None]


def weighted_sum(
    problem: Problem,
    weights: Array,
    scores: Callable[[], Array],
    key: Array,
    value: Array,
    masked: bool,
) -> Array:
    """Return weights · value, without the values of masked keys."""
    weights = fold_heads(problem, weights, jnp)

    def seen() -> Array:
        # The scores are computed again: keeping them would take memory, and this is rare.
        return fold_heads(problem, scores() != -math.inf, jnp)

    if masked:
        result = visible_product(product, weights, seen, key, value)
    else:
        result = product(weights, value)
    return unfold_heads(problem, result, jnp)


def visible_product(
    multiply: Callable[[Array, Array], Array],
    weights: Array,
    seen: Callable[[], Array],
    key: Array,
    value: Array,
) -> Array:
    """Return weights · value, to which a value adds nothing where its key is not seen."""
    result = multiply(weights, value)

    def of_visible() -> Array:
        visible = seen().astype(value.dtype)

        def of_infinity(infinity: Array) -> Array:
            # NaN counts as both infinities, whose sum it is.
            spoils = ((value == infinity) | jnp.isnan(value)).astype(value.dtype)
            spoilt = jnp.matmul(visible, materialized(spoils)) > 0
            return jnp.where(spoilt, infinity, jnp.zeros_like(infinity))

        # One after the other: XLA reserves the memory of a branch that it does not take.
        infinities = lax.map(of_infinity, jnp.asarray([math.inf, -math.inf], value.dtype))
        # The derivative by the weights of a row is NaN where a value is not finite that it sees.
        one = 1 + 0 * jnp.sum(weights, axis=-1, keepdims=True)
        visible_weights = jnp.where(visible > 0, weights, 0)
        return product(visible_weights, finite(value)) + jnp.sum(infinities, axis=0) * one

    # A value that is not finite spoils its column in every row, even with weight 0; most often
    # there is none.
    is_finite = all_finite(*map(lax.stop_gradient, (result, key, value)))
    return lax.cond(is_finite, lambda: result, of_visible)
