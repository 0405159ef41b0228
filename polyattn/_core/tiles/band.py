"""The band of visible keys that causal and window leave, in Python numbers.

Masks given as arrays and functions are not considered here. Ends are clamped to the range where
they matter, so that no library's integers overflow, however far a window or an offset reaches.
"""

from __future__ import annotations

from polyattn._base.span import Span
from polyattn._core.call.problem import Problem
from polyattn._core.expressions.patterns import Band


def band(problem: Problem) -> tuple[int | None, int | None]:
    """Return the ends (low, high) of the band: row i sees the keys i + low <= j <= i + high.

    None where an end hides no key. Where the query offset is an array, add it.
    """
    whole, offset = problem.band, problem.query_offset
    if whole is None:
        return None, None
    left, right = whole.left, whole.right
    if offset is None:
        return None if left is None else -left, right
    if problem.is_symbolic:
        return None if left is None else offset - left, None if right is None else offset + right
    low = None if left is None else min(offset - left, problem.key_length)
    high = None if right is None else max(offset + right, -problem.query_length)
    if low is not None and low + problem.query_length <= 1:
        low = None
    if high is not None and high + 1 >= problem.key_length:
        high = None
    return low, high


def visible_band(problem: Problem) -> Band | None:
    """Return causal and window as a mask, less ends that hide nothing; None if no key is hidden."""
    whole = problem.band
    low, high = band(problem)
    if whole is None or (low is None and high is None):
        return None
    return Band(None if low is None else whole.left, None if high is None else whole.right)


def column_span(problem: Problem, rows: Span) -> Span:
    """Return the keys that some row may see: all keys where the query offset is an array."""
    if problem.query_offset is None:
        return Span(0, problem.key_length)
    low, high = band(problem)
    start = 0 if low is None else min(max(0, rows.start + low), problem.key_length)
    stop = problem.key_length if high is None else min(problem.key_length, rows.stop + high)
    return Span(start, max(start, stop))


def full_span(problem: Problem, rows: Span) -> Span:
    """Return the keys that causal and window show to every row; none if the offset is an array."""
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
    """Return whether causal and window hide no key of a tile; False if the offset is an array."""
    full = full_span(problem, rows)
    return columns.length == 0 or (full.start <= columns.start and columns.stop <= full.stop)
