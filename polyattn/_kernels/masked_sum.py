"""Products over the visible keys only, in which a masked key takes no part.

Between the steps a score of −inf marks an absent key. 0 · NaN is NaN, so a value that is not finite
must not reach the rows that do not see its key.
"""

from __future__ import annotations

import math
from typing import Any

from polyattn._base.arrays import Array
from polyattn._core.call.problem import Problem
from polyattn._core.tiles.grouped_heads import fold_heads, unfold_heads
from polyattn.plugin import Backend


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
    seen = fold_heads(problem, scores, xp) != -math.inf
    return unfold_heads(problem, visible_product(problem, backend, weights, seen, value), xp)


def visible_product(
    problem: Problem, backend: Backend, weights: Array, seen: Array, x: Array
) -> Array:
    """Return weights · x, to which x adds nothing where it is not seen.

    Weights (..., m, n) are 0 where the bool array `seen` (..., m, n) is False; x is (..., n, k).
    """
    xp = backend.xp
    if not problem.masks:
        return backend.matmul(weights, x)
    if not problem.transforms and backend.is_eager(x):
        # An entry that is not finite spoils its column in every row, even with weight 0.
        plain = backend.matmul(weights, x)
        if bool(xp.all(xp.isfinite(plain))):
            return plain
    return backend.visible_product(weights, seen, x)
