"""One tile of scores: the formula's steps, and what they add to the sums of its rows.

Maxima are constants to a gradient: the result does not depend on what is subtracted, and what does
not matter need not be differentiated.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from polyattn.plugin import Array, Indices, Mask, Operands, Problem, Span

__all__ = ["At", "Running", "add_tile", "finish", "scaled", "start"]

# Elsewhere than on a CPU, XLA would else take float32 products at the precision of TF32.
HIGHEST = lax.Precision.HIGHEST


class Running(NamedTuple):
    """Σ w·v, the reference r and Σ w of each row, where w = exp(s − r)."""

    output: Array  # (..., H, l, E)
    reference: Array  # (..., H, l, 1)
    total: Array  # (..., H, l, 1)


class At(Indices):
    """The (b, h, i, j) of a tile whose place is known only when it is computed."""

    def __init__(
        self, problem: Problem, x: Operands, row: Any, rows: int, column: Any, columns: int
    ) -> None:
        super().__init__(problem, jnp, x, Span(0, rows), Span(0, columns))
        self.operands = x
        self._first, self._lengths = (row, column), (rows, columns)

    def alone(self) -> At:
        """Return the same with no more of a mask or bias than falls on the tile."""
        x = self.operands
        if x.bias is not None:
            x = x._replace(bias=self.cut(x.bias))
        if isinstance(x.mask, Mask):

            def own(name: str, thing: Any) -> Any:
                return self.cut(thing) if name == "array" else thing

            x = x._replace(mask=x.mask.map(own))
        (row, column), (rows, columns) = self._first, self._lengths
        return At(self._problem, x, row, rows, column, columns)

    @property
    def row(self) -> Array:
        """The query row, shape (l, 1)."""
        return super().row + self._first[0]

    @property
    def column(self) -> Array:
        """The key, shape (1, s)."""
        return super().column + self._first[1]

    def cut(self, array: Array) -> Array:
        """Cut out of a mask or bias what falls on the tile, where that is not done yet."""
        for axis, first, length in zip((-2, -1), self._first, self._lengths, strict=True):
            if array.ndim >= -axis and array.shape[axis] not in (1, length):
                array = lax.dynamic_slice_in_dim(array, first, length, axis=axis)
        return array

    def keep_mask(self) -> Array:
        """Return which weights dropout keeps, shape (..., H, l, s)."""
        first, columns = self._first[1], self._lengths[1]
        each = -(-(columns // self.decided + 2) // 2)
        blocks = first // self.decided + jnp.arange(2 * each).reshape(2, each)

        # Bits of one number, so that the words of a hash are computed together. What is outside of
        # a loop XLA would fuse with all that asks for it, and compute anew for each.
        def packed(blocks: Array) -> Array:
            places = enumerate(self.keep_mask_by_word(blocks))
            return sum((kept.astype("uint8") << place for place, kept in places), jnp.uint8(0))

        numbers = jnp.concatenate(list(lax.map(packed, blocks)), axis=-1)
        bits = numbers[..., None] >> jnp.arange(self.decided, dtype="uint8") & 1
        kept = bits.reshape(*bits.shape[:-2], -1) != 0
        return lax.dynamic_slice_in_dim(kept, first % self.decided, columns, axis=-1)


def scaled(problem: Problem, query: Array) -> Array:
    """Return scale · query, at least in float32, the heads of a group folded into its rows."""
    query = query.astype(problem.accumulator)
    # Another similarity is scaled when it is known: it need not be linear in the query.
    return fold(problem, query if problem.similarity_spec else query * problem.scale)


def fold(problem: Problem, array: Array) -> Array:
    """Turn (..., H, l, n) into (..., G, H/G · l, n)."""
    *batch, heads, rows, size = array.shape
    groups, members = problem.key_heads, heads // problem.key_heads
    # In two steps, each of which JAX can do to an array that is sharded by heads.
    array = array.reshape(*batch, groups, members, rows, size)
    return array.reshape(*batch, groups, members * rows, size)


def unfold(problem: Problem, array: Array) -> Array:
    """Turn (..., G, H/G · l, n) into (..., H, l, n)."""
    *batch, groups, rows, size = array.shape
    members = problem.heads // groups
    array = array.reshape(*batch, groups, members, rows // members, size)
    return array.reshape(*batch, problem.heads, rows // members, size)


def start(problem: Problem, x: Operands, rows: int) -> Running:
    """Return the state before any key: empty, or the sink, a weight that has no value."""
    dtype = problem.accumulator
    shape = (*problem.batch, problem.heads, rows)
    reference = jnp.full((*shape, 1), -math.inf, dtype)
    total = jnp.zeros((*shape, 1), dtype)
    if x.sinks is not None:
        sinks = x.sinks.astype(dtype)[:, None, None]
        highest = lax.stop_gradient(sinks)
        reference = jnp.broadcast_to(highest, reference.shape)
        total = jnp.broadcast_to(jnp.exp(sinks - or_zero(highest)), total.shape)
    return Running(jnp.zeros((*shape, problem.value_size), dtype), reference, total)


def or_zero(reference: Array) -> Array:
    """Return the reference, and 0 where it is −inf, so that a row without keys makes no NaN."""
    return jnp.where(reference == -math.inf, 0, reference)


def add_tile(
    problem: Problem,
    running: Running,
    tile: tuple[Array, Array, Array],
    at: At,
    new: Array | None,
) -> Running:
    """Add what the keys of a tile give its rows.

    Parameters
    ----------
    problem : Problem
        The facts of the call.
    running : Running
        The sums so far.
    tile : tuple of Array
        What `scaled` made of the tile's rows of the query, and its keys and values.
    at : At
        Where the tile is, of which operands.
    new : Array or None
        The first key that has not been added before, if some have.
    """
    query, key, value = tile

    def present() -> Array:
        s = scores(problem, at, query, key)
        return s if new is None else jnp.where(at.column >= new, s, -math.inf)

    s = present()
    highest = lax.stop_gradient(jnp.max(s, axis=-1, keepdims=True))
    reference = jnp.maximum(running.reference, highest)
    shift = or_zero(reference)
    weights = jnp.exp(s - shift)
    shrink = jnp.exp(running.reference - shift)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    if problem.dropout:
        weights = jnp.where(at.keep_mask(), weights / (1 - problem.dropout), 0)
    absent = problem.masks or new is not None
    value = value.astype(s.dtype)
    return Running(
        running.output * shrink + weighted_sum(problem, weights, present, value, absent),
        reference,
        running.total * shrink + total,
    )


def scores(problem: Problem, at: At, query: Array, key: Array) -> Array:
    """Return the scores of a tile, −inf where a key is absent."""
    x = at.operands
    key = key.astype(query.dtype)
    if x.similarity is None:
        s = unfold(problem, product(query, key.mT))
    else:
        s = problem.scale * unfold(problem, x.similarity.between(query, key, product, jnp))
    if problem.softcap is not None:
        s = problem.softcap * jnp.tanh(s / problem.softcap)
    s = at.modified(s)
    if x.bias is not None:
        bias = at.cut(x.bias).astype(s.dtype)
        s = jnp.where(bias == -math.inf, -math.inf, s + bias)
    for seen in at.visible():
        s = jnp.where(seen, s, -math.inf)
    return s


def product(a: Array, b: Array) -> Array:
    """Return the matrix product, in the whole of its precision."""
    return jnp.matmul(a, b, precision=HIGHEST)


def weighted_sum(
    problem: Problem, weights: Array, scores: Callable[[], Array], value: Array, absent: bool
) -> Array:
    """Return weights · value, in which an absent key's value takes no part."""
    weights = fold(problem, weights)
    if not absent:
        return unfold(problem, product(weights, value))
    # Values that are not finite spoil those rows alone that see them; most often there are none.
    # On a CPU, XLA would make one slow loop of their choice and the product, but for the barrier.
    clean = jnp.where(jnp.isfinite(value), value, 0)
    finite = lax.optimization_barrier(clean)  # type: ignore[no-untyped-call]
    result = product(weights, finite)

    def spoilt() -> Array:
        # Scores once more: to keep them for this would be dear, and this is rare.
        seen = fold(problem, scores() != -math.inf).astype(value.dtype)
        # NaN counts as both infinities, whose sum it is.
        nothing = jnp.zeros_like(result)
        for infinity in (math.inf, -math.inf):
            spoils = ((value == infinity) | jnp.isnan(value)).astype(value.dtype)
            nothing += jnp.where(jnp.matmul(seen, spoils) > 0, infinity, 0)
        return nothing

    spoils = lax.cond(all_finite(lax.stop_gradient(value)), lambda: jnp.zeros_like(result), spoilt)
    return unfold(problem, result + lax.stop_gradient(spoils))


@jax.custom_batching.custom_vmap
def all_finite(value: Array) -> Array:
    """Return whether no value is NaN or infinite; under vmap, of all that are mapped over.

    A condition that differed from one to the next would become a choice between two results.
    """
    return jnp.all(jnp.isfinite(value))


@all_finite.def_vmap
def _all_finite_of_all(size: int, batched: list[bool], value: Array) -> tuple[Array, bool]:
    return all_finite(value), False


def finish(problem: Problem, running: Running, dtype: Any) -> tuple[Array, Array | None]:
    """Divide, and return the output in `dtype` and the logsumexp if the problem asks for it."""
    empty = running.total == 0
    total = jnp.where(empty, 1, running.total)
    output = (running.output / total).astype(dtype)
    if "logsumexp" not in problem.features:
        return output, None
    logsumexp = jnp.where(empty, -math.inf, or_zero(running.reference) + jnp.log(total))
    return output, logsumexp[..., 0]
