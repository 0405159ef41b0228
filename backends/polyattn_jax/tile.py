"""One tile of scores: the steps of the formula, and its contribution to the state of its rows.

Maxima are constants to a gradient: the result does not depend on what is subtracted.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

from polyattn.plugin import (
    Array,
    Indices,
    Mask,
    Operands,
    Problem,
    SoftmaxState,
    Span,
    fold_heads,
    or_zero,
    unfold_heads,
)
from polyattn_jax.mesh import all_finite

__all__ = ["TileIndices", "add_tile", "scaled_query"]

# Except on a CPU, XLA would otherwise compute float32 products at the precision of TF32.
HIGHEST = lax.Precision.HIGHEST


class TileIndices(Indices):
    """The (b, h, i, j) of a tile whose first row and key are traced."""

    def __init__(
        self, problem: Problem, x: Operands, row: Any, rows: int, column: Any, columns: int
    ) -> None:
        super().__init__(problem, jnp, x, Span(0, rows), Span(0, columns))
        self.problem, self.operands = problem, x
        self.first, self.lengths = (row, column), (rows, columns)

    def with_cut_operands(self) -> TileIndices:
        """Return indices whose operands hold only the tile's part of mask and bias."""
        x = self.operands
        if x.bias is not None:
            x = x._replace(bias=self.cut(x.bias))
        if isinstance(x.mask, Mask):

            def cut(name: str, thing: Any) -> Any:
                return self.cut(thing) if name == "array" else thing

            x = x._replace(mask=x.mask.map(cut))
        (row, column), (rows, columns) = self.first, self.lengths
        return TileIndices(self.problem, x, row, rows, column, columns)

    @property
    def row(self) -> Array:
        """The query row, shape (l, 1)."""
        return super().row + self.first[0]

    @property
    def column(self) -> Array:
        """The key, shape (1, s)."""
        return super().column + self.first[1]

    def cut(self, array: Array) -> Array:
        """Return the tile's part of a mask or bias, which may be cut already."""
        for axis, first, length in zip((-2, -1), self.first, self.lengths, strict=True):
            if array.ndim >= -axis and array.shape[axis] not in (1, length):
                array = lax.dynamic_slice_in_dim(array, first, length, axis=axis)
        return array

    def keep_mask(self) -> Array:
        """Return which weights dropout keeps, shape (..., H, l, s)."""
        first, columns = self.first[1], self.lengths[1]
        half = -(-(columns // self.decided + 2) // 2)
        blocks = first // self.decided + jnp.arange(2 * half).reshape(2, half)

        # One number holds the bits of a block, so that the words of a hash are computed together.
        # A loop computes them once: XLA would fuse the hash with each of its uses.
        def packed(blocks: Array) -> Array:
            bits = enumerate(self.keep_mask_by_word(blocks))
            return sum((kept.astype("uint8") << place for place, kept in bits), jnp.uint8(0))

        numbers = jnp.concatenate(list(lax.map(packed, blocks)), axis=-1)
        bits = numbers[..., None] >> jnp.arange(self.decided, dtype="uint8") & 1
        kept = bits.reshape(*bits.shape[:-2], -1) != 0
        return lax.dynamic_slice_in_dim(kept, first % self.decided, columns, axis=-1)


def scaled_query(problem: Problem, query: Array) -> Array:
    """Return scale · query in at least float32, the heads of a group folded into its rows."""
    query = query.astype(problem.accumulator)
    # Another similarity is scaled afterwards: it need not be linear in the query.
    return fold_heads(problem, query if problem.similarity_spec else query * problem.scale, jnp)


def add_tile(
    state: SoftmaxState,
    indices: TileIndices,
    query: Array,
    key: Array,
    value: Array,
    new: Array | None,
) -> SoftmaxState:
    """Add a tile's keys to the state of its rows: those from key `new` on, or all if it is None."""
    problem = indices.problem

    def scores() -> Array:
        s = tile_scores(indices, query, key)
        return s if new is None else jnp.where(indices.column >= new, s, -math.inf)

    s = scores()
    highest = lax.stop_gradient(jnp.max(s, axis=-1, keepdims=True))
    maximum = jnp.maximum(state.maximum, highest)
    shift = or_zero(jnp, maximum)
    weights = jnp.exp(s - shift)
    shrink = jnp.exp(state.maximum - shift)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    if problem.dropout:
        weights = jnp.where(indices.keep_mask(), weights / (1 - problem.dropout), 0)
    masked = problem.masks or new is not None
    value = value.astype(s.dtype)
    output = weighted_sum(problem, weights, scores, key, value, masked)
    return SoftmaxState(state.output * shrink + output, maximum, state.total * shrink + total)


def tile_scores(indices: TileIndices, query: Array, key: Array) -> Array:
    """Return the scores of a tile, −inf where a key is masked."""
    problem, x = indices.problem, indices.operands
    key = key.astype(query.dtype)
    if x.similarity is None:
        s = unfold_heads(problem, product(query, key.mT), jnp)
    else:
        similarity = x.similarity.between(query, key, product, jnp)
        s = problem.scale * unfold_heads(problem, similarity, jnp)
    if problem.softcap is not None:
        s = problem.softcap * jnp.tanh(s / problem.softcap)
    s = indices.modified(s)
    if x.bias is not None:
        bias = indices.cut(x.bias).astype(s.dtype)
        s = jnp.where(bias == -math.inf, -math.inf, s + bias)
    for visible in indices.visible():
        s = jnp.where(visible, s, -math.inf)
    return s


def product(a: Array, b: Array) -> Array:
    """Return the matrix product at full precision."""
    return jnp.matmul(a, b, precision=HIGHEST)


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
    if not masked:
        return unfold_heads(problem, product(weights, value), jnp)
    # Values that are not finite reach only the rows that see them; most often there are none.
    # Without the barrier XLA fuses the choice and the product into one slow loop on a CPU.
    clean = jnp.where(jnp.isfinite(value), value, 0)
    finite = lax.optimization_barrier(clean)  # type: ignore[no-untyped-call]
    result = product(weights, finite)

    def not_finite() -> Array:
        # The scores are computed again: keeping them would take memory, and this is rare.
        visible = fold_heads(problem, scores() != -math.inf, jnp).astype(value.dtype)
        # NaN counts as both infinities, whose sum it is.
        spoilt = jnp.zeros_like(result)
        for infinity in (math.inf, -math.inf):
            spoils = ((value == infinity) | jnp.isnan(value)).astype(value.dtype)
            spoilt += jnp.where(jnp.matmul(visible, spoils) > 0, infinity, 0)
        return spoilt

    is_finite = all_finite(*lax.stop_gradient((value, key)))
    spoilt = lax.cond(is_finite, lambda: jnp.zeros_like(result), not_finite)
    return unfold_heads(problem, result + lax.stop_gradient(spoilt), jnp)
