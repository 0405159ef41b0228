"""Times that may be compared: those of calls that took turns.

A shared machine's milliseconds are worth little, and those of what ran side by side a great deal.
So every call gets a window in turn, the order is reversed each round, and before each window there
is a rest, in which threads that spin for more work give up: OpenBLAS's do so for a tenth of a
second, and would slow whoever comes next.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

__all__ = ["FEWEST", "REST", "Spread", "alternate", "spread_of", "window"]

REST = 0.1  # seconds
WINDOW = 0.04  # seconds
FEWEST, MOST = 3, 7  # rounds


class Spread(NamedTuple):
    """The median of some times and their quartiles, in seconds a call."""

    median: float
    low: float
    high: float


def alternate(
    calls: Mapping[str, Callable[[], Any]],
    expected: Mapping[str, float],
    seconds: float,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, list[float]]:
    """Return seconds a call, by round, of calls that take turns."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    order = list(calls)
    start = time.perf_counter()
    for done in range(MOST):
        began = time.perf_counter()
        for name in order:
            say(f"{name}, round {done + 1}")
            time.sleep(REST)
            found[name].append(window(calls[name], WINDOW, expected[name]))
        order.reverse()
        now = time.perf_counter()
        if done + 1 >= FEWEST and now - start + (now - began) > seconds:
            break
    return found


def window(call: Callable[[], Any], seconds: float = WINDOW, expected: float = 0.0) -> float:
    """Return seconds a call over a window of calls, after half a one to warm up.

    A call that is expected to fill the window gains nothing by warming up, and has none.
    """
    if expected < seconds:
        _seconds_a_call(call, seconds / 2)
    return _seconds_a_call(call, seconds)


def _seconds_a_call(call: Callable[[], Any], seconds: float) -> float:
    calls, start = 0, time.perf_counter()
    while True:
        call()
        calls += 1
        elapsed = time.perf_counter() - start
        if elapsed >= seconds:
            return elapsed / calls


def spread_of(times: list[float]) -> Spread:
    """Return the median and the quartiles of some times."""
    if len(times) == 1:
        return Spread(times[0], times[0], times[0])
    low, median, high = statistics.quantiles(times, n=4, method="inclusive")
    return Spread(median, low, high)
