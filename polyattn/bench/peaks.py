"""Measure the speed of the hardware with the same libraries: the roofline of attention.

The rates of a device are the largest that any backend reached on it, so that all backends are
compared with the same limits.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from polyattn.bench.contender import Contender
from polyattn.bench.timing import seconds_per_call
from polyattn.bench.workload import Workload
from polyattn.plugin import Array

SIDES = (512, 1024, 2048, 4096, 8192)  # sides of the square matrices
LONG = 0.03  # seconds of a product after which a larger one is no faster
SMALLEST, LARGEST = 2**28, 2**31  # bytes that are summed: more than the caches hold
PARTS = 8
BRIEF = 0.002  # seconds of a sum below which its start-up time matters
FOR = 0.05  # seconds of each measurement
NARROW = ("float16", "bfloat16")


@dataclass(frozen=True)
class Peak:
    """The rates of a device."""

    backend: str  # that reached the rate of the product
    device: str  # by the name that all libraries share
    #: Floating-point operations per second in a product of square matrices of the call's dtype.
    product: float
    #: Bytes read and written per second when a large float32 array is added to another in place.
    bandwidth: float


def measure(contender: Contender, dtype: str, until: float = math.inf) -> Peak:
    """Return the rates that a backend reaches on its device.

    Arrays grow until a time of `time.perf_counter`, as far as it can be predicted.
    """
    product = _product(contender, dtype, until)
    return Peak(contender.name, contender.hardware, product, _bandwidth(contender, until))


def roofs(peaks: Iterable[Peak]) -> dict[str, Peak]:
    """Return the largest rates of each device."""
    largest: dict[str, Peak] = {}
    for peak in peaks:
        so_far = largest.get(peak.device, peak)
        best = max(so_far, peak, key=lambda peak: peak.product)
        bandwidth = max(so_far.bandwidth, peak.bandwidth)
        largest[peak.device] = Peak(best.backend, best.device, best.product, bandwidth)
    return largest


def roof(peak: Peak, workload: Workload, length: int) -> float:
    """Return the rate that a call cannot exceed, limited by the products or by the memory.

    Memory traffic counts inputs and output once.
    """
    intensity = workload.flops(length) / workload.bytes(length)
    return min(peak.product, intensity * peak.bandwidth)


def _product(contender: Contender, dtype: str, until: float = math.inf) -> float:
    backend = contender.backend
    # Attention may compute 16-bit scores in float32, where a library has slow products of 16 bits.
    ways = [(backend.matmul, "float32" if dtype in NARROW else dtype)]
    ways += [(backend.xp.matmul, dtype)] if dtype in NARROW else []
    return max(
        _product_by(contender, backend.compile(multiply), own, until) for multiply, own in ways
    )


def _product_by(
    contender: Contender, multiply: Callable[..., Array], dtype: str, until: float
) -> float:
    """Return the largest rate over squares that grow until a product takes long."""
    backend, fastest = contender.backend, 0.0
    # Random numbers: on ones a GPU draws less power and runs faster than on real data.
    block = np.random.default_rng(0).standard_normal((SIDES[0], SIDES[0]), np.float32)
    for side in SIDES:
        square = np.tile(block, (side // SIDES[0],) * 2).astype(dtype)
        a, b = (backend.place(square, contender.device) for _ in range(2))

        def call(a: Array = a, b: Array = b) -> None:
            multiply(a, b)
            backend.synchronize(contender.device)

        seconds = _least(call)
        fastest = max(fastest, 2 * side**3 / seconds)
        if seconds > LONG or _is_too_late(8 * seconds, until):
            break
    return fastest


def _bandwidth(contender: Contender, until: float = math.inf) -> float:
    backend = contender.backend
    compiled, size = backend.compile(_add), SMALLEST
    while True:
        part = np.zeros(size // (2 * PARTS * 4), np.float32)
        pairs = [
            [backend.place(part.copy(), contender.device) for _ in range(2)] for _ in range(PARTS)
        ]

        def call(pairs: list[list[Array]] = pairs) -> None:
            # On as many threads as attention uses: one may not reach the full bandwidth.
            backend.each(lambda pair: _keep(pair, compiled(*pair)), pairs)
            backend.synchronize(contender.device)

        seconds = _least(call)
        if seconds > BRIEF or size >= LARGEST or _is_too_late(2 * seconds, until):
            return 1.5 * size / seconds  # both arrays are read and one is written
        size *= 2


def _is_too_late(seconds: float, until: float) -> bool:
    """Return whether there is no time to measure a call of so many seconds."""
    return time.perf_counter() + max(FOR, 2 * seconds) > until


def _least(call: Callable[[], None]) -> float:
    """Return the seconds of the fastest call: the others were delayed by other work."""
    call()  # the first may compile
    fastest, end = math.inf, time.perf_counter() + FOR
    while time.perf_counter() < end:
        fastest = min(fastest, seconds_per_call(call))
    return fastest


def _add(a: Array, b: Array) -> Array:
    a += b  # in place if the library can, so that no new memory is touched
    return a


def _keep(pair: list[Any], total: Array) -> None:
    pair[0] = total
