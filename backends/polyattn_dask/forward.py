"""Attention on dask arrays: a fold over the visible chunks of keys, and a tree of merges.

The graph of a causal call with 2 chunks of query rows, q0 and q1, and 3 chunks of keys and values.
The rows of q0 do not see k2. A task reads a group of chunks of keys, here two at most::

    q0 [k0 k1] [v0 v1] ─ AttendStep("output") ─────────────────────────── output 0

    q1 [k0 k1] [v0 v1] ─ AttendStep("partial") ─ ("fold", 0, 1, 0) ─┐
                                                                    JoinStep("output") ─ output 1
    q1 [k2]    [v2]    ─ AttendStep("partial") ─ ("fold", 0, 1, 1) ─┘

A key of the graph has the numbers of the head chunk, the row chunk and the group. Where a row has
more groups than one task may join, `Layer.tree` puts further JoinSteps ("join", …) between. With a
logsumexp the last task gives both results, and one `itemgetter` for each array takes it apart.

The steps are in `worker_steps`, what they read in `cut`, and how chunks are grouped in `sizes`.
"""

from __future__ import annotations

import operator

from polyattn.plugin import Array, Operands, Problem
from polyattn_dask.cut import Cut, cut
from polyattn_dask.grid import Index
from polyattn_dask.layer import Layer, Task
from polyattn_dask.sizes import partial_bytes
from polyattn_dask.worker_steps import AttendStep, JoinStep


def attend(problem: Problem, x: Operands) -> tuple[Array, Array | None]:
    """Return output and logsumexp, as dask arrays."""
    call = cut(problem, x)
    both = "logsumexp" in problem.features
    layer = call.layer("attention")
    tasks = {
        at.where: block_of_rows(call, layer, at, "both" if both else "output")
        for at in call.grid.row_blocks()
    }
    dtype, chunks = x.query.dtype, (*call.row_chunks, (problem.value_size,))
    if not both:
        last = {(*where, 0): task for where, task in tasks.items()}
        return layer.array("output", chunks, dtype, last), None
    keys = {where: layer.add(("both", *where), *task) for where, task in tasks.items()}
    outputs = {(*where, 0): (operator.itemgetter(0), key) for where, key in keys.items()}
    sums = {where: (operator.itemgetter(1), key) for where, key in keys.items()}
    return (
        layer.array("output", chunks, dtype, outputs),
        layer.array("logsumexp", call.row_chunks, problem.accumulator, sums),
    )


def block_of_rows(call: Cut, layer: Layer, at: Index, result: str) -> Task:
    """Add the tasks of a block of rows, and return the last one."""
    problem, groups = call.problem, call.groups(at)

    def task(columns: list[int], result: str, sinks: bool = True) -> Task:
        calls = call.calls(at, columns, sinks)
        step = AttendStep(calls, result, problem.dtype, problem.accumulator)
        return call.task(at, columns, step)

    if len(groups) <= 1:
        return task(groups[0] if groups else [], result)
    keys = [
        layer.add(("fold", *at.where, n), *task(group, "partial", n == 0))
        for n, group in enumerate(groups)
    ]
    size = partial_bytes(problem, call.grid, at)
    keys = layer.tree(("join", *at.where), keys, size, JoinStep("partial", problem.dtype))
    return (JoinStep(result, problem.dtype), keys)
