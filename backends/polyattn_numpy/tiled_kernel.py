"""Attention in NumPy as fast as a compiled kernel, with memory for a few tiles per thread.

A call is cut into tasks of rows and heads (`tiling`), which threads take in turn (`thread_pool`).
Each task is a pass over tiles (`forward_sweep`).
"""

from __future__ import annotations

import math
from functools import partial, reduce
from typing import Any, ClassVar

import numpy as np

from polyattn.plugin import (
    Array,
    Backend,
    Cotangents,
    Gradients,
    Kernel,
    Operands,
    Problem,
    Residuals,
)
from polyattn_numpy import thread_pool
from polyattn_numpy.at_once import fits_at_once, separates_items, write_at_once
from polyattn_numpy.backward import gradients
from polyattn_numpy.faults import faults_of
from polyattn_numpy.forward_sweep import Sweep
from polyattn_numpy.paged_sweep import PagedSweep
from polyattn_numpy.prepared import PreparedCall, prepare
from polyattn_numpy.scratch import Scratch, borrowed_scratch
from polyattn_numpy.softmax_sums import SoftmaxSums, combine
from polyattn_numpy.tiling import ThreadTask, is_tiny, split_heads, tasks, useful_threads

# OpenBLAS starts no threads for a product of so few multiply-adds. To limit them takes 1.2 to 1.3
# times as long with 32 tokens.
UNTHREADED = 2**18


class NumpyTiled(Kernel):
    """Tiles of the scores by BLAS, on threads."""

    name = "tiled"
    # Without normalizers and norms of scores, which need a whole row at once.
    features = frozenset({
        "batch_broadcast", "bias", "block_table", "causal", "dropout", "grouped_heads", "logsumexp",
        "mask", "mask_expression", "mask_mod", "query_offset", "query_offset_array", "scale",
        "score_expression", "score_mod", "similarity", "sinks", "softcap", "value_size", "window",
    })  # fmt: skip
    differentiates: ClassVar = {"backward": frozenset({
        "batch_broadcast", "bias", "causal", "dropout", "grouped_heads", "mask", "mask_expression",
        "mask_mod", "query_offset", "query_offset_array", "scale", "score_expression", "score_mod",
        "similarity", "sinks", "softcap", "value_size", "window",
    })}  # fmt: skip
    promises = Kernel.promises | {"batch_invariant"}
    tile = 2**18
    counts_far = frozenset({"causal", "window"})

    def only_on_request(self, problem: Problem) -> str | None:
        """Leave small calls to the kernels `small` and `dense`."""
        return "the problem is small: dense has less overhead" if is_tiny(problem) else None

    def remark(self, problem: Problem) -> str | None:
        """Name the faults of NumPy that the gradients of a problem would meet."""
        faults = "; ".join(map(str, faults_of(problem=problem)))
        return f"its gradients avoid a fault of {faults}" if faults else None

    def __call__(
        self, problem: Problem, operands: Operands, backend: Backend
    ) -> tuple[Array, Array | None]:
        output, logsumexp = empty_result(problem, operands.query.dtype)
        if 0 in problem.scores:
            output[...] = 0
            if logsumexp is not None:
                logsumexp[...] = -math.inf if operands.sinks is None else operands.sinks[:, None]
            return output, logsumexp
        count = useful_threads(problem, products=2)
        shared = thread_pool.Shared()
        call = prepare(problem, operands, self.tile, shared.check)
        result = ResultWriter(call, output, logsumexp)
        table, at_once = call.table, fits_at_once(call)
        share_items = not (at_once and separates_items(call))
        if table is not None:
            share_items = not table.differs_by_item
        cut = tasks(problem, self.tile, count, share_items=share_items)
        if table is not None:
            cut = tuple(sorted(cut, key=table.visible_cells, reverse=True))

        run = attend_at_once if at_once else attend

        def attend_to(task: ThreadTask) -> None:
            with borrowed_scratch() as scratch:
                run(call, result, task, scratch)

        if count == 1 and largest_product(problem) <= UNTHREADED:
            for task in cut:
                attend_to(task)
        else:
            thread_pool.each(attend_to, cut, count, shared)
        result.write_parts()
        return output, logsumexp

    def backward(
        self, problem: Problem, operands: Operands, residuals: Residuals, cotangents: Cotangents,
        backend: Backend,
    ) -> Gradients:  # fmt: skip
        return gradients(problem, operands, residuals, cotangents, self.tile)


def largest_product(problem: Problem) -> int:
    """Return the most multiply-adds of one product, with all rows and keys of a key head."""
    rows = problem.query_length * problem.group_size
    return rows * problem.key_length * max(problem.head_size, problem.value_size)


def empty_result(problem: Problem, dtype: Any) -> tuple[Array, Array | None]:
    """Return an uninitialized output, and a logsumexp if the problem asks for it."""
    output = np.empty((*problem.scores[:-1], problem.value_size), dtype)
    if "logsumexp" not in problem.features:
        return output, None
    return output, np.empty(problem.scores[:-1], problem.accumulator)


def attend_at_once(
    call: PreparedCall, result: ResultWriter, task: ThreadTask, scratch: Scratch
) -> None:
    """Compute a task by few calls, and a head that has an unreliable row by `attend`."""
    if write_at_once(call, result.output, result.logsumexp, task, scratch):
        return
    if task.head_count == 1:
        attend(call, result, task, scratch)
        return
    for head in task.single_heads():
        attend_at_once(call, result, head, scratch)


def attend(call: PreparedCall, result: ResultWriter, task: ThreadTask, scratch: Scratch) -> None:
    """Compute a task by a fast pass, and its unreliable rows by the slower kinds."""
    similarity = call.problem.similarity_spec
    sweep_of = Sweep if call.pages is None else PagedSweep
    if similarity is not None and similarity.entrywise:
        # Beside such scores maxima cost little, and distances are often too large without them.
        result.write(task, sweep_of(call, task, scratch, "stable").run())
        return
    sweep = sweep_of(call, task, scratch)
    state = sweep.run()
    reliable = sweep.reliable_rows(state)
    if reliable is not True and task.head_count > 1:
        for head in task.single_heads():
            attend(call, result, head, scratch)
        return
    if reliable is not True and not sweep.inputs_are_finite():
        sweep = sweep_of(call, task, scratch, "poison_safe")
        state = sweep.run()
        reliable = sweep.reliable_rows(state)
    if not np.all(reliable):
        # A copy, because the next pass writes to the same scratch arrays.
        copy = [np.array(array) for array in state]
        stable = sweep_of(call, task, scratch, "stable").run()
        state = SoftmaxSums(*map(partial(np.where, reliable), copy, stable))
    result.write(task, state)


class ResultWriter:
    """The output and logsumexp that tasks are written to."""

    def __init__(self, call: PreparedCall, output: Array, logsumexp: Array | None) -> None:
        self.call, problem = call, call.problem
        self.keep_probability = 1 - problem.dropout
        self.output = split_heads(problem, output)
        self.logsumexp = None
        if logsumexp is not None:
            self.logsumexp = split_heads(problem, logsumexp[..., None])
        self.parts: dict[ThreadTask, SoftmaxSums] = {}

    def write(self, task: ThreadTask, state: SoftmaxSums) -> None:
        """Divide and write the sums of a task, or hold them if it has only a part of the keys."""
        if task.parts > 1:
            # Copies, because the next task writes to the same scratch arrays.
            self.parts[task] = SoftmaxSums(*map(np.array, state))
            return
        output = task.view(self.output, None, task.rows).swapaxes(-2, -3)
        if self.logsumexp is not None:
            rows = task.view(self.logsumexp, None, task.rows).swapaxes(-2, -3)
            logsumexp = np.log(state.total) + state.reference / state.total.dtype.type(
                self.call.exp_factor
            )
            rows[...] = logsumexp.reshape(rows.shape)
        total = state.total.reshape(*output.shape[:-1], 1)
        # The output of a row that sees no key is 0, not 0 / 0.
        np.copyto(total, 1, where=total == 0)
        if self.keep_probability != 1:
            total *= self.keep_probability
        weighted = state.output.reshape(output.shape)
        if output.dtype != total.dtype:
            np.divide(weighted, total, out=output, dtype=total.dtype, casting="unsafe")
        else:
            np.divide(weighted, total, out=output)

    def write_parts(self) -> None:
        """Combine the parts of the same rows, in the order of their keys, and write them."""
        rows: dict[ThreadTask, list[SoftmaxSums]] = {}
        for task in sorted(self.parts, key=lambda task: task.part):
            whole = task._replace(columns=task.rows, part=0, parts=1)
            rows.setdefault(whole, []).append(self.parts[task])
        for whole, states in rows.items():
            self.write(whole, reduce(partial(combine, self.call.exp), states))
