"""Time decoding: one new query per head against cached keys, four query heads per key head."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import polyattn

from .common import BACKENDS, BackendBenchmark, random
from .libraries import open_library


class Decode(BackendBenchmark):
    """32 heads on 8, of 128, float32."""

    params = (BACKENDS, (512, 8192))
    param_names = ("backend", "cache")

    def prepare(self, backend: str, cache: int) -> Callable[[], Any]:
        library = open_library(backend)
        keys = (1, 8, cache, 128)
        arrays = map(library.put, random((1, 32, 1, 128), keys, keys))
        return library.call(partial(polyattn.attention, **library.options), *arrays)

    def time_decode(self, backend: str, cache: int) -> None:
        """Time one token."""
        self.run()
