"""Reused data of threads and calls: scratch arrays, small constants, facts about the processor."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np

from polyattn._base.arrays import numpy_namespace
from polyattn.plugin import Array
from polyattn_numpy.thread_pool import blas

xp = numpy_namespace()


class Scratch:
    """Named arrays that are written to again and again."""

    def __init__(self) -> None:
        self._arrays: dict[tuple[str, Any], Array] = {}

    def array(self, name: str, shape: tuple[int, ...], dtype: Any) -> Array:
        """Return the array of this name and shape; its values are those last written."""
        size, key = math.prod(shape), (name, dtype)
        array = self._arrays.get(key)
        if array is None or array.size < size:
            array = self._arrays[key] = np.empty(size, dtype)
        return array[:size].reshape(shape)


_of_thread = threading.local()


@contextmanager
def borrowed_scratch() -> Iterator[Scratch]:
    """Lend this thread's scratch arrays; a call made from inside another one gets its own."""
    free: list[Scratch] = _of_thread.__dict__.setdefault("free", [])
    scratch = free.pop() if free else Scratch()
    try:
        yield scratch
    finally:
        free.append(scratch)


@lru_cache(maxsize=64)
def band_tile(rows: int, columns: int, low: int | None, high: int | None) -> Array:
    """Return which of `columns` keys each of `rows` rows sees, shape (rows, 1, columns)."""
    distance = np.arange(columns) - np.arange(rows)[:, None, None]
    seen = np.ones(distance.shape, bool)
    if low is not None:
        seen &= distance >= low
    if high is not None:
        seen &= distance <= high
    return seen


@lru_cache(maxsize=8)
def ones(length: int, dtype: Any) -> Array:
    """Return a column of ones: a product with it sums rows faster than a reduction does."""
    return np.ones((length, 1), dtype)


@lru_cache(maxsize=2)
def has_small_products(dtype: Any) -> bool:
    """Return whether BLAS multiplies small matrices without copying them first."""
    # OpenBLAS has such kernels only for AVX-512, for up to a million multiply-adds.
    builds = {(x.internal_api, getattr(x, "architecture", None)) for x in blas.libraries()}
    wide = {("openblas", name) for name in ("SkylakeX", "Cooperlake", "SapphireRapids")}
    return bool(dtype == np.float32 and builds and builds <= wide)


@lru_cache(maxsize=2)
def fast_exp2(dtype: str) -> bool:
    """Return whether exp2 has vector instructions here, as AVX-512 has: half the time of exp."""
    if dtype != "float32" or not hasattr(np.lib, "introspect"):
        return False
    info = np.lib.introspect.opt_func_info(func_name="^exp2$", signature="float32")
    loops = info.get("exp2", {}).values()
    return bool(loops) and not any(loop["current"].startswith("baseline") for loop in loops)
