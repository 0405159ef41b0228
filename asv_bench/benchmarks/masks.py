"""Time masks: those that know their tiles in advance, and a function, which does not."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

import polyattn
from polyattn import masks

from .common import BACKENDS, BackendBenchmark, random
from .libraries import open_library

LENGTH = 2048


def checkered(b: Any, h: Any, i: Any, j: Any) -> Any:
    """Show every other block of 128 rows and keys."""
    return (i // 128 + j // 128) % 2 == 0


# Each takes the function that converts NumPy arrays to the library.
MASKS: dict[str, Callable[[Callable[[Any], Any]], Any]] = {
    "full": lambda put: None,
    "causal": lambda put: masks.causal(),
    "window": lambda put: masks.window(128, 0),
    "segments": lambda put: masks.segments(put(np.arange(LENGTH) // 128)),
    "padding": lambda put: masks.padding(LENGTH // 4),
    "compiled rule": lambda put: masks.compile(checkered, LENGTH),
    "function": lambda put: checkered,
}


class Masks(BackendBenchmark):
    """8 heads of 64, 2048 tokens, float32."""

    params = (BACKENDS, tuple(MASKS))
    version = "2"
    param_names = ("backend", "mask")

    def prepare(self, backend: str, mask: str) -> Callable[[], Any]:
        library = open_library(backend)
        shape = (1, 8, LENGTH, 64)
        arrays = map(library.put, random(shape, shape, shape))
        attend = partial(polyattn.attention, mask=MASKS[mask](library.put), **library.options)
        return library.call(attend, *arrays)

    def time_mask(self, backend: str, mask: str) -> None:
        """Time one call."""
        self.run()
