"""How much memory a call takes at its peak, beyond its inputs: the output, and what it works in.

On the host it is by how much the resident memory of the process rises above what it was before the
call, and includes scratch memory that a kernel keeps for the next one. On a device it is the same
of what the library has allocated there. Libraries are warm: a small call went before.
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
        """Warm the library up, and prepare the call without running it where that compiles none."""
        if self.run is not None:
            return
        self.library = open_library(backend)
        self.call_of(16)()
        self.run = self.call_of(LENGTH)
        if self.library.module == "jax":
            # XLA keeps no scratch memory, and compiling takes much that no call does.
            self.run()

    def call_of(self, length: int) -> Callable[[], Any]:
        """Return the call for a length."""
        arrays = map(self.library.put, random(*[(1, 8, length, 64)] * 3))
        attend = partial(polyattn.attention, is_causal=True, **self.library.options)
        return self.library.call(attend, *arrays)


class HostPeak(Peak):
    """Of the process, where Linux tells."""

    params = (ON_HOST,)

    def track_bytes(self, backend: str) -> int:
        """Return the rise of the resident memory."""
        return host_peak(self.run)


class DevicePeak(Peak):
    """Of the library, on the device."""

    params = (ON_CUDA,)

    def track_bytes(self, backend: str) -> int:
        """Return the rise of what is allocated."""
        return DEVICE_PEAKS[self.library.module](self.library, self.run)


def host_peak(call: Callable[[], Any]) -> int:
    """Return by how many bytes the resident memory rises during a call."""
    reset = Path("/proc/self/clear_refs")
    if not reset.exists():
        raise SkipNotImplemented("only Linux tells the peak of a part of a process")
    # What the C library holds back is given to the call without a rise.
    getattr(ctypes.CDLL(None), "malloc_trim", int)(0)
    before = _status("VmRSS")
    reset.write_text("5", encoding="ascii")
    call()
    return _status("VmHWM") - before


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise SkipNotImplemented(f"this kernel tells no {name}")


def _torch_peak(library: Library, call: Callable[[], Any]) -> int:
    import torch

    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    return torch.cuda.max_memory_allocated() - before


def _cupy_peak(library: Library, call: Callable[[], Any]) -> int:
    import cupy

    # The pool keeps no peak, but what it holds after a call from nothing is that.
    pool = cupy.get_default_memory_pool()
    pool.free_all_blocks()
    before = pool.total_bytes()
    call()
    return pool.total_bytes() - before


def _jax_peak(library: Library, call: Callable[[], Any]) -> int:
    # Of the whole process: the call of the same size that went before has the same peak.
    before = library.place.memory_stats()["bytes_in_use"]
    call()
    return library.place.memory_stats()["peak_bytes_in_use"] - before


DEVICE_PEAKS = {"torch": _torch_peak, "cupy": _cupy_peak, "jax": _jax_peak}
