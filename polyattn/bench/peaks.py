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
from polyattn.bench.workload import Workload
from polyattn.plugin import Array

__all__ = ["Peak", "measure", "roof", "roofs"]

SIDES = (512, 1024, 2048, 4096, 8192)  # of the squares that are multiplied
LONG = 0.03  # seconds a product, beyond which a larger one says no more
SMALLEST, LARGEST = 2**28, 2**31  # bytes that are summed: beyond the caches
PARTS = 8
BRIEF = 0.002  # seconds a sum, below which starting it counts
FOR = 0.05  # seconds that each is measured
NARROW = ("float16", "bfloat16")


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
    # Attention may compute 16-bit scores in float32, where a library has slow products of 16 bits.
    ways = [(backend.matmul, "float32" if dtype in NARROW else dtype)]
    ways += [(backend.xp.matmul, dtype)] if dtype in NARROW else []
    return max(_product_by(contender, backend.compile(multiply), own) for multiply, own in ways)


def _product_by(contender: Contender, multiply: Callable[..., Array], dtype: str) -> float:
    """Return the largest rate over squares that grow until one takes long."""
    backend, fastest = contender.backend, 0.0
    # Random numbers: a GPU draws less power for ones, and runs faster than it would at work.
    block = np.random.default_rng(0).standard_normal((SIDES[0], SIDES[0]), np.float32)
    for side in SIDES:
        square = np.tile(block, (side // SIDES[0],) * 2).astype(dtype)
        a, b = (backend.place(square, contender.device) for _ in range(2))

        def call(a: Array = a, b: Array = b) -> None:
            multiply(a, b)
            backend.synchronize(contender.device)

        seconds = _least(call)
        fastest = max(fastest, 2 * side**3 / seconds)
        if seconds > LONG:
            break
    return fastest


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

        seconds = _least(call)
        if seconds > BRIEF or size >= LARGEST:
            return 1.5 * size / seconds  # both are read, and one is written
        size *= 2


def _least(call: Callable[[], None]) -> float:
    """Return the seconds of the fastest of some calls: the others had to wait for something."""
    call()  # the first may compile
    fastest, end = float("inf"), time.perf_counter() + FOR
    while True:
        start = time.perf_counter()
        call()
        now = time.perf_counter()
        fastest = min(fastest, now - start)
        if now >= end:
            return fastest


def _add(a: Array, b: Array) -> Array:
    a += b  # in place where the library can, so that no new memory is touched
    return a


def _keep(pair: list[Any], total: Array) -> None:
    pair[0] = total
