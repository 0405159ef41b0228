"""Shared parts of the scripts in this folder: options, comparisons of calls, and what is printed.

A script gives the calls to compare, by name. Each round gives every call a window in turn, and a
ratio is the median over the rounds of one window's time over the reference's in the same round.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import polyattn
from polyattn.bench import timing
from polyattn.bench.machine import processor, versions

Call = Callable[[], Any]
Options = argparse.Namespace
ONE_CALL = 1e-9  # seconds of a window: one call, after one to warm up
FLAGS: dict[str, dict[str, Any]] = {
    "quick": {"action": "store_true", "help": "one round, of small shapes: no measurement"},
    "threads": {"type": int, "help": "of each contender, 0 for all cores (default: %(default)s)"},
    "cases": {"metavar": "TEXT", "help": "only cases with this text"},
    "window": {"type": float, "help": "seconds of calls in a round (default: %(default)s)"},
    "json": {"type": Path, "metavar": "FILE", "help": "write the times"},
    "plot": {"type": Path, "metavar": "FILE.png", "help": "draw a plot"},
    "cpu-time": {
        "action": "store_true",
        "help": "count processor time, for a busy machine; with one thread",
    },
}
DEFAULTS: dict[str, Any] = {"quick": False, "threads": 0, "cases": "", "json": None, "plot": None}
DEFAULTS |= {"cpu_time": False, "window": 0.1, "rest": timing.REST}  # the last two in seconds

# ---- options -----------------------------------------------------------------------------------


def parser(doc: str, rounds: int, *flags: str, **defaults: Any) -> argparse.ArgumentParser:
    """Return a parser with ``--rounds`` and some of `FLAGS`.

    It is described by the first paragraph of a docstring. `defaults` replace those of `DEFAULTS`.
    """
    arguments = argparse.ArgumentParser(description=doc.split("\n\n")[0])
    arguments.set_defaults(**DEFAULTS | defaults)
    arguments.add_argument(
        "--rounds", type=int, default=rounds, help="alternating rounds (default: %(default)s)"
    )
    for flag in flags:
        arguments.add_argument(f"--{flag}", **FLAGS[flag])
    return arguments


def read(parser: argparse.ArgumentParser, arguments: list[str] | None = None) -> Options:
    """Parse the command line; a quick run has one round of one call each."""
    options = parser.parse_args(arguments)
    if options.quick:
        options.rounds, options.window = 1, 0.0
    options.threads = 1 if options.cpu_time else options.threads or all_threads()
    return options


def all_threads() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


# ---- comparisons -------------------------------------------------------------------------------


class Result(NamedTuple):
    """A call: its seconds in each round, their ratio to the reference's, and the largest error."""

    name: str
    times: list[float]
    ratio: timing.Spread
    error: float | None

    @property
    def seconds(self) -> float:
        """The median."""
        return statistics.median(self.times)

    def facts(self) -> dict[str, Any]:
        """Return the result for JSON."""
        ratio = dict(zip(("ratio", "low", "high"), self.ratio, strict=True))
        return {"contender": self.name, "seconds": self.seconds, **ratio, "error": self.error}


def compare(
    calls: dict[str, Call],
    options: Options,
    error: Callable[[Any, Any], float] | None = None,
    exact: Any = None,
    parts: int = 1,
) -> list[Result]:
    """Time calls in turns, over the first; `parts` are those of a call that are timed as one.

    An `error` is that of a result against the `exact` one, by default that of the first call.
    """
    errors = {}
    for name, call in calls.items():  # also warms up
        result = call()
        exact = result if exact is None else exact
        errors[name] = None if error is None else error(result, exact)
    clock = time.process_time if options.cpu_time else time.perf_counter

    def measure(name: str) -> float:
        return window(calls[name], options.window, options.rest, clock) / parts

    *_, times = timing.rounds(calls, measure, options.rounds)
    ratios = timing.ratios(times, next(iter(calls)))
    return [Result(name, own, ratios[name], errors[name]) for name, own in times.items()]


def window(
    call: Call,
    seconds: float,
    rest: float = timing.REST,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Return seconds per call over a window, after a rest; without a window, of one call."""
    if seconds:
        time.sleep(rest)
    return timing.window(call, seconds, clock=clock)


def difference(result: Any, exact: Any) -> float:
    """Return the largest difference of two results."""
    one, other = (np.asarray(x, dtype=np.float32) for x in (result, exact))
    return float(np.abs(one - other).max())


# ---- what is printed ---------------------------------------------------------------------------


def machine(threads: int) -> str:
    """Describe the processor and the libraries that the times were measured on."""
    return f"{processor()}, {threads} threads each; {versions()}; {compiled()}"


def compiled() -> str:
    """Return the instruction set of the compiled kernel, or that there is no such kernel."""
    shape = (1, 1)
    candidates = polyattn.explain(shape, shape, shape, backend="numpy").candidates
    if all(one.kernel != "native" or one.status == "unavailable" for one in candidates):
        return "without polyattn-native"
    from polyattn_native.library import VARIABLE, instruction_sets, library

    return f"polyattn-native {os.environ.get(VARIABLE) or instruction_sets(library())[0]}"


@contextlib.contextmanager
def measuring(options: Options, **facts: Any) -> Iterator[Callable[..., None]]:
    """Hold polyattn to the threads, and yield `show`, which prints results; write JSON at the end.

    ``show(title, results, detail)`` prints a line for each: its time, what `detail` tells of it,
    its ratio with quartiles, and its error.
    """
    where = machine(options.threads)
    print(f"{where}; {options.rounds} rounds", flush=True)
    written: list[dict[str, Any]] = []

    def show(
        title: str, results: list[Result], detail: Callable[[Result], str] = lambda result: ""
    ) -> None:
        width = max(14, *(len(result.name) for result in results))
        for one in results:
            text = f"{title:34} {one.name:{width}} {one.seconds * 1e3:10.3f} ms"
            median, low, high = (f"{number:.3f}" for number in one.ratio)
            text += f"  ratio {median} ({low} to {high})"
            text += "" if one.error is None else f"  error {one.error:.1e}"
            print(text + detail(one), flush=True)
        written.extend({"case": title} | result.facts() for result in results)

    with polyattn.use_threads(options.threads):
        yield show
    if options.json:
        text = json.dumps({"machine": where, **facts, "results": written}, indent=1)
        options.json.write_text(text, encoding="utf-8")


def added(results: list[Result]) -> str:
    """Return what the second call adds to the first, in microseconds, with quartiles."""
    bare, ours = results
    spread = timing.spread_of([a - b for a, b in zip(ours.times, bare.times, strict=True)])
    median, low, high = (f"{second * 1e6:.1f}" for second in spread)
    return (
        f"{bare.name} {bare.seconds * 1e6:.1f} µs, {ours.name} {ours.seconds * 1e6:.1f} µs,"
        f" added {median} ({low} to {high}) µs, ratio {ours.ratio.median:.2f}"
    )
