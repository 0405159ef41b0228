"""The weights as an array, for inspection, computed one block of rows at a time.

Memory is needed for the result and for a few arrays of one block of rows.
"""

from __future__ import annotations

import functools
import math
import operator
from dataclasses import dataclass
from typing import Any, ClassVar

from polyattn._base.arrays import Array, cast, index_range, with_rank
from polyattn._base.span import Span
from polyattn._core.call.operands import Operands
from polyattn._core.call.problem import Problem
from polyattn._core.tiles.axes import part_of, scaled, ungrouped
from polyattn._core.tiles.indices import Indices
from polyattn._core.tiles.online_softmax import (
    SoftmaxState,
    combine,
    initial_state,
    normalize,
    or_zero,
)
from polyattn._kernels.dense import COMPUTED, dropped, reasons_against_lengths, scores
from polyattn._kernels.tiled import Tiled, most_scores, widened
from polyattn.plugin import Backend, Kernel

#: Up to so many largest weights, one maximum after another takes less time on NumPy.
MOST_MAXIMA = 16


@dataclass(frozen=True)
class Weights(Kernel):
    """The weight of each key for each row."""

    name: ClassVar[str] = "weights"
    features = COMPUTED

    # The rows and heads to return, in order; None for all, empty where the call has none.
    rows: tuple[Span, ...] | None = None
    heads: tuple[Span, ...] | None = None
    top: int | None = None  # only so many largest weights of each row, with their keys
    per_key: bool = False  # only the sums over the rows

    tile = Tiled.tile

    def reasons_against(self, problem: Problem) -> list[str]:
        """Return why the call needs known lengths, if it does."""
        return reasons_against_lengths(problem)

    def weights(
        self, problem: Problem, operands: Operands, logsumexp: Array | None, backend: Backend
    ) -> tuple[Array, Array | None]:
        """Return the weights (..., H, L, S) or their sums; with `top`, the keys as well."""
        if problem.is_symbolic:
            problem, operands = ungrouped(problem, operands, backend.xp)
        operands = widened(problem, operands, backend.xp)
        if not self.heads:
            return self._of(problem, operands, logsumexp, backend, None)
        one_head = problem._replace(heads=1, key_heads=1)
        of_heads = []
        for head in (head for span in self.heads for head in range(*span)):
            group = head // problem.group_size
            x = operands._replace(
                query=operands.query[..., head : head + 1, :, :],
                key=operands.key[..., group : group + 1, :, :],
                sinks=None if operands.sinks is None else operands.sinks[head : head + 1],
            )
            of_heads.append(self._of(one_head, x, logsumexp, backend, Span(head, head + 1)))
        axis = -2 if self.per_key else -3
        return _joined(backend.xp, of_heads, axis)

    def _of(
        self, problem: Problem, x: Operands, logsumexp: Array | None, backend: Backend,
        heads: Span | None,
    ) -> tuple[Array, Array | None]:  # fmt: skip
        xp: Any = backend.xp
        spans = self.rows or (Span(0, problem.query_length),)
        count = sum([span.length for span in spans]) if self.rows else problem.query_length
        if 0 in problem.scores:
            kept = problem.key_length if self.top is None else self.top
            nothing = _nothing(problem._replace(value_size=kept), x, xp, count)
            if self.top is not None:
                return nothing, xp.astype(nothing, index_range(xp, 0, 1, nothing).dtype)
            return self._look(nothing, backend)
        blocks = spans
        if not problem.is_symbolic:
            row = math.prod(problem.batch) * problem.heads * problem.key_length
            size = max(1, most_scores(problem, self.tile) // row)
            blocks = tuple([block for span in spans for block in span.split(size)])
        weighed = (
            self._look(weigh(problem, x, logsumexp, backend, rows, heads), backend)
            for rows in blocks
        )
        if self.per_key:
            return functools.reduce(operator.add, [sums for sums, _ in weighed]), None
        if self.top is not None:
            return _joined(xp, list(weighed), -2)
        # Allocated first where arrays can be written to, so that too large a result fails at once.
        whole = problem._replace(
            query_length=count, value_size=problem.key_length, features=frozenset()
        )
        like = cast(xp, x.query[..., :0, :], getattr(xp, problem.accumulator))
        return backend.stack_rows(whole, like, weighed)

    def _look(self, weights: Array, backend: Backend) -> tuple[Array, Array | None]:
        """Reduce the weights of a block of rows to the part that the caller wants."""
        xp: Any = backend.xp
        if self.per_key:
            return xp.sum(weights, axis=-2), None
        if self.top is None:
            return weights, None
        keys = _largest(backend, weights, self.top)
        return xp.take_along_axis(weights, keys, axis=-1), keys


def _largest(backend: Backend, weights: Array, count: int) -> Array:
    """Return the keys of the largest weights of each row; of equal ones the first."""
    xp: Any = backend.xp
    if count > MOST_MAXIMA:
        numbers = xp.where(xp.isnan(weights), math.inf, weights)
        keys = backend.largest(numbers, count)
        numbers = -xp.take_along_axis(numbers, keys, axis=-1)  # NumPy sorts in ascending order
        order = xp.argsort(numbers, axis=-1, stable=True)
        return xp.take_along_axis(keys, order, axis=-1)
    columns = with_rank(index_range(xp, 0, weights.shape[-1], weights), len(weights.shape))
    keys = [xp.argmax(weights, axis=-1, keepdims=True)]
    for _ in range(count - 1):
        weights = xp.where(columns == keys[-1], -math.inf, weights)
        keys.append(xp.argmax(weights, axis=-1, keepdims=True))
    return xp.concat(keys, axis=-1)


def _nothing(problem: Problem, x: Operands, xp: Any, rows: int) -> Array:
    """Return E weights of each row of a call without rows, keys, heads or items: an empty array."""
    empty = initial_state(problem, x._replace(sinks=None), xp, Span(0, rows)).output
    return empty + 0  # a new array, because a broadcast view may be read-only


def _joined(
    xp: Any, parts: list[tuple[Array, Array | None]], axis: int
) -> tuple[Array, Array | None]:
    if len(parts) == 1:
        return parts[0]
    weights, keys = zip(*parts, strict=True)
    return xp.concat(weights, axis=axis), None if keys[0] is None else xp.concat(keys, axis=axis)


def weigh(
    problem: Problem, x: Operands, logsumexp: Array | None, backend: Backend, rows: Span,
    heads: Span | None,
) -> Array:  # fmt: skip
    """Return the weights of some rows, (..., H, l, S), 0 where a key is absent."""
    xp, columns = backend.xp, Span(0, problem.key_length)
    query = scaled(problem, x.query[..., rows.start : rows.stop, :], xp)
    at = Indices(problem, xp, x, rows, columns, heads=heads)
    key = part_of(problem, x.key, columns, xp)
    s = scores(problem, x, backend, query, key, at).final
    if problem.normalizer is not None:
        weights = problem.normalizer.weights(s, backend)
    elif logsumexp is not None:
        known = cast(xp, at.of_scores(logsumexp[..., None]), s.dtype)
        weights = xp.exp(s - or_zero(xp, known))  # if it is −inf, so are all scores
    else:
        state = SoftmaxState(*backend.softmax(s))
        if x.sinks is not None:
            of_sinks = problem._replace(value_size=problem.key_length)
            state = combine(xp, initial_state(of_sinks, x, xp, rows), state)
        weights, _ = normalize(problem, state, s.dtype, xp)
    return dropped(problem, at, weights)[0]
