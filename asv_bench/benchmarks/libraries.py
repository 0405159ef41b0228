"""Use each library: place its arrays, compile, and wait for results.

A call ends when its result is computed, not when it is queued. A library is imported only when it
is needed and the system has a device for it.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from asv_runner.benchmarks.mark import SkipNotImplemented

import polyattn

Call = Callable[[], Any]


@functools.cache
def has_driver() -> bool:
    """Return whether the system has a driver for CUDA or ROCm."""
    for library in ("libcuda.so.1", "nvcuda.dll"):
        try:
            ctypes.CDLL(library)
        except OSError:
            continue
        return True
    return Path("/dev/kfd").exists()


def open_library(backend: str) -> Library:
    """Return the library of a backend, on its device, or raise SkipNotImplemented."""
    name, _, device = backend.partition(":")
    kind = LIBRARIES[name]
    if importlib.util.find_spec(kind.module) is None:
        raise SkipNotImplemented(f"{kind.module} is not installed")
    if (device == "cuda" or name == "cupy") and not has_driver():
        raise SkipNotImplemented("there is no GPU driver")
    if device == "mps" and sys.platform != "darwin":
        raise SkipNotImplemented("only macOS has mps")
    # Read before the first call: a backend has the same kernels wherever it is measured.
    os.environ["POLYATTN_NATIVE"] = "1" if kind is Native else "0"
    return kind(device)


class Library:
    """NumPy, and the base of the others."""

    module = "numpy"
    options: Mapping[str, Any] = MappingProxyType({})

    def __init__(self, device: str) -> None:
        self.device = device

    def put(self, array: np.ndarray) -> Any:
        """Convert a NumPy array to the library, on the device."""
        return array

    def call(self, function: Callable[..., Any], *arrays: Any) -> Call:
        """Return the call of a function, compiled if users of the library would compile it."""
        return functools.partial(function, *arrays)

    def gradients(self, function: Callable[..., Any], along: Any, *arrays: Any) -> Call:
        """Return the call of attention and its gradients, for a gradient of its output.

        Here by `attention_vjp`, with the options of the partial function.
        """
        options = getattr(function, "keywords", {})

        def both(along: Any, *arrays: Any) -> Any:
            _, pullback = polyattn.attention_vjp(*arrays, **options)
            return pullback(along)

        return self.call(both, along, *arrays)


class Native(Library):
    """The compiled kernel, on NumPy arrays."""

    module = "polyattn_native"
    options = MappingProxyType({"backend": "numpy", "kernel": "native"})


class OnnxRuntime(Library):
    """ONNX Runtime, on NumPy arrays."""

    module = "onnxruntime"
    options = MappingProxyType({"backend": "onnxruntime"})


class Dask(Library):
    """Dask on the threads of this process, in chunks of tokens."""

    module = "dask"
    chunk = 512  # tokens

    def put(self, array: np.ndarray) -> Any:
        import dask.array

        chunks = {array.ndim - 2: self.chunk} if array.ndim > 2 else "auto"
        return dask.array.from_array(array, chunks=chunks)

    def call(self, function: Callable[..., Any], *arrays: Any) -> Call:
        import dask

        return lambda: dask.compute(function(*arrays))[0]


class Mlx(Library):
    """MLX, on its default device."""

    module = "mlx"

    def put(self, array: np.ndarray) -> Any:
        import mlx.core

        return mlx.core.array(array)

    def call(self, function: Callable[..., Any], *arrays: Any) -> Call:
        import mlx.core

        def run() -> Any:
            output = function(*arrays)
            mlx.core.eval(output)
            return output

        return run


class ArrayAPI(Library):
    """The core's own kernels, on NumPy arrays."""

    options = MappingProxyType({"backend": "array-api"})


class Torch(Library):
    """PyTorch, on one kind of device."""

    module = "torch"

    def __init__(self, device: str) -> None:
        import torch

        super().__init__(device)
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        if device != "cpu" and (accelerator is None or accelerator.type != device):
            raise SkipNotImplemented(f"torch finds no {device}")

    def put(self, array: np.ndarray) -> Any:
        import torch

        return torch.from_numpy(array).to(self.device)

    def call(self, function: Callable[..., Any], *arrays: Any) -> Call:
        import torch

        def run() -> Any:
            with torch.no_grad():
                output = function(*arrays)
            self.wait()
            return output

        return run

    def gradients(self, function: Callable[..., Any], along: Any, *arrays: Any) -> Call:
        import torch

        leaves = [array.detach().requires_grad_() for array in arrays]

        def run() -> Any:
            gradients = torch.autograd.grad(function(*leaves), leaves, along)
            self.wait()
            return gradients

        return run

    def wait(self) -> None:
        """Wait for the device."""
        import torch

        if self.device != "cpu":
            torch.accelerator.synchronize()


class CuPy(Library):
    """CuPy, on its current device."""

    module = "cupy"

    def __init__(self, device: str) -> None:
        import cupy

        super().__init__(device)
        if not cupy.cuda.is_available():
            raise SkipNotImplemented("cupy finds no device")

    def put(self, array: np.ndarray) -> Any:
        import cupy

        return cupy.asarray(array)

    def call(self, function: Callable[..., Any], *arrays: Any) -> Call:
        import cupy

        def run() -> Any:
            output = function(*arrays)
            cupy.cuda.get_current_stream().synchronize()
            return output

        return run


class Jax(Library):
    """JAX under `jax.jit`, on the first device of a kind."""

    module = "jax"

    def __init__(self, device: str) -> None:
        import jax

        super().__init__(device)
        try:
            self.place = jax.devices(device)[0]
        except RuntimeError as error:
            raise SkipNotImplemented(f"jax finds no {device}") from error

    def put(self, array: np.ndarray) -> Any:
        import jax

        return jax.device_put(array, self.place)

    def call(self, function: Callable[..., Any], *arrays: Any) -> Call:
        import jax

        compiled = jax.jit(function)
        return lambda: jax.block_until_ready(compiled(*arrays))

    def gradients(self, function: Callable[..., Any], along: Any, *arrays: Any) -> Call:
        import jax

        def both(along: Any, *arrays: Any) -> Any:
            _, back = jax.vjp(function, *arrays)
            return back(along)

        return self.call(both, along, *arrays)


LIBRARIES: dict[str, type[Library]] = {
    "numpy": Library,
    "native": Native,
    "torch": Torch,
    "cupy": CuPy,
    "jax": Jax,
    "dask": Dask,
    "mlx": Mlx,
    "onnxruntime": OnnxRuntime,
    "array-api": ArrayAPI,
}
