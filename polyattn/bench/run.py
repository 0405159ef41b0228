"""The whole of a measurement, within a budget of time.

Short lengths come first, so that there is something to see soon. What is left of the budget is
shared among the lengths that are left, the longer the more; a backend that would burst its share
sits out, and the report says so.
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
from polyattn.bench.exact import Rows, exact_rows, largest_error
from polyattn.bench.memory import peak_memory
from polyattn.bench.report import Report, Row, number
from polyattn.bench.table import digits
from polyattn.bench.timing import FEWEST, REST, alternate, spread_of

__all__ = ["measure", "measure_peaks"]

# The fewest that a row takes: to compile, to look at, for its memory, and the rounds.
CALLS = 3 + FEWEST
# Seconds for the rounds of the first of several lengths, so that there is soon something to see.
SOON = 1.0
# How much more of the budget a length has than the one before.
GROWTH = 1.5
# How much faster than a product that was measured on a busy machine a call may be at the most.
DOUBT = 10.0
# Seconds that a backend has at a length however little is left, so that short calls never sit out.
LEAST = 1.0

Say = Callable[[str], None]


class Started(NamedTuple):
    """A call that has run, the row that it will have, and about how many seconds it takes."""

    running: Running
    row: Row
    seconds: float


def measure_peaks(report: Report, contenders: Sequence[Contender], say: Say) -> None:
    """Measure the rates of each backend; one that fails here has none."""
    for contender in contenders:
        say(f"{contender.name}, a matrix product and a sum")
        time.sleep(REST)
        with suppress(Exception):  # such as too little memory; the call itself may do with less
            report.peaks.append(peaks.measure(contender, report.workload.dtype))


def measure(
    report: Report,
    contenders: Sequence[Contender],
    lengths: Sequence[int],
    deadline: float,
    say: Say,
) -> Iterator[list[Row]]:
    """Measure every length, and yield its rows when they are in the report."""
    roofs, before = report.roofs, 0
    bounds = {
        one.name: DOUBT * roofs[one.hardware].product for one in contenders if one.hardware in roofs
    }
    speeds = dict(bounds)  # operations a second at the length before
    for done, length in enumerate(lengths):
        if length > 2 * before:  # much shorter calls say little of this one
            speeds = dict(bounds)
        before = length
        share = (deadline - time.perf_counter()) * _share(len(lengths) - done)
        most = SOON if done == 0 and len(lengths) > 1 else share
        rows = _measure_length(report, contenders, length, share, most, speeds, say)
        for row in rows:
            rate = report.rate(row)
            if rate is not None:
                speeds[row.backend] = rate
        report.rows += rows
        yield rows


def _measure_length(
    report: Report,
    contenders: Sequence[Contender],
    length: int,
    share: float,
    most: float,
    speeds: dict[str, float],
    say: Say,
) -> list[Row]:
    workload, began = report.workload, time.perf_counter()
    most_each = max(share / len(contenders), LEAST)
    rows = {}
    for one in contenders:
        foreseen = workload.flops(length) / speeds.get(one.name, math.inf)
        note = _left_out(foreseen) if CALLS * foreseen > most_each else None
        rows[one.name] = Row(length, one.name, one.hardware, note=note)
    contenders = [one for one in contenders if rows[one.name].note is None]
    if not contenders:
        return list(rows.values())
    try:
        arrays = workload.arrays(length)
        exact = exact_rows(workload, arrays, length)
    except Exception as error:  # such as too little memory
        return [replace(row, note=row.note or _said(error)) for row in rows.values()]
    started: dict[str, Started] = {}
    for contender in contenders:
        name = contender.name
        say(f"{length}: {name}, first calls")
        try:
            started[name] = _start(report, contender, rows[name], arrays, exact)
        except Exception as error:  # such as too little memory, which says nothing of the others
            rows[name] = replace(rows[name], note=_said(error))
    left = share - (time.perf_counter() - began)
    rows |= _timed_rows(started, left, most, lambda text: say(f"{length}: {text}"))
    return list(rows.values())


def _timed_rows(started: dict[str, Started], left: float, most: float, say: Say) -> dict[str, Row]:
    """Return the rows of calls that have run, with the times of as many rounds as there is time."""
    each = max(left / max(len(started), 1), LEAST)
    slow = {name for name, one in started.items() if FEWEST * one.seconds > each}
    failed: dict[str, Exception] = {}
    calls = {
        name: _kept(name, one.running, failed) for name, one in started.items() if name not in slow
    }
    expected = {name: one.seconds for name, one in started.items()}
    times = alternate(calls, expected, min(left, most), say)
    rows = {}
    for name, one in started.items():
        own = times.get(name, [one.seconds])
        median, low, high = spread_of(own)
        note = "one call alone, for a lack of time" if name in slow else None
        rows[name] = (
            replace(one.row, note=_said(failed[name]))
            if name in failed
            else replace(one.row, seconds=median, low=low, high=high, rounds=len(own), note=note)
        )
    return rows


def _start(
    report: Report, contender: Contender, row: Row, arrays: Sequence[Any], exact: list[Rows]
) -> Started:
    """Return a call that has run, with all that is known of it but its time."""
    running = contender.start(report.workload, arrays)
    first, output = _timed(running)
    error = largest_error(running.fetched(output), exact)
    del output
    seconds, _ = _timed(running)
    memory = peak_memory(running, report.workload.output_bytes(row.length))
    row = replace(row, kernel=running.kernel, first=first, error=number(error), memory=memory)
    return Started(running, row, seconds)


def _kept(name: str, running: Running, failed: dict[str, Exception]) -> Callable[[], None]:
    """Return the call as one that fails once, keeps why, and stops no other."""

    def call() -> None:
        if name not in failed:
            try:
                running()
            except Exception as error:
                failed[name] = error

    return call


def _said(error: Exception) -> str:
    lines = f"{type(error).__name__}: {error}".splitlines()
    return "".join(letter for letter in lines[0] if letter.isprintable())


def _timed(running: Running) -> tuple[float, Any]:
    start = time.perf_counter()
    output = running()
    return time.perf_counter() - start, output


def _share(left: int) -> float:
    """Return the first share of a whole that is cut for the lengths left, each above the last."""
    return 1 / sum(GROWTH**n for n in range(left))


def _left_out(seconds: float) -> str:
    about = digits(seconds)
    return f"left out: a call would take about {about} s or more; raise --seconds to have it"
