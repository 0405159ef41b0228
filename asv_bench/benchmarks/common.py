"""What every benchmark shares: which backends, their data, their warm-up and their waiting.

The list of backends never depends on what is installed, because asv keeps results by parameter; a
backend that is not here is skipped. A call is over when its result is there, not when it is queued.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np
from asv_runner.benchmarks.mark import SkipNotImplemented

import polyattn

BACKENDS = (
    "numpy",
    "torch:cpu",
    "torch:cuda",
    "torch:mps",
    "cupy",
    "jax:cpu",
    "jax:cuda",
    "array-api",  # the core's kernels as they are, on NumPy arrays
)


class BackendBenchmark:
    """Base of benchmarks whose first parameter is a backend."""

    version = "1"  # raised by hand when the work that is timed changes
    rounds = 2
    repeat = (3, 10, 10.0)
    warmup_time = 0.0  # setup warms up, so that no compilation is timed
    timeout = 300

    def prepare(self, backend: str, arrays: list[np.ndarray], **options: Any) -> None:
        """Put the arrays where the backend is and make `run` the call to time.

        Parameters
        ----------
        backend : str
            One of `BACKENDS`.
        arrays : list of numpy.ndarray
            Query, key and value.
        **options
            Passed to `polyattn.attention`.
        """
        library, _, device = backend.partition(":")
        needed = {"array-api": "numpy"}.get(library, library)
        if importlib.util.find_spec(needed) is None:
            raise SkipNotImplemented(f"{library} is not installed")
        self.run: Callable[[], Any] = _PREPARE[library](device, arrays, options)
        self.run()
        self.run()


def _numpy(device: str, arrays: list[np.ndarray], options: dict[str, Any]) -> Callable[[], Any]:
    return functools.partial(polyattn.attention, *arrays, **options)


def _array_api(device: str, arrays: list[np.ndarray], options: dict[str, Any]) -> Callable[[], Any]:
    return functools.partial(polyattn.attention, *arrays, backend="array-api", **options)


def _torch(device: str, arrays: list[np.ndarray], options: dict[str, Any]) -> Callable[[], Any]:
    import torch

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if device != "cpu" and (accelerator is None or accelerator.type != device):
        raise SkipNotImplemented(f"torch finds no {device}")
    tensors = [torch.from_numpy(array).to(device) for array in arrays]

    def run() -> Any:
        with torch.no_grad():
            output = polyattn.attention(*tensors, **options)
        if device != "cpu":
            torch.accelerator.synchronize()
        return output

    return run


def _cupy(device: str, arrays: list[np.ndarray], options: dict[str, Any]) -> Callable[[], Any]:
    import cupy

    if not cupy.cuda.is_available():
        raise SkipNotImplemented("cupy finds no device")
    on_device = [cupy.asarray(array) for array in arrays]

    def run() -> Any:
        output = polyattn.attention(*on_device, **options)
        cupy.cuda.get_current_stream().synchronize()
        return output

    return run


def _jax(device: str, arrays: list[np.ndarray], options: dict[str, Any]) -> Callable[[], Any]:
    import jax

    try:
        place = jax.devices(device)[0]
    except RuntimeError as error:
        raise SkipNotImplemented(f"jax finds no {device}") from error
    on_device = [jax.device_put(array, place) for array in arrays]
    compiled = jax.jit(functools.partial(polyattn.attention, **options))
    return lambda: compiled(*on_device).block_until_ready()


_PREPARE = {
    "numpy": _numpy,
    "array-api": _array_api,
    "torch": _torch,
    "cupy": _cupy,
    "jax": _jax,
}
