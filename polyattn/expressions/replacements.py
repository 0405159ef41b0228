"""Expressions that replace a step of the formula: q·k, the scale, or softmax."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from polyattn.arrays import Array, ArrayFacts, cast
from polyattn.expressions.derivatives import finite, lengths, sign, stacked, unit, unit_slope, used
from polyattn.expressions.expression import Expression

__all__ = [
    "Additive",
    "ByNorm",
    "Cosine",
    "Distance",
    "LongSequence",
    "Normalizer",
    "ScaleRule",
    "Sigmoid",
    "Similarity",
    "Sparsemax",
]

MatMul = Callable[..., Array]


class Similarity(Expression):
    """A replacement for q·k. Its scale is 1 by default."""

    module: ClassVar[str] = "scores"
    # Whether it is a sum over D that no matrix product gives, so that a compiler may hold D numbers
    # for each score.
    entrywise: ClassVar[bool] = True

    def between(self, query: Array, key: Array, matmul: MatMul, xp: Any) -> Array:
        """Return the similarity of queries and keys.

        Parameters
        ----------
        query : Array
            Queries, shape (..., l, D).
        key : Array
            Keys, shape (..., s, D).
        matmul : callable
            The product of two stacks of matrices.
        xp : module
            The standard's namespace of the library.

        Returns
        -------
        Array
            Shape (..., l, s).
        """
        raise NotImplementedError

    def pullback(
        self, query: Array, key: Array, gradient: Array, matmul: MatMul, xp: Any
    ) -> tuple[Array, Array, list[Array]]:
        """Return the gradients of the queries, the keys, and the arrays that are carried.

        Parameters
        ----------
        query, key : Array
            As of `between`.
        gradient : Array
            The gradient of the similarity, shape (..., l, s), in the dtype of the query. It is 0
            where a key is absent, whatever the key holds.
        matmul : callable
            As of `between`.
        xp : module
            As of `between`.

        Returns
        -------
        tuple
            The gradients of the queries, (..., l, D), and of the keys, (..., s, D), with the batch
            axes of `gradient`; and a list of those of the arrays of `carried()`, each in its shape.
        """
        raise NotImplementedError

    def pushforward(
        self,
        query: Array,
        key: Array,
        query_tangent: Array,
        key_tangent: Array,
        matmul: MatMul,
        xp: Any,
    ) -> Array:
        """Return the forward derivative along tangents of queries and keys, shape (..., l, s).

        Parameters
        ----------
        query, key : Array
            As of `between`.
        query_tangent, key_tangent : Array
            The tangents, of the shapes of the query and the key.
        matmul : callable
            As of `between`.
        xp : module
            As of `between`.

        Returns
        -------
        Array
            The tangent of the similarity; that of an absent key may be NaN.
        """
        raise NotImplementedError

    def check(self, head_size: int) -> None:
        """Raise if the similarity does not fit a call.

        Parameters
        ----------
        head_size : int
            D.
        """


@dataclass(frozen=True, eq=False, repr=False)
class Cosine(Similarity):
    name: ClassVar[str] = "cosine"
    entrywise: ClassVar[bool] = False

    def between(self, query: Array, key: Array, matmul: MatMul, xp: Any) -> Array:
        return matmul(unit(query, xp), xp.matrix_transpose(unit(key, xp)))

    def pullback(
        self, query: Array, key: Array, gradient: Array, matmul: MatMul, xp: Any
    ) -> tuple[Array, Array, list[Array]]:
        query, key = finite(xp, query), finite(xp, key)
        of_query = matmul(gradient, unit(key, xp))
        of_key = matmul(xp.matrix_transpose(gradient), unit(query, xp))
        return unit_slope(query, of_query, xp), unit_slope(key, of_key, xp), []

    def pushforward(
        self,
        query: Array,
        key: Array,
        query_tangent: Array,
        key_tangent: Array,
        matmul: MatMul,
        xp: Any,
    ) -> Array:
        first, second = unit(query, xp), unit(key, xp)
        of_first = unit_slope(query, query_tangent, xp)
        turned = xp.matrix_transpose(unit_slope(key, key_tangent, xp))
        return matmul(of_first, xp.matrix_transpose(second)) + matmul(first, turned)


def _over_size(
    xp: Any, step: Callable[[int, Array, Array], Array], query: Array, key: Array
) -> Array:
    """Sum over D, one entry at a time, with memory for l · s numbers and not D times as many."""
    total = None
    for d in range(query.shape[-1]):
        term = step(d, query[..., :, d, None], key[..., None, :, d])
        total = term if total is None else total + term
    if total is None:
        return xp.sum(query[..., :, None, :] + key[..., None, :, :], axis=-1)
    return total


@dataclass(frozen=True, eq=False, repr=False)
class Distance(Similarity):
    name: ClassVar[str] = "distance"
    p: int = 2

    def between(self, query: Array, key: Array, matmul: MatMul, xp: Any) -> Array:
        if self.p == 1:
            return -_over_size(xp, lambda d, q, k: xp.abs(q - k), query, key)
        square = _over_size(xp, lambda d, q, k: (q - k) * (q - k), query, key)
        # The root has no slope at 0, so its gradient is defined as 0 there.
        far = square > 0
        root = xp.sqrt(xp.where(far, square, xp.ones_like(square)))
        return -xp.where(far, root, square)

    def pullback(
        self, query: Array, key: Array, gradient: Array, matmul: MatMul, xp: Any
    ) -> tuple[Array, Array, list[Array]]:
        if self.p == 1:
            of_query, of_key = [], []
            for d in range(query.shape[-1]):
                slope = gradient * sign(xp, query[..., :, d, None] - key[..., None, :, d])
                of_query.append(-xp.sum(slope, axis=-1))
                of_key.append(xp.sum(slope, axis=-2))
            return *stacked(xp, of_query, of_key, gradient), []
        share = gradient * used(xp, self._over_root(query, key, xp), gradient)
        query, key = finite(xp, query), finite(xp, key)
        across = xp.matrix_transpose(share)
        of_query = matmul(share, key) - query * xp.sum(share, axis=-1, keepdims=True)
        of_key = matmul(across, query) - key * xp.sum(across, axis=-1, keepdims=True)
        return of_query, of_key, []

    def pushforward(
        self,
        query: Array,
        key: Array,
        query_tangent: Array,
        key_tangent: Array,
        matmul: MatMul,
        xp: Any,
    ) -> Array:
        def step(d: int, q: Array, k: Array) -> Array:
            change = query_tangent[..., :, d, None] - key_tangent[..., None, :, d]
            return (sign(xp, q - k) if self.p == 1 else q - k) * change

        slope = _over_size(xp, step, query, key)
        return -slope if self.p == 1 else -slope * self._over_root(query, key, xp)

    @staticmethod
    def _over_root(query: Array, key: Array, xp: Any) -> Array:
        """Return 1 over the distance of each query and key, 0 where they are the same."""
        square = _over_size(xp, lambda d, q, k: (q - k) * (q - k), query, key)
        same = square == 0
        root = xp.sqrt(xp.where(same, xp.ones_like(square), square))
        return xp.where(same, square, 1 / root)

    def __repr__(self) -> str:
        return f"scores.distance({self.p})"


@dataclass(frozen=True, eq=False, repr=False)
class Additive(Similarity):
    name: ClassVar[str] = "additive"
    weight: Any

    def between(self, query: Array, key: Array, matmul: MatMul, xp: Any) -> Array:
        weight = cast(xp, self.weight, query.dtype)
        return _over_size(xp, lambda d, q, k: weight[d] * xp.tanh(q + k), query, key)

    def pullback(
        self, query: Array, key: Array, gradient: Array, matmul: MatMul, xp: Any
    ) -> tuple[Array, Array, list[Array]]:
        weight = cast(xp, self.weight, query.dtype)
        of_query, of_key, of_weight = [], [], []
        for d in range(query.shape[-1]):
            total = query[..., :, d, None] + key[..., None, :, d]
            bent = xp.tanh(used(xp, total, gradient))
            slope = gradient * (1 - bent * bent)
            of_query.append(weight[d] * xp.sum(slope, axis=-1))
            of_key.append(weight[d] * xp.sum(slope, axis=-2))
            of_weight.append(xp.sum(gradient * bent))
        carried = xp.stack(of_weight) if of_weight else weight
        return *stacked(xp, of_query, of_key, gradient), [carried]

    def pushforward(
        self,
        query: Array,
        key: Array,
        query_tangent: Array,
        key_tangent: Array,
        matmul: MatMul,
        xp: Any,
    ) -> Array:
        weight = cast(xp, self.weight, query.dtype)

        def step(d: int, q: Array, k: Array) -> Array:
            bent = xp.tanh(q + k)
            change = query_tangent[..., :, d, None] + key_tangent[..., None, :, d]
            return weight[d] * (1 - bent * bent) * change

        return _over_size(xp, step, query, key)

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


@dataclass(frozen=True, eq=False, repr=False)
class LongSequence(ScaleRule):
    name: ClassVar[str] = "long_sequence"


@dataclass(frozen=True, eq=False, repr=False)
class ByNorm(ScaleRule):
    name: ClassVar[str] = "by_norm"
    factor: float = 1.0

    def apply(self, scores: Array, seen: Iterable[Array], xp: Any) -> Array:
        """Divide rows of scores by their norms; a score counts where all of `seen` are True."""
        counted, zeros = scores, xp.zeros_like(scores)
        for one in seen:
            counted = xp.where(one, counted, zeros)
        size, root = lengths(counted, xp)
        return self.factor * (scores / size) / root

    def pullback(self, scores: Array, seen: Iterable[Array], gradient: Array, xp: Any) -> Array:
        """Return the gradient of the scores, 0 where a key is not seen.

        The derivative is a symmetric matrix, so a tangent in place of the gradient makes the result
        the forward derivative.

        Parameters
        ----------
        scores, seen, xp
            As of `apply`.
        gradient : Array
            The gradient of its result; what it holds where a key is not seen does not count.
        """
        zeros = xp.zeros_like(scores)
        for one in seen:
            scores, gradient = xp.where(one, scores, zeros), xp.where(one, gradient, zeros)
        return self.factor * unit_slope(scores, gradient, xp)


class Normalizer(Expression):
    """A replacement for softmax, which turns scores into weights. It has no logsumexp."""

    module: ClassVar[str] = "scores"

    def weights(self, scores: Array, xp: Any) -> Array:
        """Return the weights of rows of scores, 0 where a key is absent.

        Parameters
        ----------
        scores : Array
            Scores, −inf where a key is absent.
        xp : module
            The standard's namespace of the library.
        """
        raise NotImplementedError

    def pullback(self, weights: Array, gradient: Array, xp: Any) -> Array:
        """Return the gradient of the scores, 0 where a weight is 0.

        The derivative is a symmetric matrix, so a tangent in place of the gradient makes the result
        the forward derivative.

        Parameters
        ----------
        weights : Array
            The weights.
        gradient : Array
            Their gradient; what it holds where a weight is 0 does not count.
        xp : module
            The standard's namespace of the library.
        """
        raise NotImplementedError


@dataclass(frozen=True, eq=False, repr=False)
class Sigmoid(Normalizer):
    name: ClassVar[str] = "sigmoid"

    def weights(self, scores: Array, xp: Any) -> Array:
        # Each half uses the exponential that cannot overflow. For −inf, weight and slope are 0.
        zeros = xp.zeros_like(scores)
        seen, negative = scores != -math.inf, scores < 0
        low = xp.exp(xp.where(seen & negative, scores, zeros))
        high = xp.exp(-xp.where(negative, zeros, scores))
        return xp.where(seen, xp.where(negative, low / (1 + low), 1 / (1 + high)), zeros)

    def pullback(self, weights: Array, gradient: Array, xp: Any) -> Array:
        return xp.where(weights == 0, 0.0, gradient) * weights * (1 - weights)


@dataclass(frozen=True, eq=False, repr=False)
class Sparsemax(Normalizer):
    name: ClassVar[str] = "sparsemax"

    def weights(self, scores: Array, xp: Any) -> Array:
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
        count = xp.cumulative_sum(xp.ones_like(ordered), axis=-1)
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
