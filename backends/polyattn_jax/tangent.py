"""The tangent of attention by tiles: how output and logsumexp change along those of the operands.

With weights p = exp(s − logsumexp) and the tangent t of a score, that of the logsumexp is
m = Σ p·t, and that of the output Σ p·(t·v + tangent of v) − m·output. This is linear in the
tangents, so that JAX transposes it into the gradient. Each tile is computed again then, and memory
is for one of them. What dropout drops is absent from all but m.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from polyattn._core.tiles.axes import fold_heads, unfold_heads
from polyattn._core.tiles.online_softmax import or_zero
from polyattn.plugin import Array, Operands, Problem, Residuals, joined, with_rank
from polyattn_jax.explicit import split_explicit
from polyattn_jax.forward import visible_product
from polyattn_jax.tile import (
    finite,
    modified,
    product,
    scaled_query,
    similarity,
    similarity_tangent,
)
from polyattn_jax.tile_loops import LoopBody, Rows, TileArrays, over_tiles


class OperandTangents(NamedTuple):
    """The tangents of the operands in the accumulator's dtype; None where one is 0."""

    query: Array | None = None  # of scale · query, or of the query with another similarity
    key: Array | None = None
    value: Array | None = None
    bias: Array | None = None
    sinks: Array | None = None
    score_mod: list[Any] | None = None  # of the arrays in the expression
    similarity: list[Any] | None = None  # likewise
    scale: Array | None = None  # of the number, only with another similarity
    softcap: Array | None = None


def attend_tangents(
    problem: Problem, tile: int, x: Operands, residuals: Residuals, tangents: OperandTangents,
    *, is_linear: bool = True,
) -> tuple[Array, Array]:  # fmt: skip
    """Return the tangents of output and logsumexp, in the accumulator's dtype.

    A function that JAX can transpose `is_linear`: the tangent of a hidden value is multiplied by 0,
    also if it is not finite.
    """
    output, logsumexp = residuals
    rows = {"query": x.query, "output": output, "logsumexp": logsumexp[..., None]}
    of_rows = {} if tangents.query is None else {"query tangent": tangents.query}
    if tangents.bias is not None:
        bias = jnp.atleast_2d(tangents.bias)
        tangents = tangents._replace(bias=bias)
        if bias.shape[-2] != 1:
            of_rows["bias tangent"] = bias
    body = _TangentBody(problem, x, tangents, is_linear=is_linear)
    of_output, of_logsumexp = over_tiles(problem, tile, x, body, rows, of_rows)
    return of_output, of_logsumexp[..., 0]


class _BlockRows(NamedTuple):
    """The arrays that the tiles of a block of rows share."""

    query: Array  # scaled, (..., G, H // G · l, D), as are the next and the tangent
    finite_query: Array
    logsumexp: Array  # (..., H, l, 1), 0 for a row that sees no key
    output: Array  # (..., H, l, E)
    query_tangent: Array | None


class _TangentBody(LoopBody):
    """The tangents of output and logsumexp of a block of rows."""

    is_differentiated = True

    def __init__(
        self, problem: Problem, x: Operands, tangents: OperandTangents, *, is_linear: bool
    ) -> None:
        self.problem, self.x, self.tangents, self.is_linear = problem, x, tangents, is_linear

    def start(self, rows: Rows, count: int) -> tuple[_BlockRows, tuple[Array, Array]]:
        """Return the state that holds the sinks only."""
        problem, dtype = self.problem, self.problem.accumulator
        logsumexp = or_zero(jnp, rows["logsumexp"].astype(dtype))
        query_tangent = rows.get("query tangent")
        if query_tangent is not None:
            query_tangent = with_rank(query_tangent, len(problem.batch) + 3)
            query_tangent = fold_heads(problem, query_tangent, jnp)
        output = rows["output"].astype(dtype)
        query = scaled_query(problem, rows["query"])
        # What is not finite makes the weights NaN wherever it is seen.
        finite_query = finite(query) if problem.masks else query
        block = _BlockRows(query, finite_query, logsumexp, output, query_tangent)
        mean = jnp.zeros_like(logsumexp)
        if self.tangents.sinks is not None:
            pair: list[Any] = [self.x.sinks, self.tangents.sinks]
            sinks, tangent = (
                with_rank(array.astype(dtype).reshape(-1, 1, 1), mean.ndim) for array in pair
            )
            mean += jnp.exp(sinks - logsumexp) * tangent
        return block, (jnp.zeros_like(output), mean)

    def slices(self, rows: Rows, first: Array, columns: int) -> dict[str, Array]:
        """Return the tiles of tangents that have an entry for each key, as arrays to loop over."""
        # The gradient of a slice cut within the loop would be as large as the array, for each tile.
        bias = rows.get("bias tangent", self.tangents.bias)
        whole = {"key": (self.tangents.key, -2), "value": (self.tangents.value, -2)}
        whole["bias"] = (bias, -1)

        def cut(array: Array, axis: int) -> Array:
            if array.shape[axis] == 1:
                return jnp.broadcast_to(array, (len(first), *array.shape))
            return jax.vmap(lambda at: lax.dynamic_slice_in_dim(array, at, columns, axis))(first)

        return {
            name: cut(array, axis) for name, (array, axis) in whole.items() if array is not None
        }

    def add(
        self, state: tuple[Array, Array], block: _BlockRows, tile: TileArrays
    ) -> tuple[Array, Array]:
        """Add the keys of a tile."""
        problem, indices = self.problem, tile.indices
        output, mean = state
        s, t, seen = self._scores(block, tile)
        s = s - block.logsumexp
        # Of what is hidden not even a second derivative may be taken.
        weights = jnp.exp(s) if seen is None else jnp.where(seen, jnp.exp(jnp.where(seen, s, 0)), 0)
        keep = indices.keep_mask() if problem.dropout else None

        def of_visible(weights: Array, value: Array) -> Array:
            def visible() -> Array:
                whole: Any = seen
                return fold_heads(problem, jnp.broadcast_to(whole, s.shape), jnp)

            return visible_product(product, weights, visible, tile.key, value)

        def summed(weights: Array, value: Array, multiply: Any = product) -> Array:
            if keep is not None:
                weights = jnp.where(keep, weights / (1 - problem.dropout), 0)
            return unfold_heads(problem, multiply(fold_heads(problem, weights, jnp), value), jnp)

        if t is not None:
            changes = weights * (t if seen is None else jnp.where(seen, t, 0))
            mean += jnp.sum(changes, axis=-1, keepdims=True)
            value = tile.value.astype(s.dtype)
            output += summed(changes, value if seen is None else finite(value))
        if "value" in tile.slices:
            multiply = product if seen is None or self.is_linear else of_visible
            output += summed(weights, tile.slices["value"], multiply)
        return output, mean

    def finish(self, state: tuple[Array, Array], block: _BlockRows) -> tuple[Array, Array]:
        """Return both tangents."""
        output, mean = state
        return output - mean * block.output, mean

    def _scores(
        self, block: _BlockRows, tile: TileArrays
    ) -> tuple[Array, Array | None, Array | None]:
        """Return the scores of a tile, their tangent, and which keys are seen; None for all."""
        x, indices, tangents = self.x, tile.indices, self.tangents
        s = similarity(indices, block.query, tile.key)
        seen = indices.seen(tile.new)
        if x.score_mod is not None and self.problem.masks:  # it may hide keys too
            shown = s if seen is None else jnp.where(seen, s, 0)
            shown = modified(indices, shown) != -jnp.inf
            seen = shown if seen is None else seen & shown
        if seen is not None:
            # Nothing may be differentiated where a hidden key makes a NaN.
            s = jnp.where(seen, s, 0)
        t = self._of_similarity(block, tile)
        if x.score_mod is not None and t is not None and seen is not None:
            t = jnp.where(seen, t, 0)  # the slope of a function at 0 need not be finite

        rule = None if tangents.score_mod is None else indices.operands.score_mod
        skeleton, arrays = split_explicit(rule)

        def rest(s: Array, arrays: list[Any], softcap: Array | None) -> Array:
            if not arrays:
                return modified(indices, s, softcap)
            score_mod = joined(skeleton, arrays)
            return modified(indices.replaced(score_mod=score_mod), s, softcap)

        softcap = None if tangents.softcap is None else jnp.asarray(self.problem.softcap, s.dtype)
        s, t = push(rest, (s, arrays, softcap), (t, tangents.score_mod or [], tangents.softcap))
        if indices.operands.bias is not None:
            s += indices.of_scores(indices.operands.bias).astype(s.dtype)
        if "bias" in tile.slices:
            bias = with_rank(tile.slices["bias"], s.ndim)
            t = bias if t is None else t + bias
        return s, t, seen

    def _of_similarity(self, block: _BlockRows, tile: TileArrays) -> Array | None:
        """Return the tangent of the similarities of a tile."""
        problem, indices, tangents = self.problem, tile.indices, self.tangents
        key = tile.key.astype(block.query.dtype)
        if problem.masks:
            key = finite(key)
        given = tangents.similarity or []
        skeleton, arrays = split_explicit(indices.operands.similarity if given else None)
        scale = None if tangents.scale is None else jnp.asarray(problem.scale, key.dtype)

        def of(query: Array, key: Array, arrays: list[Any], scale: Array | None) -> Array:
            if not arrays:
                return similarity(indices, query, key, scale)
            rule = joined(skeleton, arrays)
            return similarity(indices.replaced(similarity=rule), query, key, scale)

        primals = block.finite_query, key, arrays, scale
        of_query, of_key, of_vectors = block.query_tangent, tile.slices.get("key"), None
        if indices.operands.similarity is not None:
            # By the derivative that it has: of a sum over D, JAX's own keeps each term.
            of_vectors = similarity_tangent(indices, primals[:2], (of_query, of_key))
            of_query = of_key = None
        rest = push(of, primals, (of_query, of_key, given, tangents.scale))[1]
        parts = [part for part in (of_vectors, rest) if part is not None]
        return sum(parts[1:], parts[0]) if parts else None


def push(
    function: Callable[..., Array], primals: tuple[Any, ...], tangents: tuple[Any, ...]
) -> tuple[Array, Array | None]:
    """Return the value of a function and its tangent, where None stands for a tangent of 0."""
    given: list[Any]
    tree: Any
    given, tree = jax.tree.flatten(primals)
    listed = tree.flatten_up_to(tangents)
    places = [place for place, tangent in enumerate(listed) if tangent is not None]
    if not places:
        return function(*primals), None

    def of_places(*arrays: Array) -> Array:
        every = list(given)
        for place, array in zip(places, arrays, strict=True):
            every[place] = array
        return function(*tree.unflatten(every))

    tangents = tuple(listed[place] for place in places)
    primals = tuple(given[place].astype(listed[place].dtype) for place in places)
    value, tangent = jax.jvp(of_places, primals, tangents)
    return value, tangent
