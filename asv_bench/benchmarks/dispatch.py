"""Time the overhead of a call: attention and `explain` on very small arrays, and the bare call.

Under `jax.jit` only the compiled program is timed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

import polyattn

from .common import BACKENDS, BackendBenchmark, random
from .libraries import Library, open_library


def textbook(query: np.ndarray, key: np.ndarray, value: np.ndarray) -> np.ndarray:
    """Compute softmax(query·keyᵀ/√D)·value."""
    scores = query @ key.swapaxes(-1, -2) / np.sqrt(np.float32(query.shape[-1]))
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True) @ value


def bare(library: Library) -> Callable[..., Any]:
    """Return the function that one would call without polyattn."""
    if library.module == "torch":
        import torch

        return torch.nn.functional.scaled_dot_product_attention
    if library.module == "jax":
        import jax

        return jax.nn.dot_product_attention
    return textbook


class Tiny(BackendBenchmark):
    """One head of 16, 16 tokens, float32."""

    params = (BACKENDS,)
    param_names = ("backend",)
    repeat = (20, 500, 2.0)

    def prepare(self, backend: str) -> Callable[[], Any]:
        library = open_library(backend)
        arrays = list(map(library.put, random(*[(1, 1, 16, 16)] * 3)))
        return self.call(library, arrays)


class Attention(Tiny):
    """`polyattn.attention`."""

    def call(self, library: Library, arrays: list[Any]) -> Callable[[], Any]:
        return library.call(partial(polyattn.attention, **library.options), *arrays)

    def time_attention(self, backend: str) -> None:
        """Time one call."""
        self.run()


class Explain(Tiny):
    """`polyattn.explain`, which computes nothing."""

    def call(self, library: Library, arrays: list[Any]) -> Callable[[], Any]:
        return partial(polyattn.explain, *arrays, **library.options)

    def time_explain(self, backend: str) -> None:
        """Time one call."""
        self.run()


class Bare(Tiny):
    """The library's own attention, or the textbook formula where it has none."""

    params = (("numpy", "torch:cpu", "torch:cuda", "torch:mps", "jax:cpu", "jax:cuda"),)

    def call(self, library: Library, arrays: list[Any]) -> Callable[[], Any]:
        return library.call(bare(library), *arrays)

    def time_bare(self, backend: str) -> None:
        """Time one call."""
        self.run()
