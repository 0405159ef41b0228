"""Attention by its formula, one step a line: what every other kernel must equal.

The letters are those of the semantics: query (..., H, L, D), key (..., G, S, D), value
(..., G, S, E), scores (..., H, L, S). Comments give the steps of its formula.
"""

from __future__ import annotations

import math
from typing import Any

from polyattn.arrays import Array, cast
from polyattn.indices import Indices
from polyattn.kernels.absent import masked, weighted_sum
from polyattn.kernels.groups import fold, unfold
from polyattn.kernels.running import Running, finish, join, start
from polyattn.masks import Span
from polyattn.plugin import Backend, Kernel
from polyattn.problem import FEATURES, Operands, Problem

__all__ = ["Dense", "attend", "scaled"]


class Dense(Kernel):
    """The formula over all rows and keys at once, with memory for L × S scores."""

    name = "dense"
    features = frozenset(FEATURES) - {"dropout"}

    def __call__(
        self, problem: Problem, operands: Operands, backend: Backend
    ) -> tuple[Array, Array | None]:
        """Return the output, and the logsumexp if the problem asks for it."""
        x, rows, columns = operands, Span(0, problem.query_length), Span(0, problem.key_length)
        if 0 in problem.scores:
            running = start(problem, x, backend.xp, rows)
        else:
            query = scaled(problem, x.query, backend.xp)
            running = attend(problem, x, backend, query, rows, columns)  # 1 to 5, 7, 9
            if x.sinks is not None:
                running = join(backend.xp, start(problem, x, backend.xp, rows), running)  # 6
        return finish(problem, running, x.query.dtype, backend.xp)  # 7, the division


def scaled(problem: Problem, query: Array, xp: Any) -> Array:
    """Return scale · query, at least in float32, the heads of a group folded into its rows."""
    query = cast(xp, query, getattr(xp, problem.accumulator))
    return fold(problem, query * problem.scale, xp)


def attend(
    problem: Problem,
    x: Operands,
    backend: Backend,
    query: Array,
    rows: Span,
    columns: Span,
    *,
    banded: bool = True,
) -> Running:
    """Return what the keys of `columns` give the rows of `rows`, softmax not yet divided.

    Parameters
    ----------
    problem, x, backend
        As a kernel is given them.
    query : Array
        What `scaled` made of these rows of the query.
    rows, columns : Span
        Which query rows and which keys.
    banded : bool
        Whether causal and window may hide a key of these from a row of these.

    Returns
    -------
    Running
        The weighted sum of values, and the maximum and sum of the weights.
    """
    xp = backend.xp
    key = cast(xp, x.key[..., columns.start : columns.stop, :], query.dtype)
    value = cast(xp, x.value[..., columns.start : columns.stop, :], query.dtype)
    at = Indices(problem, xp, x.query, rows, columns)

    s = unfold(problem, backend.matmul(query, xp.matrix_transpose(key)), xp)  # 1: scale · q·k
    if problem.softcap is not None:
        s = problem.softcap * xp.tanh(s / problem.softcap)  # 2
    if x.score_mod is not None:
        s = at.modified(x.score_mod, s)  # 3
    if x.bias is not None:
        bias = cast(xp, at.cut(x.bias), s.dtype)
        s = masked(xp, s + bias, bias != -math.inf)  # 4
    for seen in at.visible(x, banded=banded):
        s = masked(xp, s, seen)  # 5

    weights, maximum, total = backend.softmax(s)  # 7
    output = weighted_sum(problem, backend, weights, s, value)  # 9
    return Running(output, maximum, total)
