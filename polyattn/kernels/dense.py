"""Attention by its formula, one step a line. Every other kernel must equal it.

The letters are those of the semantics: query (..., H, L, D), key (..., G, S, D), value
(..., G, S, E), scores (..., H, L, S). Comments give the steps of its formula.
"""

from __future__ import annotations

import math

from polyattn.arrays import Array, cast, with_rank
from polyattn.call.features import FEATURES
from polyattn.call.gradients import Gradients
from polyattn.call.operands import Cotangents, Operands, Residuals, Tangents
from polyattn.call.problem import Problem
from polyattn.kernels.backward import gradients
from polyattn.kernels.jvp import pushforward
from polyattn.kernels.masked_sum import hide, weighted_sum
from polyattn.kernels.unknown_lengths import reasons_against_lengths
from polyattn.plugin import Backend, Kernel
from polyattn.span import Span
from polyattn.tiles.grouped_heads import scaled, unfold_heads, ungrouped
from polyattn.tiles.indices import Indices
from polyattn.tiles.online_softmax import SoftmaxState, combine, initial_state, normalize

__all__ = ["Dense", "attend", "scores"]


class Dense(Kernel):
    """The formula over all rows and keys at once, with memory for L × S scores."""

    name = "dense"
    features = frozenset(FEATURES)

    def reasons_against(self, problem: Problem) -> list[str]:
        """Return what cannot be computed of lengths that are unknown."""
        return reasons_against_lengths(problem)

    def __call__(
        self, problem: Problem, operands: Operands, backend: Backend
    ) -> tuple[Array, Array | None]:
        """Return the output, and the logsumexp if the problem asks for it."""
        if problem.is_symbolic:
            problem, operands = ungrouped(problem, operands, backend.xp)
        x, rows, columns = operands, Span(0, problem.query_length), Span(0, problem.key_length)
        if 0 in problem.scores:
            state = initial_state(problem, x, backend.xp, rows)
        else:
            query = scaled(problem, x.query, backend.xp)
            state = attend(problem, x, backend, query, rows, columns)  # 1 to 5, 7, 9
            if x.sinks is not None:
                state = combine(backend.xp, initial_state(problem, x, backend.xp, rows), state)  # 6
        return normalize(problem, state, x.query.dtype, backend.xp)  # 7, the division

    def backward(
        self, problem: Problem, operands: Operands, residuals: Residuals, cotangents: Cotangents,
        backend: Backend,
    ) -> Gradients:  # fmt: skip
        """Return the gradients."""
        return gradients(problem, operands, residuals, cotangents, backend, *_whole(problem))

    def jvp(
        self, problem: Problem, operands: Operands, residuals: Residuals, tangents: Tangents,
        backend: Backend,
    ) -> tuple[Array, Array]:  # fmt: skip
        """Return the tangents of output and logsumexp."""
        return pushforward(problem, operands, residuals, tangents, backend, *_whole(problem))


def _whole(problem: Problem) -> tuple[int, int]:
    return max(1, problem.query_length), max(1, problem.key_length)


def scores(
    problem: Problem,
    x: Operands,
    backend: Backend,
    query: Array,
    at: Indices,
    columns: Span,
    *,
    masked: bool = True,
) -> Array:
    """Return the scores of a tile, −inf where a key is absent: steps 1 to 5.

    Parameters
    ----------
    problem, x, backend
        The arguments of a kernel.
    query : Array
        The result of `scaled` for the tile's query rows.
    at : Indices
        The indices of the tile.
    columns : Span
        Its keys.
    masked : bool
        Whether causal, window and mask may hide a key of the tile.
    """
    xp = backend.xp
    key = cast(xp, x.key[..., columns.start : columns.stop, :], query.dtype)
    if x.similarity is None:
        s = backend.matmul(query, xp.matrix_transpose(key))  # 1: scale · q·k
        s = unfold_heads(problem, s, xp)
    else:
        key = with_rank(key, len(query.shape))
        s = x.similarity.between(query, key, backend)
        s = problem.scale * unfold_heads(problem, s, xp)
    hidden = list(at.visible()) if masked else []
    if problem.score_norm is not None:
        s = problem.score_norm.apply(s, hidden, xp)
    if problem.softcap is not None:
        s = problem.softcap * xp.tanh(s / problem.softcap)  # 2
    s = at.modified(s)  # 3
    if x.bias is not None:
        bias = cast(xp, at.of_scores(x.bias), s.dtype)
        s = hide(xp, s + bias, bias != -math.inf)  # 4
    for seen in hidden:
        s = hide(xp, s, seen)  # 5
    return s


def attend(
    problem: Problem,
    x: Operands,
    backend: Backend,
    query: Array,
    rows: Span,
    columns: Span,
    *,
    masked: bool = True,
) -> SoftmaxState:
    """Return attention of the rows of `rows` to the keys of `columns`, before the division.

    Parameters
    ----------
    problem, x, backend, query, columns, masked
        As for `scores`.
    rows : Span
        The query rows.

    Returns
    -------
    SoftmaxState
        The weighted sum of values, and the maximum and sum of the weights.
    """
    xp = backend.xp
    at = Indices(problem, xp, x, rows, columns)
    s = scores(problem, x, backend, query, at, columns, masked=masked)  # 1 to 5
    if problem.normalizer is None:
        weights, maximum, total = backend.softmax(s)  # 7
    else:
        weights = problem.normalizer.weights(s, backend)
        total = xp.ones_like(s[..., :1])
        maximum = xp.zeros_like(total)
    if problem.dropout:
        weights = xp.where(
            at.keep_mask(), weights / (1 - problem.dropout), xp.zeros_like(weights)
        )  # 8
    value = cast(xp, x.value[..., columns.start : columns.stop, :], query.dtype)
    output = weighted_sum(problem, backend, weights, s, value)  # 9
    return SoftmaxState(output, maximum, total)
