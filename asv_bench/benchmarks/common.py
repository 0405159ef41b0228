"""Shared parts of the benchmarks: the backends, their warm-up and their data.

The lists of backends do not depend on what is installed, because asv keeps results by parameter; a
missing backend is skipped with a reason. asv calls `setup` before every sample, in one process for
each case, so `setup` prepares the call only once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .libraries import has_driver

BACKENDS = (
    "numpy",
    "native",  # the compiled kernel on NumPy arrays
    "torch:cpu",
    "torch:cuda",
    "torch:mps",
    "cupy",
    "jax:cpu",
    "jax:cuda",
    "dask",
    "mlx",  # on its default device
    "onnxruntime",  # on NumPy arrays
    "array-api",  # the core's kernels, on NumPy arrays
)
ON_HOST = ("numpy", "native", "torch:cpu", "jax:cpu", "dask", "mlx", "onnxruntime", "array-api")
ON_CUDA = ("torch:cuda", "cupy", "jax:cuda")


class BackendBenchmark:
    """Base of benchmarks whose first parameter is a backend.

    A subclass has `params`, `param_names`, and `prepare`, which returns the call.
    """

    version = "1"  # raised by hand when the measured work changes
    rounds = 1 if has_driver() else 2  # each is a process that starts a GPU and its compilers
    repeat = (3, 10, 10.0)
    number = 1
    warmup_time = 0.0  # setup warms up, so that no compilation is timed
    timeout = 300
    run: Callable[[], Any] | None = None

    def setup(self, backend: str, *case: Any) -> None:
        """Prepare the call on the first of asv's calls, and warm it up."""
        if self.run is None:
            self.run = self.prepare(backend, *case)
            self.run()
            self.run()

    def prepare(self, backend: str, *case: Any) -> Callable[[], Any]:
        """Return the call, which returns when its result is computed."""
        raise NotImplementedError


def random(*shapes: tuple[int, ...], dtype: str = "float32") -> list[np.ndarray]:
    """Return arrays of random numbers, the same at each call."""
    rng = np.random.default_rng(0)
    return [rng.standard_normal(shape, dtype="float32").astype(dtype) for shape in shapes]
