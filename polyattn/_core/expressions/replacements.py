"""Expressions that replace a step of the formula: q·k, the scale, or softmax."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial, reduce
from operator import add
from typing import Any, ClassVar

from polyattn._base.arrays import Array, ArrayFacts, cast
from polyattn._core.expressions.derivatives import (
    Primitives,
    by_rows,
    finite,
    joined,
    lengths,
    over_lengths,
    sign,
    stacked,
    unit,
    unit_slope,
    used,
)
from polyattn._core.expressions.distances import distances
from polyattn._core.expressions.expression import Expression

#: The gradients of queries, of keys, and of the arrays that a similarity carries.
Pullback = tuple[Array, Array, list[Array]]
Pair = tuple[Array, Array]


class Similarity(Expression):
    """A replacement for q·k. Its scale is 1 by default."""

    module: ClassVar[str] = "scores"
    axes: ClassVar[dict[str, str]] = {}
    # Whether it is a sum over D that no matrix product gives, so that a compiler may hold D numbers
    # for each score.
    entrywise: ClassVar[bool] = True

    def between(self, query: Array, key: Array, backend: Primitives) -> Array:
        """Return the similarity of queries (..., l, D) and keys (..., s, D), shape (..., l, s)."""
        raise NotImplementedError

    def pullback(self, query: Array, key: Array, gradient: Array, backend: Primitives) -> Pullback:
        """Return the gradients of the queries, the keys, and the arrays of `carried()`, in a list.

        The first two have the batch axes of `gradient`, (..., l, s) in the dtype of the query,
        which is 0 where a key is absent, whatever the key holds.
        """
        raise NotImplementedError

    def pushforward(self, query: Array, key: Array, tangents: Pair, backend: Primitives) -> Array:
        """Return the derivative along tangents of queries and keys, maybe NaN for an absent key."""
        raise NotImplementedError

    def check(self, head_size: int) -> None:
        """Raise if the similarity does not fit a call with this D."""


@dataclass(frozen=True, eq=False, repr=False)
class Cosine(Similarity):
    name: ClassVar[str] = "cosine"
    entrywise: ClassVar[bool] = False

    def between(self, query: Array, key: Array, backend: Primitives) -> Array:
        xp, query = backend.xp, unit(query, backend)
        # Fewer divisions: 1.5 to 2 times as fast for a long memory of keys.
        if backend.is_plain(key) and 0 < query.shape[-2] < key.shape[-1]:
            key, size = over_lengths(key, backend)
            return backend.matmul(query, xp.matrix_transpose(key)) / xp.matrix_transpose(size)
        return backend.matmul(query, xp.matrix_transpose(unit(key, backend)))

    def pullback(self, query: Array, key: Array, gradient: Array, backend: Primitives) -> Pullback:
        xp, matmul = backend.xp, backend.matmul
        # If a query or key is not finite, neither is the similarity: its gradient is 0 or NaN.
        query, key = finite(xp, query), finite(xp, key)
        of_query = matmul(gradient, unit(key, backend))
        of_key = matmul(xp.matrix_transpose(gradient), unit(query, backend))
        return unit_slope(query, of_query, xp), unit_slope(key, of_key, xp), []

    def pushforward(self, query: Array, key: Array, tangents: Pair, backend: Primitives) -> Array:
        xp, matmul = backend.xp, backend.matmul
        first, second = unit(query, backend), unit(key, backend)
        of_first = unit_slope(query, tangents[0], xp)
        turned = xp.matrix_transpose(unit_slope(key, tangents[1], xp))
        return matmul(of_first, xp.matrix_transpose(second)) + matmul(first, turned)


@dataclass(frozen=True, eq=False, repr=False)
class Distance(Similarity):
    name: ClassVar[str] = "distance"
    p: int = 2

    def between(self, query: Array, key: Array, backend: Primitives) -> Array:
        xp = backend.xp
        if self.p == 2:
            return -distances(query, key, backend)

        def block(query: Array, key: Array) -> Array:
            return -backend.over_size(lambda d, q, k: xp.abs(q - k), query, key)

        return joined(xp, by_rows(backend, block, query, key))

    def pullback(self, query: Array, key: Array, gradient: Array, backend: Primitives) -> Pullback:
        xp, matmul = backend.xp, backend.matmul
        if self.p == 1:
            of_blocks = by_rows(backend, partial(self._slopes, xp), query, key, gradient)
            of_query, of_key = zip(*of_blocks, strict=True)
            return joined(xp, of_query), reduce(add, of_key), []
        share = gradient * used(xp, self._over_root(query, key, backend), gradient)
        query, key = finite(xp, query), finite(xp, key)
        # Counted from the mean of the keys that have a share, vectors with much in common keep
        # their digits. A share that is not finite must not reach the rows of others.
        part = finite(xp, xp.sum(xp.abs(finite(xp, share)), axis=-2, keepdims=True))
        total = xp.sum(part, axis=-1, keepdims=True)
        mean = matmul(part / xp.where(total == 0, xp.ones_like(total), total), key)
        query, key = query - mean, key - mean
        across = xp.matrix_transpose(share)
        of_query = matmul(share, key) - query * xp.sum(share, axis=-1, keepdims=True)
        of_key = matmul(across, query) - key * xp.sum(across, axis=-1, keepdims=True)
        return of_query, of_key, []

    @staticmethod
    def _slopes(xp: Any, query: Array, key: Array, gradient: Array) -> tuple[Array, Array]:
        """Return the gradients of queries and keys for p = 1."""
        of_query, of_key = [], []
        for d in range(query.shape[-1]):
            slope = gradient * sign(xp, query[..., :, d, None] - key[..., None, :, d])
            of_query.append(-xp.sum(slope, axis=-1))
            of_key.append(xp.sum(slope, axis=-2))
        return stacked(xp, of_query, of_key, gradient)

    def pushforward(self, query: Array, key: Array, tangents: Pair, backend: Primitives) -> Array:
        xp, matmul, (query_tangent, key_tangent) = backend.xp, backend.matmul, tangents
        if self.p == 2:
            along_query = xp.sum(query * query_tangent, axis=-1, keepdims=True)
            along_key = xp.sum(key * key_tangent, axis=-1, keepdims=True)
            across = matmul(query_tangent, xp.matrix_transpose(key))
            across = across + matmul(query, xp.matrix_transpose(key_tangent))
            change = along_query + xp.matrix_transpose(along_key) - across
            return -change * self._over_root(query, key, backend)

        def block(query: Array, key: Array, query_tangent: Array) -> Array:
            def step(d: Any, q: Array, k: Array) -> Array:
                change = query_tangent[..., :, d, None] - key_tangent[..., None, :, d]
                return sign(xp, q - k) * change

            return backend.over_size(step, query, key)

        return -joined(xp, by_rows(backend, block, query, key, query_tangent))

    def _over_root(self, query: Array, key: Array, backend: Primitives) -> Array:
        """Return 1 over the distance of each query and key, 0 where they are the same."""
        xp, root = backend.xp, -self.between(query, key, backend)
        same = root == 0
        return xp.where(same, root, 1 / xp.where(same, xp.ones_like(root), root))

    def __repr__(self) -> str:
        return f"scores.distance({self.p})"


@dataclass(frozen=True, eq=False, repr=False)
class Additive(Similarity):
    name: ClassVar[str] = "additive"
    axes: ClassVar[dict[str, str]] = {"weight": "-"}
    weight: Any

    def between(self, query: Array, key: Array, backend: Primitives) -> Array:
        xp = backend.xp
        weight = cast(xp, self.weight, query.dtype)
        block = partial(backend.over_size, lambda d, q, k: weight[d] * xp.tanh(q + k))
        return joined(xp, by_rows(backend, block, query, key))

    def pullback(self, query: Array, key: Array, gradient: Array, backend: Primitives) -> Pullback:
        xp = backend.xp
        weight = cast(xp, self.weight, query.dtype)
        of_blocks = by_rows(backend, partial(self._slopes, xp, weight), query, key, gradient)
        of_query, of_key, of_weight = zip(*of_blocks, strict=True)
        return joined(xp, of_query), reduce(add, of_key), [reduce(add, of_weight)]

    @staticmethod
    def _slopes(
        xp: Any, weight: Array, query: Array, key: Array, gradient: Array
    ) -> tuple[Array, Array, Array]:
        """Return the gradients of queries, keys and weight."""
        of_query, of_key, of_weight = [], [], []
        for d in range(query.shape[-1]):
            total = query[..., :, d, None] + key[..., None, :, d]
            bent = xp.tanh(used(xp, total, gradient))
            slope = gradient * (1 - bent * bent)
            of_query.append(weight[d] * xp.sum(slope, axis=-1))
            of_key.append(weight[d] * xp.sum(slope, axis=-2))
            of_weight.append(xp.sum(gradient * bent))
        carried = xp.stack(of_weight) if of_weight else weight
        return *stacked(xp, of_query, of_key, gradient), carried

    def pushforward(self, query: Array, key: Array, tangents: Pair, backend: Primitives) -> Array:
        xp, (query_tangent, key_tangent) = backend.xp, tangents
        weight = cast(xp, self.weight, query.dtype)

        def block(query: Array, key: Array, query_tangent: Array) -> Array:
            def step(d: Any, q: Array, k: Array) -> Array:
                bent = xp.tanh(q + k)
                change = query_tangent[..., :, d, None] + key_tangent[..., None, :, d]
                return weight[d] * (1 - bent * bent) * change

            return backend.over_size(step, query, key)

        return joined(xp, by_rows(backend, block, query, key, query_tangent))

    def check(self, head_size: int) -> None:
        facts: ArrayFacts = self.weight
        if "float" not in facts.dtype or facts.shape != (head_size,):
            raise ValueError(
                f"scores.additive: weight must be a float array of shape (D,) = ({head_size},); got"
                f" {facts}"
            )


class ScaleRule(Expression):
    """A rule for ``scale=``, in place of a number."""

    module: ClassVar[str] = "scores"
    axes: ClassVar[dict[str, str]] = {}


@dataclass(frozen=True, eq=False, repr=False)
class LongSequence(ScaleRule):
    name: ClassVar[str] = "long_sequence"
    keys: int | None = None  # S by default


@dataclass(frozen=True, eq=False, repr=False)
class ByNorm(ScaleRule):
    name: ClassVar[str] = "by_norm"
    factor: float = 1.0

    def apply(self, scores: Array, seen: Iterable[Array], backend: Primitives) -> Array:
        """Divide rows of scores by their norms, with 0 for a score where one of `seen` is False."""
        counted = scores
        for one in seen:
            counted = backend.xp.where(one, counted, 0.0)
        size, root = lengths(counted, backend)
        return (counted if size is None else counted / size) * (self.factor / root)

    def pullback(self, scores: Array, seen: Iterable[Array], gradient: Array, xp: Any) -> Array:
        """Return the gradient of the scores, 0 where a key is not seen, or their tangent."""
        # One function for both: the derivative is a symmetric matrix.
        zeros = xp.zeros_like(scores)
        for one in seen:
            scores, gradient = xp.where(one, scores, zeros), xp.where(one, gradient, zeros)
        gradient = self.factor * unit_slope(scores, gradient, xp)
        for one in seen:
            gradient = xp.where(one, gradient, zeros)
        return gradient


class Normalizer(Expression):
    """A replacement for softmax, which turns scores into weights, without a logsumexp."""

    module: ClassVar[str] = "scores"
    axes: ClassVar[dict[str, str]] = {}

    def weights(self, scores: Array, backend: Primitives) -> Array:
        """Return the weights of rows of scores, 0 where a key is absent and its score −inf."""
        raise NotImplementedError

    def pullback(self, weights: Array, gradient: Array, xp: Any) -> Array:
        """Return the gradient of the scores, 0 where a weight is 0, whatever `gradient` holds.

        The derivative is a symmetric matrix, so a tangent in place of the gradient makes the result
        the forward derivative.
        """
        raise NotImplementedError


@dataclass(frozen=True, eq=False, repr=False)
class Sigmoid(Normalizer):
    name: ClassVar[str] = "sigmoid"

    def weights(self, scores: Array, backend: Primitives) -> Array:
        return backend.sigmoid(scores)

    def pullback(self, weights: Array, gradient: Array, xp: Any) -> Array:
        return xp.where(weights == 0, 0.0, gradient) * weights * (1 - weights)


@dataclass(frozen=True, eq=False, repr=False)
class Sparsemax(Normalizer):
    name: ClassVar[str] = "sparsemax"

    def weights(self, scores: Array, backend: Primitives) -> Array:
        # It passes over the scores fifteen times: by rows that stay in the cache.
        xp = backend.xp
        blocks = backend.row_blocks(scores, xp.matrix_transpose(scores[..., :1, :]))
        if len(blocks) == 1:
            return self._of_rows(scores, xp)
        return xp.concat([self._of_rows(scores[..., slice(*x), :], xp) for x in blocks], axis=-2)

    def _of_rows(self, scores: Array, xp: Any) -> Array:
        highest = xp.max(scores, axis=-1, keepdims=True)
        empty = highest == -math.inf
        seen = scores != -math.inf
        # A score 2 or more below the highest has no weight, so it may be −2, as may an absent one.
        low = xp.full_like(scores, -2.0)
        shifted = scores - xp.where(empty, xp.zeros_like(highest), highest)
        shifted = xp.where(shifted < -2, low, shifted)
        # NumPy's own sort, which a plugin may use, has no descending order.
        ordered = -xp.sort(-shifted, axis=-1)
        total = xp.cumulative_sum(ordered, axis=-1)
        count = xp.cumulative_sum(xp.ones_like(ordered[..., :1, :]), axis=-1)
        within = cast(xp, 1 + count * ordered > total, scores.dtype)
        size = xp.sum(within, axis=-1, keepdims=True)
        threshold = (xp.sum(within * ordered, axis=-1, keepdims=True) - 1) / size
        over = shifted - threshold
        weights = xp.where(over <= 0, xp.zeros_like(over), over)  # a visible NaN stays
        return xp.where(seen, weights, xp.zeros_like(weights))

    def pullback(self, weights: Array, gradient: Array, xp: Any) -> Array:
        within = cast(xp, weights > 0, weights.dtype)
        within = xp.where(xp.isnan(weights), weights, within)
        gradient = xp.where(weights == 0, 0.0, gradient)
        size = xp.sum(within, axis=-1, keepdims=True)
        mean = xp.sum(gradient, axis=-1, keepdims=True) / xp.where(size == 0, 1.0, size)
        return within * (gradient - mean)
