"""Batch axes: merge them, for kernels that take one, and cut arrays down to some batch items."""

from __future__ import annotations

import math
from typing import Any

from polyattn._base.arrays import Array, cast
from polyattn._base.span import Span
from polyattn._core.call.problem import Problem


def reason_against_batch(problem: Problem) -> str | None:
    """Return why batch axes cannot be broadcast or merged, if one is of unknown length."""
    is_one = len(problem.batch) == 1 and "batch_broadcast" not in problem.features
    if None not in problem.batch or is_one:
        return None
    return "only one batch axis may be of unknown length, and then all arrays must have it"


def one_batch_axis(problem: Problem, array: Array, xp: Any) -> Array:
    """Return query, key, value or a mask with its batch axes broadcast and merged into one.

    A copy only if it is broadcast. A batch of unknown length is that of all arrays.
    """
    batch, shape = problem.batch, tuple(array.shape)
    if len(batch) == 1 and (batch[0] is None or shape[:-3] == batch):
        return array
    if not batch:
        return array[None, ...]
    return xp.reshape(
        xp.broadcast_to(array, (*batch, *shape[-3:])), (math.prod(batch), *shape[-3:])
    )


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
