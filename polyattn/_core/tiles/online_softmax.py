"""The online softmax: the partial sums of each row over some keys, before the division.

`combine` is associative and commutative up to rounding, so the keys may be split in any way. The
sum is kept undivided, beside its maximum, and not as a logsumexp: at scores of 1e4 a float32
logsumexp has lost three digits of every weight.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from polyattn._base.arrays import Array, cast, index_range, with_rank
from polyattn._base.span import Span
from polyattn._core.call.operands import Operands
from polyattn._core.call.problem import Problem


class SoftmaxState(NamedTuple):
    """Σ w·v, max s and Σ w of each row, where w = exp(s − max s)."""

    output: Array  #: (..., H, l, E)
    maximum: Array  #: (..., H, l, 1)
    total: Array  #: (..., H, l, 1)


def or_zero(xp: Any, maximum: Array) -> Array:
    """Return the maximum, but 0 for −inf, so that a row without keys computes no inf − inf."""
    return xp.where(maximum == -math.inf, xp.zeros_like(maximum), maximum)


def initial_state(problem: Problem, x: Operands, xp: Any, rows: Span) -> SoftmaxState:
    """Return the state before any key: empty, or the sink, a weight of 1 without a value."""
    accumulator = getattr(xp, problem.accumulator)
    zero = cast(xp, index_range(xp, 0, 1, x.query), accumulator)
    if problem.requires_grad or 0 in problem.scores:
        # An empty sum keeps the arrays in the graph, so the gradients are 0 where no key is seen,
        # and a result without keys is on their device in JAX.
        for array in (x.query, x.key, x.key if x.value is None else x.value):
            zero = zero + xp.sum(cast(xp, array[..., :0, :], accumulator))
    if x.sinks is None:
        maximum, total = xp.full_like(zero, -math.inf), zero
    else:
        maximum = xp.reshape(cast(xp, x.sinks, accumulator), (problem.heads, 1, 1))
        total = cast(xp, maximum != -math.inf, accumulator)
    if problem.is_symbolic:  # `combine` broadcasts
        rank = len(problem.batch) + 3
        return SoftmaxState(*(with_rank(array, rank) for array in (zero, maximum, total)))
    output = (*problem.batch, problem.heads, rows.length, problem.value_size)
    row = (*problem.batch, problem.heads, rows.length, 1)
    return SoftmaxState(
        xp.broadcast_to(zero, output), xp.broadcast_to(maximum, row), xp.broadcast_to(total, row)
    )


def combine(xp: Any, one: SoftmaxState, other: SoftmaxState) -> SoftmaxState:
    """Return the state of two separate sets of keys together, for the same rows."""
    maximum = xp.maximum(one.maximum, other.maximum)
    shift = or_zero(xp, maximum)
    shrink_one, shrink_other = xp.exp(one.maximum - shift), xp.exp(other.maximum - shift)
    return SoftmaxState(
        one.output * shrink_one + other.output * shrink_other,
        maximum,
        one.total * shrink_one + other.total * shrink_other,
    )


def _divided(problem: Problem, output: Array, total: Array, xp: Any) -> Array:
    if not problem.may_be_differentiated or not problem.masks:
        return output / total
    # The gradient of the output of a row whose total is NaN must not reach values that it hides.
    lost = xp.isnan(total)
    return output / xp.where(lost, 1.0, total) + total * xp.where(lost, total, 0.0)


def normalize(
    problem: Problem, state: SoftmaxState, dtype: Any, xp: Any
) -> tuple[Array, Array | None]:
    """Return output, (..., H, l, E) in `dtype`, and logsumexp, (..., H, l), if it is asked for."""
    empty = state.total == 0
    total = xp.where(empty, xp.ones_like(state.total), state.total)
    output = cast(xp, _divided(problem, state.output, total, xp), dtype)
    if "logsumexp" not in problem.features:
        return output, None
    logsumexp = or_zero(xp, state.maximum) + xp.log(total)
    logsumexp = xp.where(empty, xp.full_like(logsumexp, -math.inf), logsumexp)
    shape = output.shape[:-1]
    if logsumexp.shape[:-1] != shape:  # value has batch axes that query and key lack
        # + 0 makes a new array, because a broadcast view may be read-only.
        logsumexp = xp.broadcast_to(logsumexp, (*shape, 1)) + 0.0
    return output, logsumexp[..., 0]
