"""Time the forward and backward pass together: by the library's autograd, or `attention_vjp`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import polyattn

from .common import BACKENDS, BackendBenchmark, random
from .libraries import open_library


class Backward(BackendBenchmark):
    """8 heads of 64, float32, causal."""

    params = (BACKENDS, (256, 2048))
    version = "2"
    param_names = ("backend", "length")

    def prepare(self, backend: str, length: int) -> Callable[[], Any]:
        library = open_library(backend)
        shape = (1, 8, length, 64)
        along, *arrays = map(library.put, random(shape, shape, shape, shape))
        attend = partial(polyattn.attention, is_causal=True, **library.options)
        return library.gradients(attend, along, *arrays)

    def time_forward_and_backward(self, backend: str, length: int) -> None:
        """Time one call and its gradients of query, key and value."""
        self.run()
