"""Grouped heads by reshaping: the query heads that share a key/value head become rows of it.

Query head h reads key/value head h // (H // G), so folding (G, H/G, l) into (G, H/G · l) rows makes
one matrix product of a group, and keys and values are not repeated.
"""

from __future__ import annotations

from typing import Any

from polyattn._base.arrays import Array, cast, numbers_like, with_rank
from polyattn._core.call.operands import Operands
from polyattn._core.call.problem import Problem


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
