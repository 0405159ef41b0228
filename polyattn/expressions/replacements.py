"""Expressions that replace a step of the formula: q·k, the scale, or softmax."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from polyattn.arrays import Array, ArrayFacts, cast
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


class Similarity(Expression):
    """A replacement for q·k. Its scale is 1 by default."""

    module: ClassVar[str] = "scores"
    # Whether it is a sum over D that no matrix product gives, so that a compiler may hold D numbers
    # for each score.
    entrywise: ClassVar[bool] = True

    def between(self, query: Array, key: Array, matmul: Callable[..., Array], xp: Any) -> Array:
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

    def between(self, query: Array, key: Array, matmul: Callable[..., Array], xp: Any) -> Array:
        return matmul(_unit(query, xp), xp.matrix_transpose(_unit(key, xp)))


def _unit(vectors: Array, xp: Any) -> Array:
    """Divide vectors by their lengths, first by their largest entries, whose squares may be 0."""
    ones = xp.ones_like(vectors[..., :1])
    if not vectors.shape[-1]:
        return vectors
    largest = xp.max(xp.abs(vectors), axis=-1, keepdims=True)
    vectors = vectors / xp.where(largest == 0, ones, largest)
    square = xp.sum(vectors * vectors, axis=-1, keepdims=True)
    return vectors / xp.sqrt(xp.where(square == 0, ones, square))


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

    def between(self, query: Array, key: Array, matmul: Callable[..., Array], xp: Any) -> Array:
        if self.p == 1:
            return -_over_size(xp, lambda d, q, k: xp.abs(q - k), query, key)
        square = _over_size(xp, lambda d, q, k: (q - k) * (q - k), query, key)
        # The root has no slope at 0, so its gradient is defined as 0 there.
        far = square > 0
        root = xp.sqrt(xp.where(far, square, xp.ones_like(square)))
        return -xp.where(far, root, square)

    def __repr__(self) -> str:
        return f"scores.distance({self.p})"


@dataclass(frozen=True, eq=False, repr=False)
class Additive(Similarity):
    name: ClassVar[str] = "additive"
    weight: Any

    def between(self, query: Array, key: Array, matmul: Callable[..., Array], xp: Any) -> Array:
        weight = cast(xp, self.weight, query.dtype)
        return _over_size(xp, lambda d, q, k: weight[d] * xp.tanh(q + k), query, key)

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
        largest = xp.max(xp.abs(counted), axis=-1, keepdims=True)
        ones = xp.ones_like(largest)
        size = xp.where(largest == 0, ones, largest)  # so that no square overflows
        square = xp.sum((counted / size) * (counted / size), axis=-1, keepdims=True)
        return self.factor * (scores / size) / xp.sqrt(xp.where(square == 0, ones, square))


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
