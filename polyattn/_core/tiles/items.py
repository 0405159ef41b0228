"""Cut an array down to some rows or keys, or to some batch items."""

from __future__ import annotations

from typing import Any

from polyattn._base.arrays import Array, cast
from polyattn._base.span import Span
from polyattn._core.call.problem import Problem


def part_of(problem: Problem, array: Array, span: Span, xp: Any) -> Array:
    """Return some rows or keys of an array (..., n, size), in the accumulator's dtype."""
    return cast(xp, array[..., span.start : span.stop, :], getattr(xp, problem.accumulator))


def cut_items(array: Array, batch: tuple[int, ...], items: Span) -> Array:
    """Cut (..., H, l, s) down to batch items, counted flat, which lie along the last batch axis."""
    lead = array.shape[:-3]
    if not lead:
        return array
    first = items.start
    at: list[int] = []
    for length in reversed(batch):
        first, place = divmod(first, length)
        at.insert(0, place)
    *outer, item = at[len(at) - len(lead) :]
    index = [0 if n == 1 else i for i, n in zip(outer, lead[:-1], strict=True)]
    kept = slice(0, 1) if lead[-1] == 1 else slice(item, item + items.length)
    return array[(*index, kept, ...)]
