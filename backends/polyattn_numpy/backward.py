"""The gradients of attention, in the tasks and tiles of the forward pass.

Tasks are computed in parallel, and add to the gradients of keys and values in a fixed order.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from polyattn.plugin import Array, Cotangents, Gradients, Operands, Problem, Residuals, sum_to
from polyattn_numpy import thread_pool
from polyattn_numpy.prepared import PreparedCall, prepare
from polyattn_numpy.scratch import Scratch, borrowed_scratch
from polyattn_numpy.sequencer import Ticket
from polyattn_numpy.shared_gradients import SharedGradients, adds_across_heads
from polyattn_numpy.tile_gradients import PartialGradients, TileGradients, TileOperands
from polyattn_numpy.tiling import ScoreTile, split_heads, tasks, useful_threads

# The logsumexp of a row that sees no key, in place of -inf: its weights, exp(-NOTHING), are 0.
NOTHING = 1e30
# Products of a tile: of the scores and the weights, and the gradients of query, key and value.
PRODUCTS = 5


def gradients(
    problem: Problem, x: Operands, residuals: Residuals, cotangents: Cotangents, tile: int
) -> Gradients:
    """Return the gradients of a call, computed in tiles of at most `tile` scores."""
    if 0 in problem.scores:
        return _without_scores(problem, x, residuals, cotangents)
    count = useful_threads(problem, PRODUCTS)
    shared = thread_pool.Shared()
    call = prepare(problem, x, tile, shared.check)
    share_items = call.table is None or not call.table.differs_by_item
    cut = tasks(problem, tile, count, share_items=share_items, products=PRODUCTS)
    if adds_across_heads(problem, x):
        # The order of a sum must not depend on which heads share a task.
        cut = tuple(one for task in cut for one in task.single_heads())
    sums = SharedGradients(problem, x, residuals.logsumexp, cut, shared.check)
    results = SplitResults.of(problem, residuals, cotangents)

    def add(number: int) -> None:
        with borrowed_scratch() as scratch:
            BackwardSweep(call, results, sums, number, scratch).run()

    thread_pool.each(add, range(len(cut)), count, shared)
    return sums.gradients()


def _without_scores(
    problem: Problem, x: Operands, residuals: Residuals, cotangents: Cotangents
) -> Gradients:
    """Return the gradients of a call without rows or keys: zero, but for the sinks."""
    sums = SharedGradients(problem, x, residuals.logsumexp, (), lambda: None)
    if sums.delta is not None and cotangents.logsumexp is not None:
        sums.delta -= np.reshape(cotangents.logsumexp, sums.delta.shape)
    return sums.gradients()


class SplitResults(NamedTuple):
    """The results of a call and their gradients, with the axes of `PreparedCall`."""

    output: Array
    logsumexp: Array
    output_gradient: Array
    logsumexp_gradient: Array | None

    @classmethod
    def of(cls, problem: Problem, residuals: Residuals, cotangents: Cotangents) -> SplitResults:
        """Return those of a call."""
        logsumexp: Any = residuals.logsumexp
        direct = cotangents.logsumexp
        return cls(
            output=split_heads(problem, residuals.output),
            logsumexp=split_heads(problem, logsumexp[..., None]),
            output_gradient=split_heads(problem, cotangents.output),
            logsumexp_gradient=None if direct is None else split_heads(problem, direct[..., None]),
        )


class BackwardSweep(TileGradients):
    """A pass over the tiles of a task, which adds to the gradients of a call."""

    def __init__(
        self,
        call: PreparedCall,
        results: SplitResults,
        sums: SharedGradients,
        number: int,
        scratch: Scratch,
    ) -> None:
        super().__init__(call, sums.cut[number], scratch)
        self.sums, self.number = sums, number
        self.ticket = Ticket(sums.order, number)
        self.key_gradient, self.value_gradient = map(self.task.view, (sums.key, sums.value))
        problem = self.problem
        self.query = self._per_row("query", problem.head_size)
        self.logsumexp = self._per_row("logsumexp", 1)
        self.output_gradient = self._per_row("output gradient", problem.value_size + 1)
        self._read(results)
        self.query_gradient = self._per_row("query gradient", problem.head_size)
        # Sums over the keys, for gradients of arrays that have no axis of keys.
        self.by_row = {name: self._per_row(name, 1) for name in ("bias", "scale", "softcap")}
        for total in (self.query_gradient, *self.by_row.values()):
            total.fill(0)

    def run(self) -> None:
        """Add all tiles, from the first key to the last."""
        steps = [
            tile._replace(columns=columns)
            for tile in self.visibility.tiles()
            for columns in tile.columns.split(tile.width)
        ]
        steps.sort(key=lambda tile: tile.columns.start)
        for tile in steps:
            self.call.check()
            self.ticket.reach(tile.columns.start)
            self._add(tile)
        self.ticket.reach(self.problem.key_length)
        self._end()
        self.ticket.reach(math.inf)

    # ---- rows ----

    def _rows_of(self, array: Array) -> Array:
        """Return the task's rows of an array, with the axes (b, k, row, g, size)."""
        return self.task.view(array, None, self.task.rows).swapaxes(2, 3)

    def _read(self, results: SplitResults) -> None:
        """Read the queries, and the results with their gradients."""
        self._by_head(self.logsumexp)[...] = self._rows_of(results.logsumexp)
        self.empty = self.logsumexp == -math.inf
        self.logsumexp *= self.dtype.type(self.exp_factor)
        self.logsumexp[self.empty] = NOTHING
        self._read_query(self.query_factor)
        gradient = self._by_head(self.output_gradient[..., :-1])
        gradient[...] = self._rows_of(results.output_gradient)
        output = self._rows_of(results.output).astype(self.dtype, copy=False)
        delta = np.einsum("bkrge,bkrge->bkrg", output, gradient)[..., None]
        if results.logsumexp_gradient is not None:
            delta -= self._rows_of(results.logsumexp_gradient)
        self._by_head(self.output_gradient[..., -1:])[...] = -delta
        if self.empty.any():
            np.copyto(self.output_gradient, 0, where=self.empty)
            np.copyto(delta, 0, where=self._by_head(self.empty))
        if self.sums.delta is not None:
            self._rows_of(self.sums.delta)[...] = delta
        if self.problem.dropout:
            gradient /= self.dtype.type(1 - self.problem.dropout)

    def _read_query(self, factor: Any) -> None:
        """Read the queries times a factor, 0 for rows that see no key."""
        np.multiply(self._rows_of(self.call.query), factor, out=self._by_head(self.query))
        if self.empty.any():
            np.copyto(self.query, 0, where=self.empty)

    def _end(self) -> None:
        """Add the sums of the rows to the gradients."""
        scale = self.by_row["scale"]
        if self.call.x.similarity is None:
            factor = self.query_factor
            if not factor:
                factor = self.dtype.type(1)
                self._read_query(factor)
            np.einsum("bkrd,bkrd->bkr", self.query_gradient, self.query, out=scale[..., 0])
            scale /= factor
            self.query_gradient *= self.factor
        scale *= self.dtype.type(self.per_scale)
        self.ticket.wait_for_rows()
        sums, by_row = self.sums, self.by_row
        for total, part in (
            (sums.query, self.query_gradient),
            (sums.scale, scale),
            (sums.softcap, by_row["softcap"]),
        ):
            if total is not None:
                self._rows_of(total)[...] += self._by_head(part)
        if sums.bias is not None and not self.ends_in_keys:
            target = self._rows_of(sums.bias)
            target += sum_to(np, self._by_head(by_row["bias"]), target.shape)

    # ---- tiles ----

    def _add(self, tile: ScoreTile) -> None:
        """Add what a tile gives to the gradients."""
        masks = self.visibility.masks(tile)
        if masks is None:
            return
        heads, (first, last) = self.task.relative(tile)
        where = (slice(None), heads, slice(first * self.group_size, last * self.group_size))
        span = slice(*tile.columns)
        step = TileOperands(
            tile=tile,
            masks=masks,
            where=where,
            query=self.query[where],
            logsumexp=self.logsumexp[where],
            output_gradient=self.output_gradient[where],
            key=self._block("keys", self.key[:, heads, span]),
            value=self._with_ones(self.value[:, heads, span]),
        )
        shares = self.shares(step)
        self._add_to_rows(step, shares)
        self.ticket.wait_for_keys(tile.columns)
        self._add_to_keys(step, shares)
        if shares.of_score or shares.of_similarity:
            self.sums.add_carried(self.number, shares.of_score, shares.of_similarity)

    def _with_ones(self, block: Array) -> Array:
        """Return a copy of values with a column of ones."""
        *axes, size = block.shape
        copy = self.scratch("values", (*axes, size + 1), self.dtype)
        copy[..., :-1] = block
        copy[..., -1] = 1
        return copy

    def _add_to_rows(self, step: TileOperands, shares: PartialGradients) -> None:
        """Add what a tile gives to the sums of the task's rows."""
        query = self.query_gradient[step.where]
        np.add(query, shares.query, query)
        bias = None if self.ends_in_keys else shares.bias
        for name, part in (("bias", bias), ("scale", shares.scale), ("softcap", shares.softcap)):
            if part is not None:
                self.by_row[name][step.where] += part

    def _add_to_keys(self, step: TileOperands, shares: PartialGradients) -> None:
        """Add what a tile gives to the gradients of its keys, values and bias."""
        columns = step.tile.columns
        where = (slice(None), step.where[1], slice(*columns))
        key, value = self.key_gradient[where], self.value_gradient[where]
        np.add(key, shares.key, key)
        np.add(value, shares.value, value)
        if self.ends_in_keys:
            task = self.task._replace(heads=step.tile.heads)
            target = task.view(self.sums.bias, None, step.tile.rows, columns).swapaxes(2, 3)
            target += shares.bias
