"""How fast the hardware is, by the same libraries: the roofline that attention stands under.

A device's rates are the largest that any backend reached on it, so that all are held to one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from polyattn.bench.contender import Contender
from polyattn.bench.timing import WINDOW, window
from polyattn.bench.workload import Workload
from polyattn.plugin import Array

__all__ = ["Peak", "measure", "roof", "roofs"]

SIDES = (256, 512, 1024, 2048, 4096, 8192)  # of the squares that are multiplied
LONG = 0.01  # seconds a product, beyond which a larger one says no more
SMALLEST, LARGEST = 2**28, 2**31  # bytes that are summed: beyond the caches
PARTS = 8
BRIEF = 0.002  # seconds a sum, below which starting it counts
WINDOWS = 3


@dataclass(frozen=True)
class Peak:
    """The rates of a device.

    Attributes
    ----------
    backend : str
        What reached the product's.
    device : str
        The device, by the name that all libraries share.
    product : float
        Of a product of two square matrices of the call's dtype, in floating-point operations a
        second.
    bandwidth : float
        Of the sum of two large float32 arrays into the first of them, in bytes read and written a
        second.
    """

    backend: str
    device: str
    product: float
    bandwidth: float


def measure(contender: Contender, dtype: str) -> Peak:
    """Return the rates that a backend reaches on its device."""
    return Peak(
        contender.name, contender.hardware, _product(contender, dtype), _bandwidth(contender)
    )


def roofs(peaks: Iterable[Peak]) -> dict[str, Peak]:
    """Return the largest rates of each device."""
    found: dict[str, Peak] = {}
    for peak in peaks:
        so_far = found.get(peak.device, peak)
        best = max(so_far, peak, key=lambda one: one.product)
        bandwidth = max(so_far.bandwidth, peak.bandwidth)
        found[peak.device] = Peak(best.backend, best.device, best.product, bandwidth)
    return found


def roof(peak: Peak, workload: Workload, length: int) -> float:
    """Return the rate that a call cannot exceed: the products' or the memory's.

    Of the memory's traffic only inputs and output are counted, each once.
    """
    intensity = workload.flops(length) / workload.bytes(length)
    return min(peak.product, intensity * peak.bandwidth)


def _product(contender: Contender, dtype: str) -> float:
    backend = contender.backend
    # The primitive is for the dtypes that scores are computed in; others are the library's own.
    multiply = backend.matmul if dtype in ("float32", "float64") else backend.xp.matmul
    compiled = backend.compile(multiply)
    # Random numbers: a GPU draws less power for ones, and runs faster than it would at work.
    block = np.random.default_rng(0).standard_normal((SIDES[0], SIDES[0]), np.float32)
    fastest = 0.0
    for side in SIDES:
        square = np.tile(block, (side // SIDES[0],) * 2).astype(dtype)
        a, b = (backend.place(square, contender.device) for _ in range(2))

        def call(a: Array = a, b: Array = b) -> None:
            compiled(a, b)
            backend.synchronize(contender.device)

        # One of them alone may have waited for something else that runs here.
        seconds = min(_seconds(call) for _ in range(WINDOWS))
        fastest = max(fastest, 2 * side**3 / seconds)
        if seconds > LONG:
            break
    return max(fastest, 2 * side**3 / _least(call))


def _bandwidth(contender: Contender) -> float:
    backend = contender.backend
    compiled, size = backend.compile(_add), SMALLEST
    while True:
        part = np.zeros(size // (2 * PARTS * 4), np.float32)
        pairs = [
            [backend.place(part.copy(), contender.device) for _ in range(2)] for _ in range(PARTS)
        ]

        def call(pairs: list[list[Array]] = pairs) -> None:
            # On as many threads as attention takes, for one alone may not fill the memory's width.
            backend.each(lambda pair: _keep(pair, compiled(*pair)), pairs)
            backend.synchronize(contender.device)

        if _seconds(call) > BRIEF or size >= LARGEST:
            return 1.5 * size / _least(call)  # both are read, and one is written
        size *= 2


def _seconds(call: Callable[[], None]) -> float:
    """Return the seconds of a second call: the first may compile."""
    call()
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _least(call: Callable[[], None]) -> float:
    # It has just run, and needs no more to warm up.
    return min(window(call, WINDOW, WINDOW) for _ in range(WINDOWS))


def _add(a: Array, b: Array) -> Array:
    a += b  # in place where the library can, so that no new memory is touched
    return a


def _keep(pair: list[Any], total: Array) -> None:
    pair[0] = total
