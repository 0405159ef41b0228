"""Measure the peak memory of a call without its inputs: the output and scratch memory.

On the host it is the growth of the process's resident memory, including scratch memory that a
kernel keeps for the next call. On a device it is the growth of what the library has allocated. A
small call runs before.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from asv_runner.benchmarks.mark import SkipNotImplemented

import polyattn

from .common import ON_CUDA, ON_HOST, BackendBenchmark, random
from .libraries import Library, open_library

LENGTH = 4096


class Peak(BackendBenchmark):
    """8 heads of 64, 4096 tokens, float32, causal: 8 MB of output, 512 MB of scores."""

    param_names = ("backend",)
    unit = "bytes"
    rounds = 1

    def setup(self, backend: str) -> None:
        """Warm up the library, and prepare the call without running it, except for JAX."""
        if self.run is not None:
            return
        self.library = open_library(backend)
        self.call_of(16)()
        self.run = self.call_of(LENGTH)
        if self.library.module == "jax":
            # XLA keeps no scratch memory, and compiling takes more memory than a call.
            self.run()

    def call_of(self, length: int) -> Callable[[], Any]:
        """Return the call for a length."""
        arrays = map(self.library.put, random(*[(1, 8, length, 64)] * 3))
        attend = partial(polyattn.attention, is_causal=True, **self.library.options)
        return self.library.call(attend, *arrays)


class HostPeak(Peak):
    """The peak of the process, on Linux."""

    params = (ON_HOST,)

    def track_bytes(self, backend: str) -> int:
        """Return the growth of the resident memory."""
        return host_peak(self.run)


class DevicePeak(Peak):
    """The peak of the library on the device."""

    params = (ON_CUDA,)

    def track_bytes(self, backend: str) -> int:
        """Return the growth of the allocated memory."""
        return DEVICE_PEAKS[self.library.module](self.library, self.run)


def host_peak(call: Callable[[], Any]) -> int:
    """Return the growth of the resident memory during a call, in bytes."""
    reset = Path("/proc/self/clear_refs")
    if not reset.exists():
        raise SkipNotImplemented("only Linux reports the peak memory of a part of a process")
    # Freed memory that the C library still holds would be reused without growth.
    getattr(ctypes.CDLL(None), "malloc_trim", int)(0)
    before = _status("VmRSS")
    reset.write_text("5", encoding="ascii")
    call()
    return _status("VmHWM") - before


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise SkipNotImplemented(f"this system does not report {name}")


def _torch_peak(library: Library, call: Callable[[], Any]) -> int:
    import torch

    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    return torch.cuda.max_memory_allocated() - before


def _cupy_peak(library: Library, call: Callable[[], Any]) -> int:
    import cupy

    # The pool keeps no peak, but its size after a call with an empty pool is the peak.
    pool = cupy.get_default_memory_pool()
    pool.free_all_blocks()
    before = pool.total_bytes()
    call()
    return pool.total_bytes() - before


def _jax_peak(library: Library, call: Callable[[], Any]) -> int:
    # The peak of the whole process: the same call before it has the same peak.
    before = library.place.memory_stats()["bytes_in_use"]
    call()
    return library.place.memory_stats()["peak_bytes_in_use"] - before


DEVICE_PEAKS = {"torch": _torch_peak, "cupy": _cupy_peak, "jax": _jax_peak}
