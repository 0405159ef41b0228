"""Score expressions that are a factor and numbers by distance: what the compiled library computes.

A number by distance is a bias whose rows lie one number apart: row i and key j read the number of
j - i. So it takes memory for L + S numbers a head.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from polyattn.plugin import Operands, PointIndices, Problem
from polyattn_native.arrays import offsets_of
from polyattn_native.visible import kind_of

# Where positions end: farther ones count as this.
LIMIT = 2**30


def parts_of(expression: Any) -> list[Any]:
    """Return the modifications of an expression, in order."""
    if expression is None:
        return []
    return list(getattr(expression, "parts", (expression,)))


def is_supported(problem: Problem) -> bool:
    """Return whether a score expression is a temperature and then numbers that are added."""
    kinds = [kind_of(part) for part in parts_of(problem.score_spec)]
    while kinds and kinds[0] == "temperature" and problem.softcap is None:
        del kinds[0]
    return all(kind in ("alibi", "relative_bias") for kind in kinds)


def scale_and_rest(problem: Problem, x: Operands) -> tuple[float, list[Any]]:
    """Return the factor of the scores and the modifications that add numbers."""
    scale, rest = problem.scale, parts_of(x.score_mod)
    while rest and kind_of(rest[0]) == "temperature":
        scale /= rest.pop(0).t
    return scale, rest


def by_distance(problem: Problem, x: Operands, rest: list[Any]) -> tuple[Any, Any]:
    """Return what modifications add by the distance of a key from its row, (H, n).

    Row i and key j of an item read the number at start + j - i, of the second result, (items,).
    """
    rows, keys, dtype = problem.query_length, problem.key_length, np.dtype(problem.accumulator)
    offsets = np.full(math.prod(problem.batch), np.clip(offsets_of(problem, x), -LIMIT, LIMIT))
    first, size = -offsets - (rows - 1), rows + keys - 1  # the first distance of each item
    if np.ptp(first) < len(first) * size:
        away = np.arange(first.min(), first.max() + size)
        starts = first - first.min()
    else:  # far apart: each item has numbers of its own
        away = (first[:, None] + np.arange(size)).reshape(-1)
        starts = np.arange(len(first)) * size
    head = np.arange(problem.heads).reshape(-1, 1, 1)
    zero = np.zeros((1, 1, 1), np.int64)
    at = PointIndices(zero, head, zero, away[None, None, :])
    numbers = np.zeros((problem.heads, 1, len(away)), dtype)
    for part in rest:
        numbers = part.apply(numbers, at)
    return np.ascontiguousarray(numbers[:, 0, :], dtype), starts + (rows - 1)
