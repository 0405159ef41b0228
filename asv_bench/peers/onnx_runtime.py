"""ONNX Runtime as the engine ``backend="onnxruntime"``, and its operator against the formula.

Three tables, each of calls that alternate in one process. The engine against torch, as ratios. What
a repeated call adds to a run of the bare session, in microseconds. And an exported call that is one
node, Attention, against the same call written out in primitive operators, both in ONNX Runtime.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import onnxruntime
import script
from cpu import Case, both, contenders, one_window

import polyattn
from polyattn.bench import timing
from polyattn.export import onnx
from polyattn_onnx.node import Node
from polyattn_onnxruntime.sessions import session_of

ENGINE, REFERENCE = "onnxruntime", "torch"
CASES = (*both(1, 12, 128, 64), *both(1, 12, 512, 64))
QUICK = both(1, 4, 128, 64)
TINY = Case(1, 1, 1, 16, 16, 16)
LENGTHS = (512, 2048)

Calls = dict[str, Callable[[], Any]]


def calls_of(case: Case, threads: int) -> Calls:
    """Return torch, a bare session, and the engine."""
    arrays, options = case.arguments()
    peers = {name: call for name, call in contenders(case, threads) if name in (REFERENCE, ENGINE)}
    return {
        REFERENCE: peers[REFERENCE],
        "bare session": peers[ENGINE],
        "polyattn": partial(polyattn.attention, *arrays, backend=ENGINE, **options),
    }


def exported(case: Case, threads: int) -> Calls:
    """Return sessions of a call that is one node, and of the same call written out."""
    arrays, options = case.arguments()
    names = ("query", "key", "value")
    shapes = dict(zip(names, (array.shape for array in arrays), strict=True))
    feed = dict(zip(names, arrays, strict=True))
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = threads
    settings.add_session_config_entry("session.intra_op.allow_spinning", "0")
    calls: Calls = {}
    for name, kernel in (("one node", "native"), ("written out", "dense")):
        model = onnx(polyattn.attention, shapes, options=options | {"kernel": kernel})
        session = onnxruntime.InferenceSession(model.SerializeToString(), settings)
        calls[name] = partial(session.run, None, feed)
    return calls


def error_of(case: Case, call: Callable[[], Any]) -> float:
    """Return the largest difference from polyattn's own kernel of NumPy."""
    arrays, options = case.arguments()
    found = call()
    found = np.asarray(found[0] if isinstance(found, list) else found)
    return float(abs(found - polyattn.attention(*arrays, backend="numpy", **options)).max())


def measure(calls: Calls, rounds: int, window: float) -> dict[str, list[float]]:
    """Return seconds per call in each round."""
    *_, times = timing.rounds(calls, lambda name: one_window(calls[name], window), rounds)
    return times


def table(case: Case, calls: Calls, rounds: int, window: float, reference: str) -> None:
    """Print a line for each contender: its time, ratio with quartiles, and error."""
    errors = {name: error_of(case, call) for name, call in calls.items()}
    times = measure(calls, rounds, window)
    for name, ratio in timing.ratios(times, reference).items():
        seconds = statistics.median(times[name])
        print(
            f"{case.shape:24} {case.kind:7} {name:13} {seconds * 1e3:9.3f} ms {ratio.median:7.2f}"
            f" ({ratio.low:.2f} to {ratio.high:.2f})  error {errors[name]:.0e}",
            flush=True,
        )


def added(rounds: int, window: float) -> None:
    """Print what a repeated call adds to a run of the session that it keeps, on one thread."""
    arrays, _ = TINY.arguments()
    size = TINY.size
    node = Node(
        *(24, "float32", TINY.heads, TINY.groups, size, size),
        *(False, (-1, -1), size**-0.5, 0.0, None, False),
    )
    session, names = session_of(node, "cpu", 1)
    feed = dict(zip(names, arrays, strict=True))
    with polyattn.use_threads(1):
        calls: Calls = {
            "session": partial(session.run, None, feed),
            "polyattn": partial(polyattn.attention, *arrays, backend=ENGINE),
        }
        for call in calls.values():
            call()
        times = measure(calls, rounds, window)
    bare, ours = ([second * 1e6 for second in times[name]] for name in calls)
    spread = timing.spread_of([a - b for a, b in zip(ours, bare, strict=True)])
    print(
        f"{TINY.shape} bare session {statistics.median(bare):.1f} µs, polyattn"
        f" {statistics.median(ours):.1f} µs, added {spread.median:.1f}"
        f" ({spread.low:.1f} to {spread.high:.1f}) µs"
    )


def main(arguments: list[str] | None = None) -> int:
    """Print the tables."""
    parser = script.parser(__doc__, 15)
    add = parser.add_argument
    add("--quick", action="store_true", help="one round of small shapes: a check, no measurement")
    add("--threads", type=int, default=2, help="of each contender (default: %(default)s)")
    options = parser.parse_args(arguments)
    rounds, window = (1, 0.0) if options.quick else (options.rounds, 0.1)
    print(f"{script.machine(options.threads)}; {rounds} rounds")
    with polyattn.use_threads(options.threads):
        print("\nthe engine, over torch")
        for case in QUICK if options.quick else CASES:
            table(case, calls_of(case, options.threads), rounds, window, REFERENCE)
        print("\na repeated call")
        added(rounds, window / 5)
        print("\nan exported call, over one node")
        for length in LENGTHS[:1] if options.quick else LENGTHS:
            masked = [Case(1, 12, 12, length, length, 64, kind) for kind in ("alibi", "sinks")]
            for case in (*both(1, 12, length, 64), *masked):
                table(case, exported(case, options.threads), rounds, window, "one node")
    return 0


if __name__ == "__main__":
    sys.exit(main())
