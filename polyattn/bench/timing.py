"""Time calls in turns, so that their times can be compared.

On a shared machine only times measured side by side are comparable. Every call runs in a window of
each round, and the order is reversed from one round to the next. A rest before each window lets
idle threads stop spinning: those of OpenBLAS spin for a tenth of a second and would slow down the
next call.
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
    """The median and the quartiles of times, in seconds per call."""

    median: float
    low: float
    high: float


def alternate(
    calls: Mapping[str, Callable[[], Any]],
    expected: Mapping[str, float],
    seconds: float,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, list[float]]:
    """Return seconds per call in each round, for calls that run in turns.

    Each call has run before and is `expected` to take that many seconds. The rounds stop after
    `seconds`, but there are at least three.
    """
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
    """Return seconds per call over a window of calls, after half a window to warm up.

    A call that is expected to fill the window is not warmed up.
    """
    if expected < seconds:
        _seconds_per_call(call, seconds / 2)
    return _seconds_per_call(call, seconds)


def _seconds_per_call(call: Callable[[], Any], seconds: float) -> float:
    calls, start = 0, time.perf_counter()
    while True:
        call()
        calls += 1
        elapsed = time.perf_counter() - start
        if elapsed >= seconds:
            return elapsed / calls


def spread_of(times: list[float]) -> Spread:
    """Return the median and the quartiles of the times."""
    if len(times) == 1:
        return Spread(times[0], times[0], times[0])
    low, median, high = statistics.quantiles(times, n=4, method="inclusive")
    return Spread(median, low, high)
