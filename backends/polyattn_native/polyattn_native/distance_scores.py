"""Score expressions that are a factor and numbers by distance: what the compiled library computes.

A number by distance is a bias whose row stride is -1: row i and key j read the number of
j - i. So it takes memory for L + S numbers a head.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from polyattn.plugin import Array, Operands, PointIndices, Problem
from polyattn_native.arrays import QUIETLY, offsets_of
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


def scale_and_rest(problem: Problem, expression: Any) -> tuple[float, list[Any]]:
    """Return the factor of the scores and the modifications that add numbers."""
    scale, rest = problem.scale, parts_of(expression)
    while rest and kind_of(rest[0]) == "temperature":
        scale /= rest.pop(0).t
    return scale, rest


class Places(NamedTuple):
    """Where numbers by distance are: row i and key j of an item read the one at start + j - i."""

    starts: Array  # (items,)
    at: PointIndices
    is_shared: bool  # by the items


class ByDistance(NamedTuple):
    """Numbers that modifications add by the distance of a key from its row."""

    parts: list[Any]
    numbers: Array  # (H, n)
    places: Places

    def zeros(self) -> ByDistance:
        """Return numbers for gradients to be added to, for each item its own (items, H, n)."""
        if not self.places.is_shared:
            return self._replace(numbers=np.zeros_like(self.numbers)[None])
        items = len(self.places.starts)
        starts = self.places.starts + np.arange(items) * self.numbers.size
        numbers = np.zeros((items, *self.numbers.shape), self.numbers.dtype)
        return self._replace(numbers=numbers, places=self.places._replace(starts=starts))

    def pullback(self) -> list[Array]:
        """Return the gradients of the arrays of the modifications, if the numbers are gradients."""
        of_row = self.numbers.sum(axis=0)[:, None, :]
        return [
            one for part in self.parts for one in part.pullback(of_row, self.places.at, of_row)[1]
        ]


@QUIETLY
def by_distance(
    problem: Problem, x: Operands, rest: list[Any], places: Places | None = None
) -> ByDistance:
    """Return what modifications add by the distance of a key from its row."""
    places = _places(problem, x) if places is None else places
    length = places.at.column.shape[-1]
    numbers = np.zeros((problem.heads, 1, length), np.dtype(problem.accumulator))
    for part in rest:
        numbers = part.apply(numbers, places.at)
    numbers = np.ascontiguousarray(numbers[:, 0, :], problem.accumulator)
    return ByDistance(rest, numbers, places)


def _places(problem: Problem, x: Operands) -> Places:
    rows, keys = problem.query_length, problem.key_length
    offsets = np.full(math.prod(problem.batch), np.clip(offsets_of(problem, x), -LIMIT, LIMIT))
    first, size = -offsets - (rows - 1), rows + keys - 1  # the first distance of each item
    is_shared = bool(np.ptp(first) < size)
    if is_shared:
        away = np.arange(first.min(), first.max() + size)
        starts = first - first.min()
    else:  # far apart: each item has numbers of its own
        away = (first[:, None] + np.arange(size)).reshape(-1)
        starts = np.arange(len(first)) * size
    head = np.arange(problem.heads).reshape(-1, 1, 1)
    zero = np.zeros((1, 1, 1), np.int64)
    at = PointIndices(zero, head, zero, away[None, None, :])
    return Places(starts + (rows - 1), at, is_shared)
