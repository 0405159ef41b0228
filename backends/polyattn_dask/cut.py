"""A call on dask arrays, cut by its grid: the blocks that each task reads."""

from __future__ import annotations

from typing import Any, NamedTuple

from polyattn.plugin import Array, Operands, Problem
from polyattn_dask.grid import Axes, Chunks, Grid, Index, aligned, axes_of, grid_of, lengths_of
from polyattn_dask.layer import Key, blocks_at
from polyattn_dask.sizes import Extra, grouped, key_bytes
from polyattn_dask.tasks import Pieces
from polyattn_dask.template import Leaf, Template, template_of
from polyattn_dask.visibility import Visibility


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

    @property
    def row_chunks(self) -> Chunks:
        """The chunks of the output without its last axis."""
        grid = self.grid
        return tuple([lengths_of(spans) for spans in (*grid.batch, grid.heads, grid.rows)])

    def groups(self, at: Index) -> list[list[int]]:
        """Return the chunks of keys that a block of rows sees, by the tasks that read them."""
        extras = [Extra(x.axes, x.array.shape, str(x.array.dtype)) for x in self.leaves]
        sizes = key_bytes(self.problem, self.grid, at, extras)
        return grouped(self.seen.of(at), sizes, self.template.whole_rows)

    def pieces(self, at: Index, columns: list[int], sinks: bool = True) -> Pieces:
        """Return the calls of a task."""
        parts = [self.grid.part(self.problem, at, self.grid.columns[n]) for n in columns]
        along = [x.axes.index("S") - len(x.axes) if "S" in x.axes else None for x in self.leaves]
        sizes = self.problem.head_size, self.problem.value_size
        return Pieces(self.template, tuple(parts), tuple(along), sinks, sizes)

    def block(self, name: str, at: Index) -> Key | None:
        """Return the key of a block of one of `arrays`, or None if there is no such array."""
        if name not in self.arrays:
            return None
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

    def sinks(self, at: Index) -> list[Key]:
        """Return the key of the block of the sinks, if there are some."""
        sinks = [x for x in self.leaves if x.option == "sinks"]
        return [(x.array.name, *self.grid.place(x.axes, at)) for x in sinks]


def cut(problem: Problem, x: Operands, grid: Grid | None = None, **results: Array | None) -> Cut:
    """Return a call, its arrays cut as a grid is, by default that of its own chunks.

    `results` are arrays that are shaped as the results of the call.
    """
    arrays_of_call = {"query": x.query, "key": x.key, "value": x.value, **results}
    given = {name: array for name, array in arrays_of_call.items() if array is not None}
    grid = grid or grid_of(problem, {n: given[n].chunks for n in ("query", "key", "value")})
    arrays = {}
    for name, array in given.items():
        axes = axes_of(name, array.shape, problem)
        arrays[name] = axes, aligned(array, axes, grid)
    template, leaves = template_of(problem, x, grid)
    return Cut(problem, grid, Visibility(problem, x, grid), arrays, template, leaves)
