"""Attention by its formula, one step a line. Every kernel must equal it.

The letters are those of the semantics: query (..., H, L, D), key (..., G, S, D), value
(..., G, S, E), scores (..., H, L, S). Comments give the steps of its formula. `key_lengths` have
become a mask and an offset before, and pages are gathered.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from polyattn._base.arrays import Array, cast, with_rank
from polyattn._base.span import Span
from polyattn._core.call.features import DERIVATIVES
from polyattn._core.call.operands import Operands
from polyattn._core.call.problem import Problem
from polyattn._core.tiles.axes import part_of, reason_against_batch, scaled, unfold_heads
from polyattn._core.tiles.indices import Indices
from polyattn._core.tiles.online_softmax import SoftmaxState, combine, initial_state, normalize
from polyattn._kernels.visible import compared, hide, weighted_sum, without_hidden
from polyattn.plugin import Backend

#: The features that the steps below compute: a new one is not among them before its step is.
COMPUTED = frozenset({
    "batch_broadcast", "bias", "causal", "dropout", "grouped_heads", "logsumexp", "mask",
    "mask_expression", "mask_mod", "normalizer", "query_offset", "query_offset_array", "scale",
    "score_expression", "score_mod", "score_norm", "similarity", "sinks", "softcap", "value_size",
    "window",
})  # fmt: skip


def attention(problem: Problem, x: Operands, backend: Backend) -> tuple[Array, Array | None]:
    """Return the output, and the logsumexp if the problem asks for it."""
    xp, rows, columns = backend.xp, Span(0, problem.query_length), Span(0, problem.key_length)
    if 0 in problem.scores:
        state = initial_state(problem, x, xp, rows)
    else:
        query = scaled(problem, x.query, xp)
        state = attend(problem, x, backend, query, rows, columns)  # 1 to 5, 7 to 9
        if x.sinks is not None:
            state = combine(xp, initial_state(problem, x, xp, rows), state)  # 6
    return normalize(problem, state, x.query.dtype, xp)  # 7, the division


class Scores(NamedTuple):
    """The scores of a tile (..., H, l, s) after the steps at which a derivative is taken."""

    similar: Array | None  # before the scale; None for q·k, whose scale is in the query
    product: Array  # 1
    normed: Array  # 1, over the norm of the row
    capped: Array  # 2
    final: Array  # 5, −inf where a key is absent
    visible: list[Array]  # a key takes part where all of these are True


def scores(
    problem: Problem,
    x: Operands,
    backend: Backend,
    query: Array,
    key: Array,
    at: Indices,
    *,
    masked: bool = True,
) -> Scores:
    """Return the scores of a tile: steps 1 to 5.

    The query is the result of `scaled` for the tile's rows, the key has its dtype. If not `masked`,
    causal, window and mask hide no key of the tile.
    """
    xp, similar = backend.xp, None

    def compare(query: Array, key: Array) -> Array:
        if x.similarity is None:
            return backend.matmul(query, xp.matrix_transpose(key))
        return x.similarity.between(query, with_rank(key, len(query.shape)), backend)

    product = unfold_heads(problem, compared(problem, backend, compare, query, key), xp)
    if x.similarity is not None:
        similar, product = product, problem.scale * product  # 1: scale · q·k
    visible = list(at.visible()) if masked else []
    normed = product
    if problem.score_norm is not None:
        normed = problem.score_norm.apply(product, visible, backend)

    def cap(s: Array) -> Array:
        return s if problem.softcap is None else problem.softcap * xp.tanh(s / problem.softcap)

    normed = without_hidden(problem, x, normed, at, visible, cap)
    capped = cap(normed)  # 2
    s = at.modified(capped)  # 3
    if x.bias is not None:
        bias = cast(xp, at.of_bias(x.bias), s.dtype)
        s = hide(xp, s + bias, bias != -math.inf)  # 4
    for seen in visible:
        s = hide(xp, s, seen)  # 5
    return Scores(similar, product, normed, capped, s, visible)


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
    """Return attention of some rows to some keys, before the division; see `scores`."""
    xp = backend.xp
    at = Indices.of_tile(problem, xp, x, rows, columns)
    key = part_of(problem, x.key, columns, xp)
    s = scores(problem, x, backend, query, key, at, masked=masked).final  # 1 to 5
    if problem.normalizer is None:
        weights, maximum, total = backend.softmax(s)  # 7
    else:
        weights = problem.normalizer.weights(s, backend)
        total = xp.ones_like(s[..., :1])
        maximum = xp.zeros_like(total)
    (weights,) = dropped(problem, at, weights)  # 8
    value = part_of(problem, x.value, columns, xp)
    output = weighted_sum(problem, backend, weights, s, value)  # 9
    return SoftmaxState(output, maximum, total)


def dropped(problem: Problem, at: Indices, *weights: Array) -> tuple[Array, ...]:
    """Return the weights of a tile, or their derivatives, after dropout: step 8."""
    if not problem.dropout:
        return weights
    xp, keep = at.xp, at.keep_mask()
    return tuple(
        [xp.where(keep, one / (1 - problem.dropout), xp.zeros_like(one)) for one in weights]
    )


def reasons_against_lengths(problem: Problem) -> list[str]:
    """Return why a call needs lengths that are known; none if they are."""
    if not problem.is_symbolic:
        return []
    reason = reason_against_batch(problem)
    if reason is not None:
        return [reason]
    names = ", ".join(sorted(problem.features & DERIVATIVES.keys()))
    return [f"it computes {names} only for known lengths"] if names else []
