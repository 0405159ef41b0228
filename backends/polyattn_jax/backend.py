"""JAX's devices and primitives.

Everything here may be traced: nothing reads a value or waits for one, but `fetch` and
`synchronize`.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from polyattn.plugin import Array, Backend
from polyattn_jax.cudnn import Cudnn
from polyattn_jax.devices import all_devices, device_of
from polyattn_jax.xla import Xla

__all__ = ["JaxBackend"]

# Without jax_enable_x64 these come as 32 bits.
NARROWED = {"float64", "int64", "uint64", "uint32"}
ENGINES = {
    "cudnn": ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12"),
    "cuda plugin": ("jax-cuda13-plugin", "jax-cuda12-plugin"),
}


class JaxBackend(Backend):
    """JAX arrays on any of its devices, traced ones included."""

    kernels = (Cudnn(), Xla())

    def __init__(self) -> None:
        super().__init__(jnp)

    def devices(self) -> list[str]:
        """Return the devices at hand, JAX's default first."""
        return list(all_devices())

    def hardware(self, device: str) -> dict[str, str | int]:
        """Return what JAX knows of a device."""
        found: Any = device_of(device)
        known: dict[str, str | int] = {}
        if found.platform != "cpu":  # of which JAX knows only that it is one
            known["name"] = found.device_kind
        memory = (found.memory_stats() or {}).get("bytes_limit")
        if memory is not None:
            known["memory"] = memory
        capability = getattr(found, "compute_capability", None)
        if capability is not None:
            known["compute_capability"] = str(capability)
        return known

    def engines(self) -> dict[str, str]:
        """Return the versions of cuDNN and of JAX's CUDA plugin, if they are installed."""
        found = {}
        for engine, packages in ENGINES.items():
            for package in packages:
                try:
                    found[engine] = importlib.metadata.version(package)
                    break
                except importlib.metadata.PackageNotFoundError:
                    continue
        return found

    def lacks(self, dtype: str) -> str | None:
        """JAX has float64 only if it is told so, and would make float32 of it without a word."""
        if dtype != "float64" or _has_float64():
            return None
        return "JAX has float64 only after jax.config.update('jax_enable_x64', True)"

    def place(self, array: Array, device: str | None) -> jax.Array:
        """Return `array` as a JAX array, on the same memory where it can be."""
        result: jax.Array = array if isinstance(array, jax.Array) else _import(array)
        return result if device is None else jax.device_put(result, device_of(device))

    def fetch(self, array: Array) -> Any:
        """Return a JAX array as a NumPy array of the caller's own, which JAX's memory is not."""
        return np.array(array)

    def synchronize(self, device: str | None = None) -> None:
        """Wait until all work on the device is done."""
        # A device runs what it is given in order, so the last thing waits for all before it.
        where = jax.devices()[0] if device is None else device_of(device)
        (_something_on(where) + 0).block_until_ready()

    def compile(self, function: Callable[..., Array]) -> Callable[..., Array]:
        """Return the function under jax.jit."""
        compiled: Callable[..., Array] = jax.jit(function)
        return compiled

    def peak_memory(
        self, device: str | None, function: Callable[..., Array], *arrays: Array
    ) -> int | None:
        """Return the scratch memory of the program that XLA made of the call."""
        # The peak that a device counts is that of the whole process, and cannot be set back; on
        # the CPU what XLA's threads free is not given back, so that the system sees no growth.
        compiled: Any = function
        known = compiled.lower(*arrays).compile().memory_analysis()
        return None if known is None else int(known.temp_size_in_bytes)

    def matmul(self, a: Array, b: Array) -> jax.Array:
        """Return the matrix product of two stacks of matrices, in the whole of their precision."""
        return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)


@lru_cache
def _something_on(device: Any) -> jax.Array:
    something: jax.Array = jax.device_put(0.0, device)
    return something


def _has_float64() -> bool:
    return bool(jax.dtypes.canonicalize_dtype(np.float64) == np.float64)


def _import(array: Array) -> jax.Array:
    """Return an array of another library; without float64, bias and sinks lose what it has more."""
    if not isinstance(array, (np.ndarray, np.generic)):
        if _has_float64() or str(array.dtype).rpartition(".")[2] not in NARROWED:
            try:
                return jnp.from_dlpack(array)
            except Exception:  # a layout, dtype or device that JAX does not take by DLPack
                pass
        array = np.from_dlpack(array)
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    if array.dtype.kind in "iu" and not _has_float64():
        narrow = array.astype(np.int32)
        if not np.array_equal(narrow, array):
            raise ValueError(
                "JAX has no integers beyond 32 bits, as lengths or ids of a mask, but after"
                " jax.config.update('jax_enable_x64', True)"
            )
        array = narrow
    return jnp.asarray(array)
