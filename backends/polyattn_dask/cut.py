"""A call on dask arrays, rechunked to its grid: the blocks that each task reads, its options."""

from __future__ import annotations

from typing import Any, NamedTuple

from polyattn._base.arrays import is_array
from polyattn._base.slices import Slice
from polyattn._core.call.parts import options_of
from polyattn.plugin import Array, Expression, Operands, Problem, split
from polyattn_dask.chunk_visibility import ChunkVisibility
from polyattn_dask.grid import (
    Axes,
    Chunks,
    Grid,
    Index,
    aligned,
    axes_along,
    axes_of,
    grid_of,
    key_axis,
    lengths_of,
)
from polyattn_dask.layer import Key, Layer, Task
from polyattn_dask.sizes import OptionArray, bytes_of_a_key, grouped, needs_whole_rows
from polyattn_dask.worker_steps import Calls


class Cut(NamedTuple):
    """A call on dask arrays that are chunked as its grid is."""

    problem: Problem
    grid: Grid
    seen: ChunkVisibility  # the chunks of keys of each block of rows
    arrays: dict[str, tuple[Axes, Any]]  # query, key, value, results and their gradients
    options: dict[str, Any]  # the skeletons of those of the whole call
    option_arrays: list[OptionArray]  # in their order
    whole_rows: bool  # whether a task needs all the keys of its rows at once

    @property
    def inputs(self) -> list[Any]:
        """All arrays that tasks read."""
        arrays = [array for _, array in self.arrays.values()]
        return [*arrays, *(x.array for x in self.option_arrays)]

    def layer(self, what: str, *facts: Any) -> Layer:
        """Return a layer without tasks; `facts` decide a result besides the call."""
        return Layer(what, self.inputs, self.problem, self.options, *facts)

    @property
    def row_chunks(self) -> Chunks:
        """The chunks of the output without its last axis."""
        grid = self.grid
        return tuple([lengths_of(spans) for spans in (*grid.batch, grid.heads, grid.rows)])

    def groups(self, at: Index) -> list[list[int]]:
        """Return the chunks of keys that a block of rows sees, by the tasks that read them."""
        each = bytes_of_a_key(self.problem, self.grid, at, self.option_arrays)
        return grouped(self.grid.columns, self.seen.of(at), each, self.whole_rows)

    def calls(self, at: Index, columns: list[int], sinks: bool = True) -> Calls:
        """Return the calls of a task."""
        spans = [self.grid.columns[n] for n in columns]
        return Calls(
            options=self.options,
            whole_rows=self.whole_rows,
            rows=self.grid.part(self.problem, at),
            columns=tuple([Slice(span.start, span.length) for span in spans]),
            along_keys=tuple([key_axis(x.axes) for x in self.option_arrays]),
            sinks=sinks,
            sizes=(self.problem.head_size, self.problem.value_size),
        )

    def block(self, name: str, at: Index) -> Key | None:
        """Return the key of a block of one of `arrays`, or None for a missing array."""
        if name not in self.arrays:
            return None
        axes, array = self.arrays[name]
        return (array.name, *self.grid.place(axes, at))

    def blocks(self, at: Index, columns: list[int]) -> tuple[Any, Any, Any]:
        """Return the keys of the blocks of keys, values and options; only sinks without a key."""
        places = [at._replace(column=n) for n in columns]
        keys, values = (
            [self.block(name, place) for place in places] if name in self.arrays else []
            for name in ("key", "value")
        )
        options = [
            [
                (x.array.name, *self.grid.place(x.axes, place))
                for place in (places if "S" in x.axes else [at])
            ]
            for x in self.option_arrays
            if columns or x.option == "sinks"
        ]
        return keys, values, options

    def task(self, at: Index, columns: list[int], step: Any, *more: Any) -> Task:
        """Return a task that reads a block of rows and some chunks of keys."""
        return (step, self.block("query", at), *self.blocks(at, columns), *more)


def cut(problem: Problem, x: Operands, grid: Grid | None = None, **results: Array | None) -> Cut:
    """Return a call, and arrays as its results, cut as a grid, by default of its own chunks."""
    arrays_of_call = {"query": x.query, "key": x.key, "value": x.value, **results}
    given: dict[str, Any] = {n: array for n, array in arrays_of_call.items() if array is not None}
    grid = grid or grid_of(problem, {n: given[n].chunks for n in ("query", "key", "value")})
    arrays = {}
    for name, array in given.items():
        axes = axes_of(name, array.shape, problem)
        arrays[name] = axes, aligned(array, axes, grid)
    options, option_arrays = _options(problem, x, grid)
    seen = ChunkVisibility(problem, x, grid)
    return Cut(problem, grid, seen, arrays, options, option_arrays, needs_whole_rows(problem))


def _options(problem: Problem, x: Operands, grid: Grid) -> tuple[dict[str, Any], list[OptionArray]]:
    """Return the skeletons of the options of a call, and their arrays."""
    skeletons: dict[str, Any] = {}
    arrays: list[OptionArray] = []
    for name, value in options_of(problem, x).items():
        whole = value.with_array_per_axis() if isinstance(value, Expression) else value
        skeletons[name], own = split(whole, is_array)
        if isinstance(whole, Expression):
            axes = [axes_along(last, array.shape, problem) for last, array in whole.arrays()]
        else:
            axes = [axes_of(name, array.shape, problem) for array in own]
        arrays += [
            OptionArray(name, each, aligned(array, each, grid))
            for each, array in zip(axes, own, strict=True)
        ]
    return skeletons, arrays
