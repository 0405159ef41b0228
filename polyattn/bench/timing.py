"""Time calls in turns, so that their times can be compared.

On a shared machine only times measured side by side are comparable. Every call runs in a window of
each round, and the order is reversed from one round to the next. A rest before each window lets
idle threads stop spinning: those of OpenBLAS spin for a tenth of a second and would slow down the
next call.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

FEWEST = 3  # rounds, where time is short


class Turns(NamedTuple):
    """How calls are timed in turns."""

    rounds: int = 7  # at most
    window: float = 0.04  # seconds of calls in a round, after half of it to warm up
    rest: float = 0.1  # seconds before a window
    clock: Callable[[], float] = time.perf_counter


TURNS = Turns()


class Spread(NamedTuple):
    """The median and the quartiles of times, in seconds per call."""

    median: float
    low: float
    high: float


def alternate(
    calls: Mapping[str, Callable[[], Any]],
    turns: Turns,
    expected: Mapping[str, float] | None = None,
    seconds: float = math.inf,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, list[float]]:
    """Return seconds per call in each round, for calls that run in turns.

    Each call has run before. One that is `expected` to fill its window is not warmed up. The rounds
    stop after `seconds`, but there are at least three.
    """

    def measure(name: str) -> float:
        say(name)
        time.sleep(turns.rest)
        if (expected or {}).get(name, 0.0) < turns.window:
            seconds_per_call(calls[name], turns.window / 2, turns.clock)
        return seconds_per_call(calls[name], turns.window, turns.clock)

    start = began = time.perf_counter()
    times: dict[str, list[float]] = {}
    for times in rounds(calls, measure, turns.rounds):
        now = time.perf_counter()
        done = len(next(iter(times.values()), []))
        if done >= FEWEST and now - start + (now - began) > seconds:
            break
        began = now
    return times


def rounds(
    names: Iterable[str], measure: Callable[[str], float], most: int
) -> Iterator[dict[str, list[float]]]:
    """Measure by turns, in reversed order every other round; yield all times after each round."""
    order = list(names)
    times: dict[str, list[float]] = {name: [] for name in order}
    for _ in range(most):
        for name in order:
            times[name].append(measure(name))
        order.reverse()
        yield times


def ratios(times: Mapping[str, list[float]], reference: str) -> dict[str, Spread]:
    """Return the times divided by those of a reference in the same rounds."""
    return {
        name: spread_of([a / b for a, b in zip(own, times[reference], strict=True)])
        for name, own in times.items()
    }


def seconds_per_call(
    call: Callable[[], Any], seconds: float = 0.0, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Return the mean time of calls that together take so many seconds at least, or of one."""
    calls, start = 0, clock()
    while True:
        call()
        calls += 1
        elapsed = clock() - start
        if elapsed >= seconds:
            return elapsed / calls


def spread_of(times: list[float]) -> Spread:
    """Return the median and the quartiles of the times."""
    if len(times) == 1:
        return Spread(times[0], times[0], times[0])
    low, median, high = statistics.quantiles(times, n=4, method="inclusive")
    return Spread(median, low, high)
