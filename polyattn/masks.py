"""Which keys a row may see by position, and what that makes of a tile.

The band of a row at position p = i + query_offset is p − left <= j <= p + right; causal is a right
end of 0. Everything here speaks of positions alone: arrays and functions given as a mask are the
kernel's to apply.
"""

from __future__ import annotations

from typing import Any

from polyattn.arrays import Array
from polyattn.problem import Problem

__all__ = ["band", "column_range", "in_band", "is_full"]


def band(problem: Problem) -> tuple[int | None, int | None]:
    """Return the ends (left, right) of the band that causal and window leave together."""
    left, right = problem.window
    return left, 0 if problem.is_causal else right


def in_band(problem: Problem, rows: Array, columns: Array, offset: int | Array) -> Array | None:
    """Return which keys are in the band, as a bool array, or None where all of them are.

    Parameters
    ----------
    problem : Problem
        The facts of the call.
    rows, columns : Array
        Indices of query rows, shape (l, 1), and of keys, shape (s,).
    offset : int or Array
        The query offset; an array has the shape (..., 1, 1, 1).

    Returns
    -------
    Array or None
        Broadcasts to (..., H, l, s).
    """
    left, right = band(problem)
    position = rows + offset
    seen: Any = None
    if right is not None:
        seen = columns <= position + right
    if left is not None:
        recent = columns >= position - left
        seen = recent if seen is None else seen & recent
    return seen


def column_range(problem: Problem, rows: range) -> range:
    """Return the keys outside which no row of `rows` sees any."""
    left, right = band(problem)
    start, stop, offset = 0, problem.key_length, problem.query_offset
    if offset is not None and left is not None:
        start = max(start, rows[0] + offset - left)
    if offset is not None and right is not None:
        stop = min(stop, rows[-1] + offset + right + 1)
    return range(start, max(start, stop))


def is_full(problem: Problem, rows: range, columns: range) -> bool:
    """Say whether causal and window hide nothing of a tile.

    Parameters
    ----------
    problem : Problem
        The facts of the call.
    rows, columns : range
        The query rows and the keys of the tile.

    Returns
    -------
    bool
        False also where an array gives the query offset, so that it cannot be known.
    """
    left, right = band(problem)
    if (left is None and right is None) or not rows or not columns:
        return True
    offset = problem.query_offset
    if offset is None:
        return False
    return (right is None or columns[-1] <= rows[0] + offset + right) and (
        left is None or columns[0] >= rows[-1] + offset - left
    )
