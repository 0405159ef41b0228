"""The weighted sum of values, without the values of masked keys.

Between the steps a score of −inf marks an absent key. 0 · NaN is NaN, so a value that is not finite
must not reach the rows that do not see its key.
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
    """Return scores with −inf wherever a key is not seen."""
    return xp.where(seen, scores, -math.inf)


def weighted_sum(
    problem: Problem, backend: Backend, weights: Array, scores: Array, value: Array
) -> Array:
    """Return weights · value, without the values of absent keys.

    Weights (..., H, l, s) are 0 and scores −inf where a key is absent.
    """
    xp = backend.xp
    weights = fold_heads(problem, weights, xp)
    if not problem.masks:
        return unfold_heads(problem, backend.matmul(weights, value), xp)
    if not problem.transforms and backend.is_eager(value):
        # A value that is not finite spoils its column in every row, even with weight 0.
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
