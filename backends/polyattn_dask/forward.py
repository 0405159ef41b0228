"""Attention on dask arrays: a fold over the visible chunks of keys, and a tree of merges."""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import numpy as np

from polyattn.plugin import Array, Operands, Problem
from polyattn_dask.grid import Axes, Grid, Index, aligned, axes_of, grid_of, lengths_of
from polyattn_dask.layer import Layer, blocks_at, grouped, limit
from polyattn_dask.tasks import Attend, Join, Pieces, Unseeing
from polyattn_dask.template import Leaf, Template, template_of
from polyattn_dask.visibility import Visibility

__all__ = ["Cut", "attend", "cut", "partial_bytes"]

NARROW = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}


class Cut(NamedTuple):
    """A call on dask arrays that are cut as its grid is.

    Attributes
    ----------
    problem : Problem
        The facts of the call.
    grid : Grid
        The grid.
    seen : Visibility
        The chunks of keys of each block of rows.
    arrays : dict of str to (Axes, Array)
        Query, key, value and what else is shaped as they or the output are.
    template : Template
        The options.
    leaves : list of Leaf
        The arrays among the options.
    """

    problem: Problem
    grid: Grid
    seen: Visibility
    arrays: dict[str, tuple[Axes, Any]]
    template: Template
    leaves: list[Leaf]

    @property
    def inputs(self) -> list[Any]:
        """All arrays that tasks read."""
        return [*(array for _, array in self.arrays.values()), *(x.array for x in self.leaves)]

    def groups(self, at: Index) -> list[list[int]]:
        """Return the chunks of keys that a block of rows sees, by the tasks that read them."""
        seen = self.seen.of(at)
        if self.template.whole_rows:
            return [list(range(seen[0], seen[-1] + 1))] if seen else []
        return grouped(seen, key_bytes(self.problem, self.grid, at), limit())

    def pieces(self, at: Index, columns: list[int], sinks: bool) -> Pieces:
        """Return the calls of a task."""
        parts = [self.grid.part(self.problem, at, self.grid.columns[n]) for n in columns]
        along = [x.axes.index("S") - len(x.axes) if "S" in x.axes else None for x in self.leaves]
        sizes = self.problem.head_size, self.problem.value_size
        return Pieces(self.template, tuple(parts), tuple(along), sinks, sizes)

    def block(self, name: str, at: Index) -> Any:
        """Return the key of the block of query, or of what is shaped as the output is."""
        axes, array = self.arrays[name]
        return (array.name, *self.grid.place(axes, at))

    def blocks(self, at: Index, columns: list[int]) -> tuple[Any, Any, Any]:
        """Return the keys of the blocks of keys, values and leaves."""
        keys, values = (
            [self.block(name, at._replace(column=n)) for n in columns]
            if name in self.arrays
            else []
            for name in ("key", "value")
        )
        leaves = [blocks_at(x.array, x.axes, self.grid, at, columns) for x in self.leaves]
        return keys, values, leaves

    def sinks(self, at: Index) -> list[Any]:
        """Return the key of the block of the sinks, if there are some."""
        return [
            (x.array.name, *self.grid.place(x.axes, at)) for x in self.leaves if x.option == "sinks"
        ]


def cut(problem: Problem, x: Operands, grid: Grid | None = None) -> Cut:
    """Return a call, its arrays cut as a grid is, by default that of its own chunks."""
    names = [
        "query", "key", "value", "known_logsumexp", "output", "output_gradient",
        "logsumexp_gradient",
    ]  # fmt: skip
    given = {name: getattr(x, name) for name in names if getattr(x, name) is not None}
    if grid is None:
        grid = grid_of(problem, {name: given[name].chunks for name in names if name in given})
    arrays = {}
    for name, array in given.items():
        axes = axes_of(name, array.shape, len(problem.batch))
        arrays[name] = axes, aligned(array, axes, grid)
    template, leaves = template_of(problem, x, grid)
    return Cut(problem, grid, Visibility(problem, x, grid), arrays, template, leaves)


def key_bytes(problem: Problem, grid: Grid, at: Index) -> list[int]:
    """Return the bytes of each chunk of keys and values, for the items and heads of a block."""
    group = grid.groups[grid.group_of[at.head]].length
    each = items_in(grid, at) * group * (problem.head_size + problem.value_size)
    return [each * span.length * NARROW[problem.dtype] for span in grid.columns]


def partial_bytes(problem: Problem, grid: Grid, at: Index) -> int:
    """Return the bytes of the partial of a block of rows."""
    rows = items_in(grid, at) * grid.heads[at.head].length * grid.rows[at.row].length
    return rows * (problem.value_size + 1) * NARROW[problem.accumulator]


def items_in(grid: Grid, at: Index) -> int:
    """Return the number of batch items of a block."""
    return int(np.prod([spans[n].length for spans, n in zip(grid.batch, at.items, strict=True)]))


def attend(problem: Problem, x: Operands) -> tuple[Array, Array | None]:
    """Return output and logsumexp, as dask arrays."""
    call = cut(problem, x)
    both = "logsumexp" in problem.features
    layer = Layer("attention", call.inputs, problem, call.template, limit())
    result = "both" if both else "output"
    tasks = {
        (*at.items, at.head, at.row): block_of_rows(call, layer, at, result)
        for at in call.grid.row_blocks()
    }
    chunks = (*(lengths_of(s) for s in call.grid.batch), lengths_of(call.grid.heads))
    chunks = (*chunks, lengths_of(call.grid.rows))
    query = call.arrays["query"][1]
    size = (problem.value_size,)
    if not both:
        last = {(*where, 0): task for where, task in tasks.items()}
        return layer.array("output", (*chunks, size), query.dtype, query, last), None
    keys = {where: layer.add(("both", *where), *task) for where, task in tasks.items()}
    outputs = {(*where, 0): (operator.itemgetter(0), key) for where, key in keys.items()}
    sums = {where: (operator.itemgetter(1), key) for where, key in keys.items()}
    return (
        layer.array("output", (*chunks, size), query.dtype, query, outputs),
        layer.array("logsumexp", chunks, problem.accumulator, query, sums),
    )


def block_of_rows(call: Cut, layer: Layer, at: Index, result: str) -> tuple[Any, ...]:
    """Add the tasks of a block of rows, and return the last one."""
    problem, groups = call.problem, call.groups(at)
    query, (dtype, joined) = call.block("query", at), (problem.dtype, problem.accumulator)
    if not groups:
        part = call.grid.part(problem, at, call.grid.columns[0]._replace(stop=0))
        return (Unseeing(call.pieces(at, [], True), part, result), query, *call.sinks(at))
    if len(groups) == 1:
        step = Attend(call.pieces(at, groups[0], True), result, dtype, joined)
        return (step, query, *call.blocks(at, groups[0]))
    where = (*at.items, at.head, at.row)
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
