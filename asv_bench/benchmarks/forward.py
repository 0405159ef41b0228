"""The forward pass by backend and length: 8 heads of 64, float32, full and causal."""

from __future__ import annotations

import numpy as np

from .common import BACKENDS, BackendBenchmark

LENGTHS = (128, 512, 2048)


class Forward(BackendBenchmark):
    """One call of `polyattn.attention`."""

    params = (BACKENDS, LENGTHS, (False, True))
    param_names = ("backend", "length", "causal")

    def setup(self, backend: str, length: int, causal: bool) -> None:
        """Make the arrays and warm up."""
        rng = np.random.default_rng(0)
        shape = (1, 8, length, 64)
        arrays = [rng.standard_normal(shape, dtype=np.float32) for _ in range(3)]
        self.prepare(backend, arrays, is_causal=causal)

    def time_forward(self, backend: str, length: int, causal: bool) -> None:
        """Time the call."""
        self.run()
