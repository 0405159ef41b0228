"""Heads folded into rows, and the state of the running softmax, as the core's own kernels have it.

Copies of what the plugin contract does not export yet, with the core's names and arguments.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from jax import lax

from polyattn.plugin import Array, Operands, Problem, Span

__all__ = ["SoftmaxState", "fold_heads", "initial_state", "normalize", "or_zero", "unfold_heads"]


class SoftmaxState(NamedTuple):
    """Σ w·v, max s and Σ w of each row, where w = exp(s − max s)."""

    output: Array  # (..., H, l, E)
    maximum: Array  # (..., H, l, 1)
    total: Array  # (..., H, l, 1)


def or_zero(xp: Any, maximum: Array) -> Array:
    """Return maximum, and 0 where it is −inf, so that a row without keys computes no NaN."""
    return xp.where(maximum == -math.inf, 0, maximum)


def fold_heads(problem: Problem, array: Array, xp: Any) -> Array:
    """Turn (..., H, l, n) into (..., G, H/G · l, n)."""
    *batch, heads, rows, size = array.shape
    groups, members = problem.key_heads, heads // problem.key_heads
    # In two steps, each of which JAX can do to an array that is sharded by heads.
    array = xp.reshape(array, (*batch, groups, members, rows, size))
    return xp.reshape(array, (*batch, groups, members * rows, size))


def unfold_heads(problem: Problem, array: Array, xp: Any) -> Array:
    """Turn (..., G, H/G · l, n) into (..., H, l, n)."""
    *batch, groups, folded, size = array.shape
    members = problem.heads // groups
    array = xp.reshape(array, (*batch, groups, members, folded // members, size))
    return xp.reshape(array, (*batch, problem.heads, folded // members, size))


def initial_state(problem: Problem, x: Operands, xp: Any, rows: Span) -> SoftmaxState:
    """Return the state before any key: empty, or the sink, a weight without a value."""
    dtype = problem.accumulator
    shape = (*problem.batch, problem.heads, rows.length)
    maximum = xp.full((*shape, 1), -math.inf, dtype)
    total = xp.zeros((*shape, 1), dtype)
    if x.sinks is not None:
        sinks = x.sinks.astype(dtype)[:, None, None]
        highest = lax.stop_gradient(sinks)
        maximum = xp.broadcast_to(highest, maximum.shape)
        total = xp.broadcast_to(xp.exp(sinks - or_zero(xp, highest)), total.shape)
    return SoftmaxState(xp.zeros((*shape, problem.value_size), dtype), maximum, total)


def normalize(
    problem: Problem, state: SoftmaxState, dtype: Any, xp: Any
) -> tuple[Array, Array | None]:
    """Divide, and return the output in `dtype` and the logsumexp if the problem asks for it."""
    empty = state.total == 0
    total = xp.where(empty, 1, state.total)
    output = (state.output / total).astype(dtype)
    if "logsumexp" not in problem.features:
        return output, None
    logsumexp = xp.where(empty, -math.inf, or_zero(xp, state.maximum) + xp.log(total))
    return output, logsumexp[..., 0]
