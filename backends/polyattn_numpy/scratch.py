"""What is made once and kept: scratch memory, small tables, what the processor is good at."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np

from polyattn.plugin import Array
from polyattn_numpy.threads import blas

__all__ = [
    "Memory",
    "band_tile",
    "borrowed_memory",
    "fast_exp2",
    "has_small_products",
    "ones",
]


class Memory:
    """Arrays that are written to again and again, by name."""

    def __init__(self) -> None:
        self._arrays: dict[tuple[str, Any], Array] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: Any) -> Array:
        """Return the array of a name, with what was left in it."""
        size, key = math.prod(shape), (name, dtype)
        array = self._arrays.get(key)
        if array is None or array.size < size:
            array = self._arrays[key] = np.empty(size, dtype)
        return array[:size].reshape(shape)


class _Free(threading.local):
    def __init__(self) -> None:
        self.memories: list[Memory] = []


_free = _Free()


@contextmanager
def borrowed_memory() -> Iterator[Memory]:
    """Lend memory of this thread, which a call made from inside another one finds taken."""
    memory = _free.memories.pop() if _free.memories else Memory()
    try:
        yield memory
    finally:
        _free.memories.append(memory)


@lru_cache(maxsize=64)
def band_tile(rows: int, columns: int, low: int | None, high: int | None) -> Array:
    """Return which of `columns` keys each of `rows` rows sees, shape (rows, 1, columns)."""
    away = np.arange(columns) - np.arange(rows)[:, None, None]
    seen = np.ones(away.shape, bool)
    if low is not None:
        seen &= away >= low
    if high is not None:
        seen &= away <= high
    return seen


@lru_cache(maxsize=8)
def ones(length: int, dtype: Any) -> Array:
    """Return a column of ones, which sums rows faster by a product than a reduction does."""
    return np.ones((length, 1), dtype)


@lru_cache(maxsize=2)
def has_small_products(dtype: Any) -> bool:
    """Whether BLAS takes small products as they are, where others first copy both factors.

    OpenBLAS has kernels for that, for AVX-512 alone, up to a million multiply-adds.
    """
    found = {(x.internal_api, getattr(x, "architecture", None)) for x in blas.libraries()}
    wide = {("openblas", name) for name in ("SkylakeX", "Cooperlake", "SapphireRapids")}
    return bool(dtype == np.float32 and found and found <= wide)


@lru_cache(maxsize=2)
def fast_exp2(dtype: Any) -> bool:
    """Whether exp2 has vector instructions of its own here, which exp then takes twice as long as.

    Only AVX-512 has them; elsewhere exp is the faster one.
    """
    if dtype != np.float32 or not hasattr(np.lib, "introspect"):
        return False
    found = np.lib.introspect.opt_func_info(func_name="^exp2$", signature="float32")
    loops = found.get("exp2", {}).values()
    return bool(loops) and not any(loop["current"].startswith("baseline") for loop in loops)
