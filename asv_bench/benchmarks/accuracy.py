"""Track the largest error of each backend's default kernel against the formula in float64."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

import polyattn

from .common import BACKENDS, BackendBenchmark, random
from .libraries import open_library


class Accuracy(BackendBenchmark):
    """8 heads of 64, 512 tokens, causal."""

    params = (BACKENDS, ("float32", "float16"))
    param_names = ("backend", "dtype")
    unit = "absolute error"
    rounds = 1

    def prepare(self, backend: str, dtype: str) -> Callable[[], Any]:
        library = open_library(backend)
        self.arrays = random(*[(1, 8, 512, 64)] * 3, dtype=dtype)
        attend = partial(polyattn.attention, is_causal=True, **library.options)
        return library.call(attend, *map(library.put, self.arrays))

    def track_largest_error(self, backend: str, dtype: str) -> float:
        """Return the error; outputs have magnitudes near 1."""
        exact = polyattn.attention(
            *(array.astype("float64") for array in self.arrays),
            is_causal=True,
            backend="array-api",
            kernel="dense",
        )
        output = self.run()
        output = output.get() if hasattr(output, "get") else output
        output = output.cpu() if hasattr(output, "cpu") else output
        return float(np.abs(np.asarray(output, dtype="float64") - exact).max())
