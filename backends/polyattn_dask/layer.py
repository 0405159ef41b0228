"""Collect tasks, and make a graph and dask arrays of them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import dask.array as da
from dask.array.utils import meta_from_array
from dask.base import tokenize
from dask.highlevelgraph import HighLevelGraph

from polyattn_dask.grid import Chunks
from polyattn_dask.sizes import BYTES, limit, widths
from polyattn_dask.worker_steps import Zeros, add

Key = tuple[Any, ...]
#: The number of a block along each axis of an array.
Place = tuple[int, ...]
#: A step and its arguments; a key among them stands for the result of its task.
Task = tuple[Any, ...]


class Layer:
    """The tasks of one call: the arrays that they read, the query first, and what else decides."""

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

    def sums(
        self, name: str, chunks: Chunks, dtype: str, shares: Mapping[Place, Sequence[Task]]
    ) -> dict[Place, Task]:
        """Return the last task of each block of a sum; a block without shares is 0."""
        last: dict[Place, Task] = {}
        for place in itertools.product(*(range(len(cuts)) for cuts in chunks)):
            shape = tuple([cuts[n] for cuts, n in zip(chunks, place, strict=True)])
            given = shares.get(place, ())
            if not given:
                query = self._inputs[0]
                last[place] = (Zeros(dtype, shape), (query.name, *[0] * query.ndim))
            elif len(given) == 1:
                last[place] = given[0]
            else:
                keys = [self.add(("share", name, *place, n), *x) for n, x in enumerate(given)]
                size = math.prod(shape) * BYTES[dtype]
                last[place] = (add, self.tree(("sum", name, *place), keys, size, add))
        return last

    def array(self, name: str, chunks: Chunks, dtype: Any, tasks: Mapping[Place, Task]) -> Any:
        """Return the dask array of some tasks, by the number of their block."""
        name = f"{self._what}-{name}-{self._token}"
        last: Any = {(name, *where): task for where, task in tasks.items()}
        whole = HighLevelGraph.from_collections(name, last, self._inputs)
        if self._work:
            work = HighLevelGraph.from_collections(self._name, self._work, self._inputs)
            depends = {**whole.dependencies, **work.dependencies}
            depends[name] = {self._name, *whole.dependencies[name]}
            whole = HighLevelGraph({**whole.layers, **work.layers}, depends)
        meta = meta_from_array(self._inputs[0]._meta, ndim=len(chunks), dtype=dtype)
        return da.Array(whole, name, chunks, meta=meta)
