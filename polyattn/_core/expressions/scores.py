"""Score modifications as expressions, which `polyattn.scores` makes and kernels apply."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from polyattn._base.arrays import Array, ArrayFacts, cast, is_array, library_of, numbers_like
from polyattn._base.host import destination_of
from polyattn._core.expressions.derivatives import into_heads, used
from polyattn._core.expressions.expression import Expression, shown
from polyattn._core.expressions.indices import INDEX_LIMIT, PointIndices, ScoreDims, ScoreIndices
from polyattn._core.expressions.parts import Part

#: The gradient of scores, and of the arrays that a modification carries.
Pullback = tuple[Array, list[Array]]


class Score(Expression):
    """A modification of scores. Modifications compose by ``>>``.

    Called as ``score(s, b, h, i, j)`` it is a score function in FlexAttention's form, the rows
    counted from the first key.
    """

    module: ClassVar[str] = "scores"

    @property
    def is_additive(self) -> bool:
        """Whether it only adds numbers that do not depend on the scores."""
        return False

    def apply(self, scores: Array, at: ScoreIndices) -> Array:
        """Return the modified scores, at their batch items, heads, rows and keys."""
        raise NotImplementedError

    def pullback(self, scores: Array, at: ScoreIndices, gradient: Array) -> Pullback:
        """Return the gradients of the scores and of the arrays that the modification carries.

        `gradient` is that of the modified scores, (..., H, l, s): 0 where a key is absent, and the
        result is 0 there whatever the score. Those of the arrays of `carried()` are in their shapes
        and the dtype of the scores, summed over the tile. Each modified score is a function of one
        score, so a tangent in place of the gradient makes the first result the forward derivative.
        """
        raise NotImplementedError

    def __call__(self, s: Array, b: Array, h: Array, i: Array, j: Array) -> Array:
        destination = destination_of(s) if is_array(s) else None
        score = self if destination is None else self.placed(destination)
        return score.apply(s, PointIndices(b, h, i, j))

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


def as_score(rule: Any, derivative: Any = None) -> Score:
    """Return a score value as it is, and a function as the value that means it."""
    if derivative is None and isinstance(rule, Score):
        return rule
    if not callable(rule) or isinstance(rule, Expression):
        place = "scores compose with scores and functions"
        if derivative is not None:
            place = "scores.function: a derivative goes with a function"
        raise TypeError(f"{place} (score, b, h, i, j); got {rule!r}")
    if not (derivative is None or callable(derivative)) or isinstance(derivative, Expression):
        raise TypeError(
            "scores.function: derivative must be a function (score, b, h, i, j), the derivative"
            f" with respect to the score; got {derivative!r}"
        )
    return Function(rule, derivative)


@dataclass(frozen=True, eq=False, repr=False)
class Chain(Score):
    axes: ClassVar[dict[str, str]] = {}
    parts: tuple[Score, ...]

    @property
    def is_additive(self) -> bool:
        return all(part.is_additive for part in self.parts)

    def apply(self, scores: Array, at: ScoreIndices) -> Array:
        for part in self.parts:
            scores = part.apply(scores, at)
        return scores

    def pullback(self, scores: Array, at: ScoreIndices, gradient: Array) -> Pullback:
        given = [scores]
        for part in self.parts[:-1]:
            given.append(part.apply(given[-1], at))
        of_arrays: list[Array] = []
        for part, before in zip(reversed(self.parts), reversed(given), strict=True):
            gradient, arrays = part.pullback(before, at, gradient)
            of_arrays = arrays + of_arrays
        return gradient, of_arrays

    def __repr__(self) -> str:
        return " >> ".join([repr(part) for part in self.parts])


@dataclass(frozen=True, eq=False, repr=False)
class Softcap(Score):
    name: ClassVar[str] = "softcap"
    axes: ClassVar[dict[str, str]] = {}
    cap: float

    def apply(self, scores: Array, at: ScoreIndices) -> Array:
        return self.cap * at.xp.tanh(scores / self.cap)

    def pullback(self, scores: Array, at: ScoreIndices, gradient: Array) -> Pullback:
        bounded = at.xp.tanh(used(at.xp, scores, gradient) / self.cap)
        return gradient * (1 - bounded * bounded), []


@dataclass(frozen=True, eq=False, repr=False)
class Temperature(Score):
    name: ClassVar[str] = "temperature"
    axes: ClassVar[dict[str, str]] = {}
    t: float

    def apply(self, scores: Array, at: ScoreIndices) -> Array:
        return scores / self.t

    def pullback(self, scores: Array, at: ScoreIndices, gradient: Array) -> Pullback:
        return gradient / self.t, []


@dataclass(frozen=True, eq=False, repr=False)
class Alibi(Score):
    name: ClassVar[str] = "alibi"
    axes: ClassVar[dict[str, str]] = {"slopes": "H"}
    is_additive = True
    slopes: Any

    def apply(self, scores: Array, at: ScoreIndices) -> Array:
        return scores - self._slopes(at, scores.dtype) * self._far(at, scores.dtype)

    def pullback(self, scores: Array, at: ScoreIndices, gradient: Array) -> Pullback:
        if not is_array(self.slopes):
            return gradient, []
        lost = -gradient * self._far(at, scores.dtype)
        lost = _sum_lead(at.xp, at.xp.sum(lost, axis=(-2, -1)), 1)
        return gradient, [into_heads(at.xp, lost, at.head, self.slopes.shape[0])]

    def part(self, part: Part) -> Score:
        first, length = part.heads
        if is_array(self.slopes) or length == self.slopes:
            whole: Score = super().part(part)
            return whole
        if isinstance(first, int):
            return Alibi(default_slopes(self.slopes)[first : first + length])
        # Slopes at a traced start would be an array, and have a gradient.
        rule = part.shifted(lambda s, *at: self.apply(s, _indices_of_whole(part, *at)))
        return Function(rule, lambda s, *at: library_of(s).xp.ones_like(s))

    @staticmethod
    def _far(at: ScoreIndices, dtype: Any) -> Array:
        return cast(at.xp, at.xp.abs(at.relative_position()), dtype)

    def _slopes(self, at: ScoreIndices, dtype: Any) -> Array:
        if is_array(self.slopes):
            return cast(at.xp, at.per_head(self.slopes), dtype)
        if isinstance(self.slopes, tuple):
            return at.per_head(numbers_like(at.xp, self.slopes, dtype, at.column))
        # The slopes for a power of two heads; for the rest, every other slope for twice as many.
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
        if isinstance(facts, tuple) and not is_array(facts) and len(facts) != dims.heads:
            raise ValueError(f"scores.alibi: {len(facts)} slopes for {dims.heads} query heads")
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


def _indices_of_whole(part: Part, *at: Array) -> PointIndices:
    offset = part.offset
    if is_array(offset):
        xp = library_of(offset).xp
        offset = xp.reshape(xp.broadcast_to(offset, part.batch), (-1,))
    return PointIndices(*at, offset=offset, batch=part.batch)


def default_slopes(slopes: int | tuple[float, ...]) -> tuple[float, ...]:
    """Return the slope of each head: for a power of two, and then every other one for twice it."""
    if isinstance(slopes, tuple):
        return slopes
    whole = 1 << (slopes.bit_length() - 1)
    return tuple(
        2.0 ** (-8 * (head + 1) / whole if head < whole else -4 * (2 * (head - whole) + 1) / whole)
        for head in range(slopes)
    )


@dataclass(frozen=True, eq=False, repr=False)
class RelativeBias(Score):
    name: ClassVar[str] = "relative_bias"
    axes: ClassVar[dict[str, str]] = {"table": "-H"}
    is_additive = True
    table: Any
    bidirectional: bool = True
    max_distance: int = 128

    def apply(self, scores: Array, at: ScoreIndices) -> Array:
        bucket = self._bucket(at)
        return scores + cast(at.xp, at.looked_up(self.table, bucket, at.head), scores.dtype)

    def pullback(self, scores: Array, at: ScoreIndices, gradient: Array) -> Pullback:
        xp, bucket = at.xp, self._bucket(at)
        buckets, heads = self.table.shape
        # The standard cannot add at indices, so a pass for each bucket, over as few as can be.
        each = gradient
        if math.prod(bucket.shape[:-2]) == 1:  # then all items and heads have the same buckets
            each, bucket = _sum_lead(xp, gradient, 3), xp.reshape(bucket, (1, *bucket.shape[-2:]))
        sums = [
            _sum_lead(xp, xp.sum(xp.where(bucket == n, each, 0.0), axis=(-2, -1)), 1)
            for n in range(buckets)
        ]
        return gradient, [into_heads(xp, xp.stack(sums), at.head, heads)]

    def _bucket(self, at: ScoreIndices) -> Array:
        return self.bucket(at.relative_position(), self.table.shape[0], at.xp)

    def bucket(self, away: Array, buckets: int, xp: Any) -> Array:
        """Return the bucket of keys at these distances after their rows."""
        # A program of torch.compile may hold it as a symbol, whose powers are too long for it.
        buckets = operator.index(buckets)
        each = buckets // 2 if self.bidirectional else buckets
        exact = each // 2
        zero = xp.zeros_like(away)
        distance = xp.abs(away) if self.bidirectional else xp.where(away < 0, -away, zero)
        # The steps are whole numbers, because libraries round a logarithm differently.
        bucket = xp.where(distance < exact, distance, zero + exact)
        for first in _steps(exact, each, self.max_distance):
            bucket = bucket + cast(xp, distance >= first, away.dtype)
        return xp.where(away > 0, bucket + each, bucket) if self.bidirectional else bucket

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


def _sum_lead(xp: Any, array: Array, rank: int) -> Array:
    """Sum an array over all but its last axes."""
    lead = tuple(range(len(array.shape) - rank))
    return xp.sum(array, axis=lead) if lead else array


def _steps(exact: int, each: int, most: int) -> list[int]:
    """Return the first distance of each bucket after the exact ones.

    By T5's rule, ``exact + floor(log(n / exact) / log(most / exact) · (each − exact))``.
    """
    spread = each - exact
    growth = (math.log(most) - math.log(exact)) / spread
    limit = 2 * INDEX_LIMIT - 1  # which no distance reaches
    furthest = math.log(limit)
    steps, n = [], exact
    for k in range(1, spread):
        n = max(n, int(exact * math.exp(min(k * growth, furthest))) - 1)  # as far as floats tell
        while n < limit and n**spread * exact**k < most**k * exact**spread:
            n += 1
        steps.append(min(n, limit))
    return steps


@dataclass(frozen=True, eq=False, repr=False)
class Function(Score):
    name: ClassVar[str] = "function"
    axes: ClassVar[dict[str, str]] = {}
    rule: Callable[..., Any]
    derivative: Callable[..., Any] | None = None

    def apply(self, scores: Array, at: ScoreIndices) -> Array:
        return at.by_score_mod(self.rule, scores)

    def pullback(self, scores: Array, at: ScoreIndices, gradient: Array) -> Pullback:
        if self.derivative is None and at.differentiate is not None:
            function = partial(at.by_score_mod, self.rule)
            return at.differentiate(function, scores, gradient), []
        if self.derivative is None:
            raise TypeError(
                f"scores.function({shown(self.rule)}) has no derivative: give it one,"
                " scores.function(f, derivative=g), or use torch or JAX, which differentiate f"
                " themselves"
            )
        slope = at.by_score_mod(self.derivative, used(at.xp, scores, gradient))
        return gradient * used(at.xp, slope, gradient), []
