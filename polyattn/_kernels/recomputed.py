"""The scores and weights of a tile, computed again from the logsumexp, for derivatives.

The logsumexp may cover more keys than are given: then the weights are those among all keys.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from polyattn._base.arrays import Array, cast, with_rank
from polyattn._base.span import Span
from polyattn._core.call.operands import Operands
from polyattn._core.call.problem import Problem
from polyattn._core.tiles.axes import part_of, scaled
from polyattn._core.tiles.indices import Indices
from polyattn._kernels.dense import Scores, scores
from polyattn.plugin import Backend


class RowBlock(NamedTuple):
    """The arrays that the tiles of some rows share, in the accumulator's dtype."""

    rows: Span
    query: Array  # scale · query, or the query for another similarity, (..., G, H/G · l, D)
    logsumexp: Array | None  # 0 where it is −inf, (..., H, l, 1); None with another normalizer
    empty: Array | None  # where it is
    sink_weights: Array | None  # the weights of the sinks, (..., H, l, 1)

    @classmethod
    def of(
        cls, problem: Problem, x: Operands, known: Array | None, backend: Backend, rows: Span
    ) -> RowBlock:
        """Return those of a call whose logsumexp is known."""
        xp, sink_weights = backend.xp, None
        query = scaled(problem, x.query[..., rows.start : rows.stop, :], xp)
        if known is None:
            return cls(rows, query, None, None, None)
        logsumexp = part_of(problem, known[..., None], rows, xp)
        empty = logsumexp == -math.inf
        logsumexp = xp.where(empty, xp.zeros_like(logsumexp), logsumexp)
        if x.sinks is not None:
            sink_weights = xp.exp(per_head(xp, x.sinks, logsumexp) - logsumexp)
        return cls(rows, query, logsumexp, empty, sink_weights)


def per_head(xp: Any, numbers: Array, like: Array) -> Array:
    """Return the number of each query head, in the dtype and rank of an array (..., H, l, n)."""
    numbers = xp.reshape(cast(xp, numbers, like.dtype), (-1, 1, 1))
    return with_rank(numbers, len(like.shape))


class Scored(NamedTuple):
    """A tile of scores and its weights."""

    at: Indices
    columns: Span
    key: Array  # (..., G, s, D)
    scores: Scores  # 0 in place of an absent key, so that a derivative is finite there
    seen: Array  # whether the key is visible, (..., H, l, s)
    weights: Array  # before dropout, 0 where a key is absent, (..., H, l, s)


def score_tile(
    problem: Problem, x: Operands, backend: Backend, block: RowBlock, columns: Span, masked: bool
) -> Scored:
    """Return the scores of a tile and its weights, by the logsumexp that is known."""
    xp = backend.xp
    at = Indices.of_tile(problem, xp, x, block.rows, columns)
    key = part_of(problem, x.key, columns, xp)
    s = scores(problem, x, backend, block.query, key, at, masked=masked)
    if problem.normalizer is None:
        weights = xp.exp(s.final - block.logsumexp)
    else:
        weights = problem.normalizer.weights(s.final, backend)
    seen = s.final != -math.inf
    if problem.masks:
        zeros = xp.zeros_like(weights)
        weights = xp.where(seen, weights, zeros)
        used = {"similar": x.similarity, "normed": problem.softcap, "capped": x.score_mod}
        names = [name for name, step in used.items() if step is not None]
        s = s._replace(**{name: xp.where(seen, getattr(s, name), zeros) for name in names})
    return Scored(at, columns, key, s, seen, weights)
