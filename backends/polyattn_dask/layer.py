"""Collect tasks, and make a graph and dask arrays of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import dask.array as da
from dask.array.utils import meta_from_array
from dask.base import tokenize
from dask.highlevelgraph import HighLevelGraph

from polyattn_dask.grid import Axes, Chunks, Grid, Index
from polyattn_dask.sizes import limit, widths

Key = tuple[Any, ...]


def blocks_at(array: Any, axes: Axes, grid: Grid, at: Index, columns: Sequence[int]) -> list[Key]:
    """Return the keys of the blocks that an array has at a place, for each chunk of keys."""
    if "S" not in axes:
        return [(array.name, *grid.place(axes, at))]
    return [(array.name, *grid.place(axes, at._replace(column=n))) for n in columns]


class Layer:
    """The tasks of one call.

    Parameters
    ----------
    what : str
        The name of the call.
    inputs : sequence of dask.array.Array
        The arrays that tasks read.
    *facts
        Whatever else the results depend on.
    """

    def __init__(self, what: str, inputs: Sequence[Any], *facts: Any) -> None:
        self._token = tokenize(what, [array.name for array in inputs], limit(), *facts)
        self._inputs, self._what = inputs, what
        self._name = f"{what}-part-{self._token}"
        self._work: Any = {}

    def add(self, where: tuple[Any, ...], step: Callable[..., Any], *arguments: Any) -> Key:
        """Add a task between inputs and results, and return its key, which no other task has."""
        key = (self._name, *where)
        if key in self._work:
            raise RuntimeError(f"two tasks of a graph have the key {key}")
        self._work[key] = (step, *arguments)
        return key

    def tree(
        self, where: tuple[Any, ...], keys: list[Key], size: int, step: Callable[..., Any]
    ) -> list[Key]:
        """Join results of so many bytes until few enough are left for one more join."""
        width, levels = widths(len(keys), size)
        for level, count in enumerate(levels):
            keys = [
                self.add((*where, level, n), step, keys[n * width : (n + 1) * width])
                for n in range(count)
            ]
        return keys

    def array(
        self, name: str, chunks: Chunks, dtype: Any, like: Any, tasks: dict[tuple[int, ...], Any]
    ) -> Any:
        """Return the dask array of some tasks, by the number of their block."""
        name = f"{self._what}-{name}-{self._token}"
        last: Any = {(name, *where): task for where, task in tasks.items()}
        whole = HighLevelGraph.from_collections(name, last, self._inputs)
        if self._work:
            work = HighLevelGraph.from_collections(self._name, self._work, self._inputs)
            depends = {**whole.dependencies, **work.dependencies}
            depends[name] = {self._name, *whole.dependencies[name]}
            whole = HighLevelGraph({**whole.layers, **work.layers}, depends)
        meta = meta_from_array(like._meta, ndim=len(chunks), dtype=dtype)
        return da.Array(whole, name, chunks, meta=meta)
