"""Score modifications as expressions, which `polyattn.scores` makes and kernels apply."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from polyattn.arrays import Array, ArrayFacts, cast, is_array
from polyattn.expressions.expression import Expression
from polyattn.expressions.indices import PointIndices, ScoreDims, ScoreIndices

__all__ = [
    "Alibi",
    "Chain",
    "Function",
    "RelativeBias",
    "Score",
    "Softcap",
    "Temperature",
    "as_score",
]


class Score(Expression):
    """A modification of scores. Modifications compose by ``>>``.

    Called as ``score(s, b, h, i, j)`` it is a score function in FlexAttention's form, the rows
    counted from the first key.
    """

    module: ClassVar[str] = "scores"

    def apply(self, scores: Array, at: ScoreIndices) -> Array:
        """Return the modified scores.

        Parameters
        ----------
        scores : Array
            The scores.
        at : ScoreIndices
            Their batch items, heads, rows and keys.
        """
        raise NotImplementedError

    def check(self, dims: ScoreDims) -> None:
        """Raise if the modification does not fit a call.

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
    """Return a score expression unchanged, and a function as an expression."""
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
        """Return the bucket of keys at these distances after their rows."""
        each = buckets // 2 if self.bidirectional else buckets
        exact = each // 2
        zero = xp.zeros_like(away)
        distance = xp.abs(away) if self.bidirectional else xp.where(away < 0, -away, zero)
        # The steps are whole numbers, because libraries round a logarithm differently.
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
    """Return the first distance of each bucket after the exact ones.

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
