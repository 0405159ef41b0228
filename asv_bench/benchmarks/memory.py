"""Measure the peak memory of a call without its inputs: the output and scratch memory.

It is the growth of the process's resident memory, including scratch memory that a kernel keeps for
the next call. A small call runs before.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from asv_runner.benchmarks.mark import SkipNotImplemented

import polyattn

from .common import ON_HOST, BackendBenchmark, random
from .libraries import open_library

LENGTH = 4096


class HostPeak(BackendBenchmark):
    """8 heads of 64, 4096 tokens, float32, causal: 8 MB of output, 512 MB of scores."""

    params = (ON_HOST,)
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

    def track_bytes(self, backend: str) -> int:
        """Return the growth of the resident memory."""
        return host_peak(self.run)


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
