"""Which keys a row may see by position, and what that makes of a tile.

Everything here speaks of positions only: a kernel applies arrays and functions given as a mask
itself. Ends are compared as Python numbers and clamped to where they can matter, so that no
library's integers overflow, however far a window or an offset reaches.
"""

from __future__ import annotations

from collections.abc import Callable

from polyattn.arrays import Array
from polyattn.call.problem import Problem
from polyattn.span import Span

__all__ = ["band", "column_span", "full_span", "in_band", "is_full"]


def band(problem: Problem) -> tuple[int | None, int | None]:
    """Return the ends (low, high) of the band: row i sees the keys i + low <= j <= i + high.

    Parameters
    ----------
    problem : Problem
        The facts of the call.

    Returns
    -------
    low, high : int or None
        None where an end hides nothing. Where an array gives the query offset, it is to be added.
    """
    left, right = problem.window
    right = 0 if problem.is_causal else right
    offset = problem.query_offset
    if offset is None:
        return None if left is None else -left, right
    low = None if left is None else min(offset - left, problem.key_length)
    high = None if right is None else max(offset + right, -problem.query_length)
    if low is not None and low + problem.query_length <= 1:
        low = None
    if high is not None and high + 1 >= problem.key_length:
        high = None
    return low, high


def in_band(
    problem: Problem, position: Callable[[int], Array], rows: Array, columns: Array
) -> Array | None:
    """Return which keys are in the band, as a bool array, or None where all of them are.

    Parameters
    ----------
    problem : Problem
        The facts of the call.
    position : callable
        Given a shift, where the rows stand among the keys, shifted; asked where an array gives the
        query offset.
    rows, columns : Array
        Indices of query rows, shape (l, 1), and of keys, shape (1, s).

    Returns
    -------
    Array or None
        Broadcasts to (..., H, l, s).
    """
    low, high = band(problem)

    def moved(shift: int) -> Array:
        return position(shift) if problem.query_offset is None else rows + shift

    after = None if high is None else columns <= moved(high)
    before = None if low is None else columns >= moved(low)
    if after is None or before is None:
        return before if after is None else after
    return after & before


def column_span(problem: Problem, rows: Span) -> Span:
    """Return the keys outside which no row of `rows` sees any.

    Parameters
    ----------
    problem : Problem
        The facts of the call.
    rows : Span
        Some query rows.

    Returns
    -------
    Span
        All keys where an array gives the query offset.
    """
    if problem.query_offset is None:
        return Span(0, problem.key_length)
    low, high = band(problem)
    start = 0 if low is None else min(max(0, rows.start + low), problem.key_length)
    stop = problem.key_length if high is None else min(problem.key_length, rows.stop + high)
    return Span(start, max(start, stop))


def full_span(problem: Problem, rows: Span) -> Span:
    """Return the keys of which causal and window hide none from any row of `rows`.

    Parameters
    ----------
    problem : Problem
        The facts of the call.
    rows : Span
        Some query rows.

    Returns
    -------
    Span
        Empty where a band's place is given by an array, so that it cannot be known.
    """
    low, high = band(problem)
    if low is None and high is None:
        return Span(0, problem.key_length)
    if problem.query_offset is None:
        return Span(0, 0)
    start = 0 if low is None else max(0, rows.stop - 1 + low)
    stop = problem.key_length
    if high is not None:
        stop = min(stop, rows.start + high + 1)
    return Span(start, max(start, stop))


def is_full(problem: Problem, rows: Span, columns: Span) -> bool:
    """Say whether causal and window hide nothing of a tile.

    Parameters
    ----------
    problem : Problem
        The facts of the call.
    rows, columns : Span
        The query rows and the keys of the tile.

    Returns
    -------
    bool
        False also where an array gives the query offset, so that it cannot be known.
    """
    low, high = band(problem)
    if low is None and high is None:
        return True
    if problem.query_offset is None:
        return False
    return (high is None or columns.stop - 1 <= rows.start + high) and (
        low is None or columns.start >= rows.stop - 1 + low
    )
