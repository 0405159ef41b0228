"""Tasks under way to a graph, and the dask arrays that they make."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import dask.array as da
from dask import config
from dask.array.utils import meta_from_array
from dask.base import tokenize
from dask.highlevelgraph import HighLevelGraph
from dask.utils import parse_bytes

from polyattn_dask.grid import Axes, Chunks, Grid, Index

__all__ = ["Layer", "blocks_at", "grouped", "limit", "widths"]

Key = tuple[Any, ...]


def limit() -> int:
    """Return how many bytes of keys and values, or of partials, a task may join."""
    return int(parse_bytes(config.get("polyattn.group-size", "64 MiB")))


def grouped(numbers: Sequence[int], sizes: Sequence[int], most: int) -> list[list[int]]:
    """Put chunks together in groups of at most so many bytes, or of one chunk."""
    groups: list[list[int]] = []
    room = 0
    for number in numbers:
        size = sizes[number]
        if not groups or size > room:
            groups.append([])
            room = most
        groups[-1].append(number)
        room -= size
    return groups


def widths(count: int, size: int, most: int) -> list[int]:
    """Return how many results there are at each level of a tree that joins them, but for one."""
    width, found = max(2, most // max(1, size)), []
    while count > width:
        count = -(-count // width)
        found.append(count)
    return found


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
        self._token = tokenize(what, [array.name for array in inputs], *facts)
        self._inputs, self.what = inputs, what
        self._work: dict[Key, Any] = {}

    @property
    def work_name(self) -> str:
        """The name of the tasks between inputs and results."""
        return f"{self.what}-part-{self._token}"

    def add(self, where: tuple[Any, ...], step: Callable[..., Any], *arguments: Any) -> Key:
        """Add a task, and return its key."""
        key = (self.work_name, *where)
        self._work[key] = (step, *arguments)
        return key

    def tree(
        self, where: tuple[Any, ...], keys: list[Key], size: int, step: Callable[..., Any]
    ) -> list[Key]:
        """Join results until few enough are left for one more join."""
        most = limit()
        for level, count in enumerate(widths(len(keys), size, most)):
            width = max(2, most // max(1, size))
            keys = [
                self.add((*where, level, n), step, keys[n * width : (n + 1) * width])
                for n in range(count)
            ]
        return keys

    def array(
        self, name: str, chunks: Chunks, dtype: Any, like: Any, tasks: dict[tuple[int, ...], Any]
    ) -> Any:
        """Return the dask array of some tasks, by the number of their block."""
        name = f"{self.what}-{name}-{self._token}"
        graph = HighLevelGraph.from_collections(self.work_name, self._work, self._inputs)
        layers, depends = dict(graph.layers), dict(graph.dependencies)
        last = HighLevelGraph.from_collections(
            name, {(name, *where): task for where, task in tasks.items()}, self._inputs
        )
        layers[name] = last.layers[name]
        depends[name] = {self.work_name, *last.dependencies[name]}
        whole = HighLevelGraph(layers, depends)
        meta = meta_from_array(like._meta, ndim=len(chunks), dtype=dtype)
        return da.Array(whole, name, chunks, meta=meta)
