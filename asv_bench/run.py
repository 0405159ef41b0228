"""Time every backend in the environment that runs this, and print them side by side.

asv does the timing; this starts it, and pivots what it wrote into a table: a row for each case, a
column for each backend that is here. With --quick each case runs once, as a check that it runs.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from itertools import product
from pathlib import Path

from benchmarks.machine import processor, versions

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parent / ".asv" / "results"
ALWAYS_HERE = ("numpy", "array-api")


def main() -> int:
    """Run asv and print the table; return 1 if a backend that must be here gave nothing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="run each case once")
    parser.add_argument("--bench", default="Forward", help="benchmarks to run (default: Forward)")
    parser.add_argument("--show-stderr", action="store_true", help="show why a case failed")
    options = parser.parse_args()
    asv = [sys.executable, "-m", "asv"]
    subprocess.run([*asv, "machine", "--yes"], cwd=HERE, check=True, stdout=subprocess.DEVNULL)
    commit = _output("git", "rev-parse", "HEAD")
    # --quick alone would save nothing to make a table of.
    effort = ["--attribute", "repeat=1", "--attribute", "rounds=1"] if options.quick else []
    command = ["run", f"--environment=existing:{sys.executable}", f"--set-commit-hash={commit}"]
    effort += ["--show-stderr"] if options.show_stderr else []
    run = subprocess.run([*asv, *command, "--bench", options.bench, *effort], cwd=HERE)
    if run.returncode:
        return run.returncode
    newest = max(RESULTS.glob(f"*/{commit[:8]}-*.json"), key=lambda file: file.stat().st_mtime)
    if options.quick:
        print("\n--quick: one timing of each, a check that they run and no measurement")
    return show(json.loads(newest.read_text(encoding="utf-8")))


def show(results: dict) -> int:
    """Print a table for each benchmark; return 1 if a column that must be there is empty."""
    columns = results["result_columns"]
    print(f"\n{processor()}; Python {platform.python_version()}; {versions()}")
    code = 0
    for name, row in results["results"].items():
        entry = dict(zip(columns, row, strict=False))
        backends, *others = [[p.strip("'") for p in axis] for axis in entry["params"]]
        # asv writes NaN for what was skipped.
        times = [t if t is not None and t == t else None for t in entry["result"]]
        values = dict(zip(product(backends, *others), times, strict=True))
        here = [b for b in backends if any(values[b, *case] for case in product(*others))]
        code |= any(backend not in here for backend in ALWAYS_HERE)
        print(f"\n{name}, milliseconds (ratio to torch:cpu)")
        print("jax: the array-api kernels under jax.jit; array-api: the same on NumPy arrays\n")
        heads = [f"{'length':>7} {'causal':>6}", *(f"{backend:>18}" for backend in here)]
        print(" ".join(heads))
        for case in product(*others):
            cells = [_cell(values[b, *case], values.get(("torch:cpu", *case))) for b in here]
            print(" ".join([f"{case[0]:>7} {case[1]:>6}", *cells]))
    return code


def _cell(seconds: float | None, reference: float | None) -> str:
    if seconds is None:
        return f"{'-':>18}"
    ratio = f" ({seconds / reference:.2f})" if reference else ""
    return f"{seconds * 1e3:.2f}{ratio}".rjust(18)


def _output(*command: str) -> str:
    run = subprocess.run(command, cwd=HERE, check=True, capture_output=True, text=True)
    return run.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
