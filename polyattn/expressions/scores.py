"""The steps that a score takes, as values: modifications, similarities, scale rules, normalizers.

What `polyattn.scores` makes, and what a kernel calls.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from polyattn.arrays import Array, ArrayFacts, cast, is_array
from polyattn.expressions.expression import Expression
from polyattn.expressions.indices import PointIndices, ScoreDims, ScoreIndices

__all__ = [
    "Additive",
    "Alibi",
    "ByNorm",
    "Chain",
    "Cosine",
    "Distance",
    "Function",
    "LongSequence",
    "Normalizer",
    "RelativeBias",
    "ScaleRule",
    "Score",
    "Sigmoid",
    "Similarity",
    "Softcap",
    "Sparsemax",
    "Temperature",
]

# ---- score modifications -----------------------------------------------------------------------


class Score(Expression):
    """What is done to scores: a value that composes by ``>>``.

    Called as ``score(s, b, h, i, j)`` it is a score function in FlexAttention's form, the rows
    counted from the first key.
    """

    module: ClassVar[str] = "scores"

    def apply(self, scores: Array, at: ScoreIndices) -> Array:
        """Return what becomes of scores.

        Parameters
        ----------
        scores : Array
            The scores of a place.
        at : ScoreIndices
            Where.
        """
        raise NotImplementedError

    def check(self, dims: ScoreDims) -> None:
        """Refuse a call that it does not fit, by facts alone.

        Parameters
        ----------
        dims : ScoreDims
            The lengths of the call.
        """

    def __call__(self, s: Array, b: Array, h: Array, i: Array, j: Array) -> Array:
        return self.apply(s, PointIndices(b, h, i, j))

    def __bool__(self) -> bool:
        raise TypeError("scores compose by >>, which `and` and `or` are not")

    def __rshift__(self, other: Any) -> Score:
        return _chained(self, other)

    def __rrshift__(self, other: Any) -> Score:
        return _chained(other, self)


def _chained(*scores: Any) -> Score:
    parts: list[Score] = []
    for score in scores:
        one = as_score(score)
        parts += one.parts if isinstance(one, Chain) else (one,)
    return Chain(tuple(parts))


def as_score(rule: Any) -> Score:
    """Return a score value as it is, and a function as the value that means it."""
    if isinstance(rule, Score):
        return rule
    if not callable(rule) or isinstance(rule, Expression):
        raise TypeError(
            f"scores compose with scores and functions (score, b, h, i, j); got {rule!r}"
        )
    return Function(rule)


@dataclass(frozen=True, eq=False, repr=False)
class Chain(Score):
    parts: tuple[Score, ...]

    def apply(self, scores: Array, at: ScoreIndices) -> Array:
        for part in self.parts:
            scores = part.apply(scores, at)
        return scores

    def check(self, dims: ScoreDims) -> None:
        for part in self.parts:
            part.check(dims)

    def __repr__(self) -> str:
        return " >> ".join([repr(part) for part in self.parts])


@dataclass(frozen=True, eq=False, repr=False)
class Softcap(Score):
    name: ClassVar[str] = "softcap"
    cap: float

    def apply(self, scores: Array, at: ScoreIndices) -> Array:
        return self.cap * at.xp.tanh(scores / self.cap)


@dataclass(frozen=True, eq=False, repr=False)
class Temperature(Score):
    name: ClassVar[str] = "temperature"
    t: float

    def apply(self, scores: Array, at: ScoreIndices) -> Array:
        return scores / self.t


@dataclass(frozen=True, eq=False, repr=False)
class Alibi(Score):
    name: ClassVar[str] = "alibi"
    slopes: Any

    def apply(self, scores: Array, at: ScoreIndices) -> Array:
        far = cast(at.xp, at.xp.abs(at.away_from_row()), scores.dtype)
        return scores - self._slopes(at, scores.dtype) * far

    def _slopes(self, at: ScoreIndices, dtype: Any) -> Array:
        if is_array(self.slopes):
            return cast(at.xp, at.per_head(self.slopes), dtype)
        # Those of a power of two of heads, and for the rest every other one of twice as many.
        whole = 1 << (self.slopes.bit_length() - 1)
        head = cast(at.xp, at.head, dtype)
        exponent = at.xp.where(
            at.head < whole,
            head * (-8 / whole) - 8 / whole,
            (head - whole) * (-8 / whole) - 4 / whole,
        )
        return at.xp.exp(exponent * math.log(2))

    def check(self, dims: ScoreDims) -> None:
        facts = self.slopes
        if isinstance(facts, int) and facts != dims.heads:
            raise ValueError(f"scores.alibi({facts}) is for {facts} query heads; got {dims.heads}")
        if isinstance(facts, ArrayFacts):
            if "float" not in facts.dtype:
                raise TypeError(f"scores.alibi: slopes must be a float array; got {facts}")
            if facts.shape != (dims.heads,):
                raise ValueError(
                    "scores.alibi: slopes must hold one number per query head, shape"
                    f" ({dims.heads},); got {facts.shape}"
                )


@dataclass(frozen=True, eq=False, repr=False)
class RelativeBias(Score):
    name: ClassVar[str] = "relative_bias"
    table: Any
    bidirectional: bool = True
    max_distance: int = 128

    def apply(self, scores: Array, at: ScoreIndices) -> Array:
        bucket = self.bucket(at.away_from_row(), self.table.shape[0], at.xp)
        return scores + cast(at.xp, at.looked_up(self.table, bucket, at.head), scores.dtype)

    def bucket(self, away: Array, buckets: int, xp: Any) -> Array:
        """Return the bucket of keys so far after their rows."""
        each = buckets // 2 if self.bidirectional else buckets
        exact = each // 2
        zero = xp.zeros_like(away)
        distance = xp.abs(away) if self.bidirectional else xp.where(away < 0, -away, zero)
        # Steps at whole numbers, where a logarithm would round to either side by its library.
        found = xp.where(distance < exact, distance, zero + exact)
        for first in _steps(exact, each, self.max_distance):
            found = found + cast(xp, distance >= first, away.dtype)
        return xp.where(away > 0, found + each, found) if self.bidirectional else found

    def check(self, dims: ScoreDims) -> None:
        facts: ArrayFacts = self.table
        if "float" not in facts.dtype or facts.shape[-1] != dims.heads:
            raise ValueError(
                f"scores.relative_bias: table must be a float array (buckets, H = {dims.heads});"
                f" got {facts}"
            )

    def __repr__(self) -> str:
        table = super().__repr__().removesuffix(")").split(", True")[0].split(", False")[0]
        given = "" if self.bidirectional else ", bidirectional=False"
        given += "" if self.max_distance == 128 else f", max_distance={self.max_distance}"
        return f"{table}{given})"


def _steps(exact: int, each: int, most: int) -> list[int]:
    """Return from which distance on each bucket beyond the exact ones begins.

    By T5's rule, ``exact + floor(log(n / exact) / log(most / exact) · (each − exact))``.
    """
    spread = each - exact
    found, n = [], exact
    for k in range(1, spread):
        while n**spread * exact**k < most**k * exact**spread:
            n += 1
        found.append(n)
    return found


@dataclass(frozen=True, eq=False, repr=False)
class Function(Score):
    name: ClassVar[str] = "function"
    rule: Callable[..., Any]

    def apply(self, scores: Array, at: ScoreIndices) -> Array:
        return at.by_score_mod(self.rule, scores)


# ---- in place of the dot product ---------------------------------------------------------------


class Similarity(Expression):
    """What stands in place of q·k. Its scale is 1 where none is given."""

    module: ClassVar[str] = "scores"
    # Whether it is a sum over D of what no matrix product gives, so that a compiler may keep D
    # numbers for each score.
    entrywise: ClassVar[bool] = True

    def between(self, query: Array, key: Array, matmul: Callable[..., Array], xp: Any) -> Array:
        """Return how alike queries and keys are.

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
        """Refuse a call that it does not fit.

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
    """Divide vectors by their lengths, by way of their largest entries, whose squares may be 0."""
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
    """Sum over D, an entry at a time, so that memory is for l · s numbers, not D times those."""
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
        # The root has no slope at 0, where its gradient is taken to be 0.
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


# ---- scale rules -------------------------------------------------------------------------------


class ScaleRule(Expression):
    """What ``scale=`` takes beside a number."""

    module: ClassVar[str] = "scores"


@dataclass(frozen=True, eq=False, repr=False)
class LongSequence(ScaleRule):
    name: ClassVar[str] = "long_sequence"


@dataclass(frozen=True, eq=False, repr=False)
class ByNorm(ScaleRule):
    name: ClassVar[str] = "by_norm"
    factor: float = 1.0

    def apply(self, scores: Array, seen: Iterable[Array], xp: Any) -> Array:
        """Return rows of scores over their norms; a score counts where all of `seen` hold."""
        counted, zeros = scores, xp.zeros_like(scores)
        for one in seen:
            counted = xp.where(one, counted, zeros)
        largest = xp.max(xp.abs(counted), axis=-1, keepdims=True)
        ones = xp.ones_like(largest)
        size = xp.where(largest == 0, ones, largest)  # so that no square overflows
        square = xp.sum((counted / size) * (counted / size), axis=-1, keepdims=True)
        return self.factor * (scores / size) / xp.sqrt(xp.where(square == 0, ones, square))


# ---- in place of softmax -----------------------------------------------------------------------


class Normalizer(Expression):
    """What makes weights of scores in place of softmax. It has no logsumexp."""

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
        # Each half by the exponential that cannot overflow there; of −inf weight and slope are 0.
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
        # Two below the highest none has weight, so what lies there or is absent may lie at −2.
        low = xp.full_like(scores, -2.0)
        shifted = scores - xp.where(empty, xp.zeros_like(highest), highest)
        shifted = xp.where(shifted < -2, low, shifted)
        # NumPy's own sort, which a plugin may bring, knows no descending order.
        ordered = -xp.sort(-shifted, axis=-1)
        total = xp.cumulative_sum(ordered, axis=-1)
        count = xp.cumulative_sum(xp.ones_like(ordered), axis=-1)
        within = cast(xp, 1 + count * ordered > total, scores.dtype)
        size = xp.sum(within, axis=-1, keepdims=True)
        threshold = (xp.sum(within * ordered, axis=-1, keepdims=True) - 1) / size
        over = shifted - threshold
        weights = xp.where(over <= 0, xp.zeros_like(over), over)  # a NaN that is seen stays
        return xp.where(seen, weights, xp.zeros_like(weights))
