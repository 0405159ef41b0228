"""Measure all backends at all lengths within a time budget.

Lengths are measured in order. The remaining budget is shared among the remaining lengths, more for
the longer ones. A backend that would exceed its share at a length is left out there, with a note
in the results.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

from polyattn.bench import peaks
from polyattn.bench.contender import Contender, Running
from polyattn.bench.results import BenchResults, Timing
from polyattn.bench.table import digits
from polyattn.bench.timing import FEWEST, TURNS, alternate, ratios, seconds_per_call, spread_of
from polyattn.bench.workload import Workload

# Smallest number of calls for a row: to compile, to estimate, and the rounds.
CALLS = 2 + FEWEST
# Seconds for the rounds of the first of several lengths, so that rows are printed soon.
SOON = 1.0
# Budget of a length relative to the previous one.
GROWTH = 1.5
# The factor by which a call may be faster than a matrix product measured on a busy machine.
DOUBT = 10.0
# Minimum seconds for a backend at a length, so that short calls are never left out.
LEAST = 1.0

Say = Callable[[str], None]


class Started(NamedTuple):
    """A call that has run once, its row without times, and about how many seconds it takes."""

    running: Running
    row: Timing
    seconds: float


def measure_peaks(
    results: BenchResults, contenders: Sequence[Contender], deadline: float, say: Say
) -> None:
    """Measure the hardware rates by each backend; one that fails is skipped.

    Half of the time is shared among them. Each measures at least its smallest arrays: the rates of
    some backends only would be no roof for the others.
    """
    end = (time.perf_counter() + deadline) / 2
    # One of each backend, whose kernels have the same products.
    firsts = {(one.stem, one.device): one for one in reversed(contenders)}
    contenders = list(reversed(firsts.values()))
    for done, contender in enumerate(contenders):
        say(f"{contender.name}, a matrix product and a sum")
        time.sleep(TURNS.rest)
        now = time.perf_counter()
        until = now + (end - now) / (len(contenders) - done)
        with suppress(Exception):  # such as too little memory: the call may need less
            results.peaks.append(peaks.measure(contender, results.workload.dtype, until))


def measure(
    results: BenchResults,
    contenders: Sequence[Contender],
    lengths: Sequence[int],
    deadline: float,
    say: Say,
) -> Iterator[list[Timing]]:
    """Add the rows of each length to the results and yield them.

    The `deadline` is a time of `time.perf_counter`; it is kept as far as times can be predicted.
    """
    roofs, before = results.roofs, 0
    bounds = {
        one.name: DOUBT * roofs[one.hardware].product for one in contenders if one.hardware in roofs
    }
    speeds = dict(bounds)  # operations per second at the length before
    for done, length in enumerate(lengths):
        if length > 2 * before:  # the speed of much shorter calls predicts little
            speeds = dict(bounds)
        before = length
        share = (deadline - time.perf_counter()) * _share(len(lengths) - done)
        most = SOON if done == 0 and len(lengths) > 1 else share
        rows = _measure_length(results, contenders, length, share, most, speeds, say)
        for row in rows:
            rate = results.rate(row)
            if rate is not None:
                speeds[row.backend] = rate
        results.rows += rows
        yield rows


def _measure_length(
    results: BenchResults,
    contenders: Sequence[Contender],
    length: int,
    share: float,
    most: float,
    speeds: dict[str, float],
    say: Say,
) -> list[Timing]:
    workload, began = results.workload, time.perf_counter()
    most_each, first = max(share / len(contenders), LEAST), contenders[0].name
    rows = {}
    for one in contenders:
        foreseen = workload.flops(length) / speeds.get(one.name, math.inf)
        note = None
        if CALLS * foreseen > most_each:
            note = (
                f"left out: a call would take about {digits(foreseen)} s or more; raise --seconds"
                " to include it"
            )
        rows[one.name] = Timing(length, one.name, one.hardware, note=note)
    contenders = [one for one in contenders if rows[one.name].note is None]
    if not contenders:
        return list(rows.values())
    try:
        arrays = workload.arrays(length)
    except Exception as error:  # such as too little memory
        return [replace(row, note=row.note or _first_line(error)) for row in rows.values()]
    started: dict[str, Started] = {}
    for contender in contenders:
        name = contender.name
        say(f"{length}: {name}, first calls")
        try:
            started[name] = _start(workload, contender, rows[name], arrays)
        except Exception as error:  # such as too little memory: the others go on
            rows[name] = replace(rows[name], note=_first_line(error))
    left = share - (time.perf_counter() - began)
    rows |= _timed_rows(started, first, left, most, lambda text: say(f"{length}: {text}"))
    return list(rows.values())


def _timed_rows(
    started: dict[str, Started], first: str, left: float, most: float, say: Say
) -> dict[str, Timing]:
    """Return the rows of started calls, timed for as many rounds as the time allows."""
    each = max(left / max(len(started), 1), LEAST)
    slow = {name for name, one in started.items() if FEWEST * one.seconds > each}
    calls = {name: one.running for name, one in started.items() if name not in slow}
    expected = {name: one.seconds for name, one in started.items()}
    times = alternate(calls, TURNS, expected, min(left, most), say)
    over_first = ratios(times, first) if first in times else {}
    rows = {}
    for name, one in started.items():
        own = times.get(name, [one.seconds])
        median, low, high = spread_of(own)
        rows[name] = replace(
            one.row,
            seconds=median,
            low=low,
            high=high,
            ratio=over_first[name].median if name in over_first else None,
            rounds=len(own),
            note="only one call, for lack of time" if name in slow else None,
        )
    return rows


def _start(workload: Workload, contender: Contender, row: Timing, arrays: Sequence[Any]) -> Started:
    """Run the call of a contender twice, first to compile it and then to foresee its time."""
    running = contender.start(workload, arrays)
    first = seconds_per_call(running)
    row = replace(row, kernel=running.kernel, origin=running.origin, first=first)
    return Started(running, row, seconds_per_call(running))


def _first_line(error: Exception) -> str:
    lines = f"{type(error).__name__}: {error}".splitlines()
    return "".join(char for char in lines[0] if char.isprintable())


def _share(left: int) -> float:
    """Return the share of the remaining budget for the next of `left` lengths."""
    return 1 / sum(GROWTH**n for n in range(left))
