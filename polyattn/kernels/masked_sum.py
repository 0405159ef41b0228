"""A masked key is absent: nothing that it or its value holds reaches a row that it is masked for.

A score of −inf is how absence is written between the steps. 0 · NaN is NaN, so values need care of
their own: rows that do not see a key must not meet what its value holds.
"""

from __future__ import annotations

import math
from typing import Any

from polyattn.arrays import Array, cast
from polyattn.call.problem import Problem
from polyattn.plugin import Backend
from polyattn.tiles.grouped_heads import fold_heads, unfold_heads

__all__ = ["hide", "weighted_sum"]


def hide(xp: Any, scores: Array, seen: Array) -> Array:
    """Return scores with −inf wherever a key is not seen, whatever stood there."""
    return xp.where(seen, scores, -math.inf)


def weighted_sum(
    problem: Problem, backend: Backend, weights: Array, scores: Array, value: Array
) -> Array:
    """Return weights · value, in which an absent key's value takes no part."""
    xp = backend.xp
    weights = fold_heads(problem, weights, xp)
    if not problem.masks:
        return unfold_heads(problem, backend.matmul(weights, value), xp)
    if not problem.transforms and backend.is_eager(value):
        # A value that is not finite spoils its column in every row, weight 0 or not.
        plain = backend.matmul(weights, value)
        if bool(xp.all(xp.isfinite(plain))):
            return unfold_heads(problem, plain, xp)
    nothing = xp.zeros_like(value)
    finite = backend.matmul(weights, xp.where(xp.isfinite(value), value, nothing))
    seen = cast(xp, fold_heads(problem, scores, xp) != -math.inf, value.dtype)
    # NaN counts as both infinities, whose sum it is.
    for infinity in (math.inf, -math.inf):
        spoils = cast(xp, (value == infinity) | xp.isnan(value), value.dtype)
        spoilt = backend.matmul(seen, spoils) > 0
        finite = finite + xp.where(spoilt, xp.full_like(finite, infinity), xp.zeros_like(finite))
    return unfold_heads(problem, finite, xp)
