"""Measure the peak memory of a call, without its inputs and output.

The backend reports it if its library counts it. Otherwise, on the host, it is the growth of the
process during the call as the operating system counts it. Memory that a library keeps between
calls, such as scratch memory, was allocated before and is not counted.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from polyattn.bench.contender import Running

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def peak_memory(running: Running, output: int) -> int | None:
    """Return the peak bytes of a call, without inputs and output, or None if unknown."""
    contender = running.contender
    counted = contender.backend.peak_memory(contender.device, running.function, *running.arrays)
    if counted is not None or contender.hardware != "cpu":
        return counted
    grown = host_peak(running)
    return None if grown is None else max(grown - output, 0)


def host_peak(call: Callable[[], Any]) -> int | None:
    """Return the growth of the process during a call in bytes, or None if unknown."""
    gc.collect()
    with suppress(AttributeError, OSError):  # only glibc has malloc_trim
        # Freed memory that the process still holds would be reused without growth.
        ctypes.CDLL(None).malloc_trim(0)
    try:
        _RESET.write_text("5", encoding="ascii")  # sets the peak to the current size
        before = _status("VmRSS")
        output = call()
        after = _status("VmHWM")
    except OSError:
        return None
    del output
    return after - before


def _status(name: str) -> int:
    for line in _STATUS.read_text(encoding="ascii", errors="replace").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{_STATUS} does not report {name}")
