"""The axes of operands: grouped heads by reshaping, and batch axes merged or cut.

Query head h reads key/value head h // (H // G), so folding (G, H/G, l) into (G, H/G · l) rows makes
one matrix product of a group, and keys and values are not repeated.
"""

from __future__ import annotations

import math
from typing import Any

from polyattn._base.arrays import Array, cast, numbers_like, with_rank
from polyattn._base.span import Span
from polyattn._core.call.operands import Operands
from polyattn._core.call.problem import Problem

# ---- heads ----


def ungrouped(problem: Problem, x: Operands, xp: Any) -> tuple[Problem, Operands]:
    """Give each query head its own copy of key and value: nothing is reshaped."""
    if problem.group_size == 1:
        return problem, x
    heads = [head // problem.group_size for head in range(problem.heads)]
    own = numbers_like(xp, heads, None, x.query)
    key, value = (
        None if array is None else xp.take(array, own, axis=-3) for array in (x.key, x.value)
    )
    return problem._replace(key_heads=problem.heads), x._replace(key=key, value=value)


def fold_heads(problem: Problem, array: Array, xp: Any) -> Array:
    """Turn (..., H, l, n) into (..., G, H/G · l, n)."""
    if problem.heads == problem.key_heads:
        return array
    *batch, heads, rows, size = array.shape
    groups, members = problem.key_heads, heads // problem.key_heads
    # In two steps: dask can do each of them, but not both at once.
    array = xp.reshape(array, (*batch, groups, members, rows, size))
    return xp.reshape(array, (*batch, groups, members * rows, size))


def unfold_heads(problem: Problem, array: Array, xp: Any) -> Array:
    """Turn (..., G, H/G · l, n) into (..., H, l, n)."""
    if problem.heads == problem.key_heads:
        return array
    *batch, groups, folded, size = array.shape
    members = problem.heads // groups
    array = xp.reshape(array, (*batch, groups, members, folded // members, size))
    return xp.reshape(array, (*batch, groups * members, folded // members, size))


def scaled(problem: Problem, query: Array, xp: Any) -> Array:
    """Turn a query (..., H, l, D) into scale · query, at least in float32, its heads folded.

    It has all batch axes of the call, so that the scores have them.
    """
    query = with_rank(query, len(problem.batch) + 3)
    query = cast(xp, query, getattr(xp, problem.accumulator))
    # Another similarity need not be linear in the query, so its result is scaled.
    return fold_heads(problem, query if problem.similarity_spec else query * problem.scale, xp)


# ---- batch axes, rows and keys ----


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
    """Cut (..., H, l, s) down to batch items, counted flat, all along the last batch axis."""
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
