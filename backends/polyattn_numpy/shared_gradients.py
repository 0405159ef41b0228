"""The gradients of a call, which tasks add to in a fixed order."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np

from polyattn.plugin import Array, Gradients, Operands, Problem, Span
from polyattn_numpy.sequencer import Sequencer
from polyattn_numpy.tiling import ThreadTask, split_heads


def adds_across_heads(problem: Problem, x: Operands) -> bool:
    """Return whether different heads or batch items add to the same number."""
    batch = problem.batch
    if any(array.shape[:-3] != batch for array in (x.query, x.key, x.value)):
        return True
    if x.bias is not None and x.bias.shape[:-2] != problem.scores[:-2]:
        return True
    return any(_arrays_in(rule) for rule in (x.score_mod, x.similarity))


class SharedGradients:
    """The gradients of a call, zero at first, in the accumulator's dtype."""

    # Views of them have the axes of `PreparedCall`: (outer..., batch, G, H/G, length, size).

    def __init__(
        self,
        problem: Problem,
        x: Operands,
        logsumexp: Array,
        cut: Sequence[ThreadTask],
        check: Callable[[], None],
    ) -> None:
        self.problem, self.x, self.cut, self._logsumexp = problem, x, cut, logsumexp
        dtype = self.dtype = np.dtype(problem.accumulator)
        lead = problem.batch or (1,)
        ndim = len(lead) + 3

        def view(array: Array) -> Array:
            return array.reshape((1,) * (ndim - array.ndim) + array.shape)

        self._whole = [np.zeros(array.shape, dtype) for array in (x.query, x.key, x.value)]
        query, self.key, self.value = map(view, self._whole)
        self.query = split_heads(problem, query)
        self.bias = None
        if x.bias is not None:
            self._whole_bias = np.zeros(x.bias.shape, dtype)
            self.bias = split_heads(problem, self._whole_bias)
        rows = (*lead, problem.heads, problem.query_length, 1)

        def by_row() -> Array:
            return split_heads(problem, np.zeros(rows, dtype))

        self.delta = None if x.sinks is None else by_row()
        self.scale = by_row()  # the gradient of the scale, by row
        self.softcap = None if problem.softcap is None else by_row()
        # The gradients of arrays in expressions, by task.
        self._of_score: list[list[Array]] = [[] for _ in cut]
        self._of_similarity: list[list[Array]] = [[] for _ in cut]
        self.order = Sequencer(cut, map(self._by_key, cut), map(self._by_row, cut), check)

    # ---- sums that tasks share ----

    def _by_key(self, task: ThreadTask) -> set[Hashable]:
        """Return the names of the sums to which a task adds tile by tile."""
        names: set[Hashable] = {_place(task, self.key), _place(task, self.value)}
        if self.bias is not None and self.bias.shape[-1] != 1:
            names.add(("bias", _place(task, self.bias, task.rows)))
        return names

    def _by_row(self, task: ThreadTask) -> set[Hashable]:
        """Return the names of the sums to which a task adds at its end."""
        names: set[Hashable] = {("query", _place(task, self.query, task.rows))}
        if self.bias is not None and self.bias.shape[-1] == 1:
            names.add(("bias", _place(task, self.bias, task.rows)))
        return names

    def add_carried(
        self, number: int, of_score: Sequence[Array], of_similarity: Sequence[Array]
    ) -> None:
        """Add to a task's gradients of the arrays in expressions."""
        for parts, shares in ((self._of_score, of_score), (self._of_similarity, of_similarity)):
            if parts[number]:
                for total, one in zip(parts[number], shares, strict=True):
                    total += one
            else:
                parts[number] += [np.array(one) for one in shares]

    # ---- the result ----

    def gradients(self) -> Gradients:
        """Return all gradients."""
        problem, x = self.problem, self.x
        scale, softcap = self.scale.sum(), None
        if self.softcap is not None:
            # Of c · tanh(s / c): tanh(s / c) less the gradient of s times s / c.
            softcap = self.softcap.sum() - scale * problem.scale / problem.softcap
        query, key, value = self._whole
        return Gradients(
            query=query,
            key=key,
            value=value,
            bias=None if self.bias is None else self._whole_bias,
            sinks=None if self.delta is None else self._of_sinks(self.delta),
            score_mod=self._of_arrays(x.score_mod, self._of_score),
            similarity=self._of_arrays(x.similarity, self._of_similarity),
            scale=np.asarray(scale, self.dtype),
            softcap=None if softcap is None else np.asarray(softcap, self.dtype),
        )

    def _of_sinks(self, delta: Array) -> Array:
        shape = (*(self.problem.batch or (1,)), self.problem.heads, self.problem.query_length)
        sinks = np.asarray(self.x.sinks, self.dtype)[:, None]
        logsumexp = np.asarray(self._logsumexp).reshape(shape)
        shift = np.where(logsumexp == -math.inf, 0, logsumexp)
        weights = np.exp(sinks - shift) * delta.reshape(shape)
        return -weights.sum(axis=(*range(weights.ndim - 2), -1))

    def _of_arrays(self, rule: Any, parts: Sequence[list[Array]]) -> list[Array]:
        """Return the gradients of the arrays in an expression, added in the order of tasks."""
        sums = [np.zeros(array.shape, self.dtype) for array in _arrays_in(rule)]
        for part in parts:
            for total, one in zip(sums, part, strict=False):
                total += one
        return sums


def _arrays_in(rule: Any) -> list[Array]:
    """Return the arrays in an expression, none in a function."""
    carried = rule.carried() if hasattr(rule, "carried") else []
    return [thing for _, thing in carried if hasattr(thing, "dtype")]


def _place(task: ThreadTask, array: Array, rows: Span | None = None) -> Hashable:
    """Return what distinguishes the part of an array that a task adds to."""
    outer = tuple(0 if n == 1 else i for i, n in zip(task.outer, array.shape, strict=False))
    spans = task.batch, task.heads
    lengths = array.shape[len(outer) :]
    ends = [None if n == 1 else span for span, n in zip(spans, lengths, strict=False)]
    return (*outer, *ends, None if rows is None or array.shape[-2] == 1 else rows)
