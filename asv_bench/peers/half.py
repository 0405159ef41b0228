"""16 bits against 32 on NumPy: the time of a call in float16 and bfloat16 over the same in float32.

A kernel converts tiles to float32 as it computes them. All run alternately in one process. The
error is the largest difference from the float32 result.
"""

from __future__ import annotations

import statistics
import sys
from functools import partial

import numpy as np
import script
from cpu import Case, both, one_window

import polyattn
from polyattn.bench import timing

REFERENCE = "float32"
CASES = (*both(1, 12, 1024, 64), *both(1, 4, 2048, 64), *both(1, 8, 4096, 128))
QUICK = both(1, 2, 64, 16)


def contenders(case: Case) -> dict[str, partial[np.ndarray]]:
    """Return the calls to compare, by dtype."""
    arrays, options = case.arguments()
    dtypes = {REFERENCE: np.float32, "float16": np.float16}
    try:
        import ml_dtypes
    except ImportError:
        pass
    else:
        dtypes["bfloat16"] = ml_dtypes.bfloat16
    attend = partial(polyattn.attention, **options)
    return {
        name: partial(attend, *(array.astype(dtype) for array in arrays))
        for name, dtype in dtypes.items()
    }


def main(arguments: list[str] | None = None) -> int:
    """Print a line for each dtype and case."""
    parser = script.parser(__doc__, 9)
    parser.add_argument("--threads", type=int, default=0, help="(default: all)")
    script.add_quick(parser.add_argument)
    options = parser.parse_args(arguments)
    threads = options.threads or script.all_threads()
    cases, rounds, window = (QUICK, 1, 0.0) if options.quick else (CASES, options.rounds, 0.15)
    print(f"{script.machine(threads, '16 and 32 bits')}; {rounds} rounds")
    with polyattn.use_threads(threads):
        for case in cases:
            calls = contenders(case)
            exact = calls[REFERENCE]()
            seconds = {name: partial(one_window, call, window) for name, call in calls.items()}
            *_, times = timing.rounds(calls, lambda name, run=seconds: run[name](), rounds)
            for name, ratio in timing.ratios(times, REFERENCE).items():
                error = np.abs(calls[name]().astype(np.float32) - exact).max()
                print(
                    f"{case.shape:22} {case.kind:7} {name:9}"
                    f" {statistics.median(times[name]) * 1e3:8.2f} ms, ratio {ratio.median:.2f}"
                    f" ({ratio.low:.2f} to {ratio.high:.2f}), error {error:.1e}",
                    flush=True,
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())
