"""Time the causal forward pass by backend and length, in float32, and in float16 on GPUs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import polyattn

from .common import BACKENDS, ON_CUDA, BackendBenchmark, random
from .libraries import open_library


class Forward(BackendBenchmark):
    """8 heads of 64, float32."""

    params = (BACKENDS, (256, 2048))
    param_names = ("backend", "length")
    heads, size, dtype = 8, 64, "float32"

    def prepare(self, backend: str, length: int) -> Callable[[], Any]:
        library = open_library(backend)
        shape = (1, self.heads, length, self.size)
        arrays = map(library.put, random(shape, shape, shape, dtype=self.dtype))
        attend = partial(polyattn.attention, is_causal=True, **library.options)
        return library.call(attend, *arrays)

    def time_forward(self, backend: str, length: int) -> None:
        """Time one call."""
        self.run()


class ForwardHalf(Forward):
    """32 heads of 128, float16."""

    params = (ON_CUDA, (8192,))
    heads, size, dtype = 32, 128, "float16"
