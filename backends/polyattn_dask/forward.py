"""Attention on dask arrays: a fold over the visible chunks of keys, and a tree of merges."""

from __future__ import annotations

import operator
from typing import Any

from polyattn.plugin import Array, Operands, Problem
from polyattn_dask.cut import Cut, cut
from polyattn_dask.grid import Index
from polyattn_dask.layer import Layer
from polyattn_dask.sizes import partial_bytes
from polyattn_dask.tasks import Attend, Join, Unseeing


def attend(problem: Problem, x: Operands) -> tuple[Array, Array | None]:
    """Return output and logsumexp, as dask arrays."""
    call = cut(problem, x)
    both = "logsumexp" in problem.features
    layer = Layer("attention", call.inputs, problem, call.template)
    tasks = {
        (*at.items, at.head, at.row): block_of_rows(call, layer, at, "both" if both else "output")
        for at in call.grid.row_blocks()
    }
    query, chunks = call.arrays["query"][1], (*call.row_chunks, (problem.value_size,))
    if not both:
        last = {(*where, 0): task for where, task in tasks.items()}
        return layer.array("output", chunks, query.dtype, query, last), None
    keys = {where: layer.add(("both", *where), *task) for where, task in tasks.items()}
    outputs = {(*where, 0): (operator.itemgetter(0), key) for where, key in keys.items()}
    sums = {where: (operator.itemgetter(1), key) for where, key in keys.items()}
    return (
        layer.array("output", chunks, query.dtype, query, outputs),
        layer.array("logsumexp", call.row_chunks, problem.accumulator, query, sums),
    )


def block_of_rows(call: Cut, layer: Layer, at: Index, result: str) -> tuple[Any, ...]:
    """Add the tasks of a block of rows, and return the last one."""
    problem, groups, where = call.problem, call.groups(at), (*at.items, at.head, at.row)
    query, (dtype, joined) = call.block("query", at), (problem.dtype, problem.accumulator)
    if not groups:
        part = call.grid.part(problem, at, call.grid.columns[0])
        return (Unseeing(call.pieces(at, []), part, result), query, *call.sinks(at))
    if len(groups) == 1:
        step = Attend(call.pieces(at, groups[0]), result, dtype, joined)
        return (step, query, *call.blocks(at, groups[0]))
    keys = [
        layer.add(
            ("fold", *where, n),
            Attend(call.pieces(at, group, n == 0), "partial", dtype, joined),
            query,
            *call.blocks(at, group),
        )
        for n, group in enumerate(groups)
    ]
    size = partial_bytes(problem, call.grid, at)
    keys = layer.tree(("join", *where), keys, size, Join("partial", dtype))
    return (Join(result, dtype), keys)
