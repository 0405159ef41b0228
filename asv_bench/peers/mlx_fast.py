"""MLX's kernel ``fast`` over the bare `mx.fast.scaled_dot_product_attention` that it calls.

Both alternate in one process, on MLX's default device, at 1024 tokens; a ratio is the median over
the rounds of one window's time over the bare call's in the same round.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
import script
from cpu import Case, both, one_window

import polyattn
from polyattn.bench import timing

CASES = (*both(1, 12, 1024, 64), Case(1, 12, 4, 1024, 1024, 64))
QUICK = both(1, 4, 128, 64)
REFERENCE = "bare"


def calls_of(case: Case) -> dict[str, Callable[[], Any]]:
    """Return the bare call and polyattn's, which evaluate their result."""
    arrays, options = case.arguments()
    query, key, value = (mx.array(array) for array in arrays)
    mx.eval(query, key, value)
    bare = partial(
        mx.fast.scaled_dot_product_attention,
        *(query, key, value),
        scale=case.size**-0.5,
        mask="causal" if case.kind == "causal" else None,
    )
    ours = partial(polyattn.attention, query, key, value, kernel="fast", **options)
    return {REFERENCE: partial(evaluated, bare), "polyattn": partial(evaluated, ours)}


def evaluated(call: Callable[[], mx.array]) -> mx.array:
    """Return the result of a call, computed."""
    result = call()
    mx.eval(result)
    return result


def main(arguments: list[str] | None = None) -> int:
    """Print the table; return 1 if the results differ."""
    parser = script.parser(__doc__, 15)
    quick = "one round of small shapes: a check, no measurement"
    parser.add_argument("--quick", action="store_true", help=quick)
    options = parser.parse_args(arguments)
    rounds, window = (1, 0.0) if options.quick else (options.rounds, 0.1)
    device = mx.default_device().type.name
    machine = script.machine(script.all_threads())
    print(f"{machine}; mlx {mx.__version__} on {device}; {rounds} rounds")
    differ = False
    for case in QUICK if options.quick else CASES:
        calls = calls_of(case)
        bare, ours = (np.array(call()) for call in calls.values())
        error = float(abs(bare - ours).max())
        differ |= error > 1e-5
        seconds = partial(_seconds, calls, window)
        *_, times = timing.rounds(calls, seconds, rounds)
        medians = [statistics.median(times[name]) * 1e3 for name in calls]
        ratio = timing.ratios(times, REFERENCE)["polyattn"]
        print(
            f"{case.shape:30} {case.kind:7} bare {medians[0]:8.3f} ms"
            f"  polyattn {medians[1]:8.3f} ms  ratio {ratio.median:.2f}"
            f" ({ratio.low:.2f} to {ratio.high:.2f})  error {error:.0e}",
            flush=True,
        )
    return 1 if differ else 0


def _seconds(calls: dict[str, Callable[[], Any]], window: float, name: str) -> float:
    return one_window(calls[name], window)


if __name__ == "__main__":
    sys.exit(main())
