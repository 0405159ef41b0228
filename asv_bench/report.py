"""Print asv's results of one run as tables, with a column for each backend.

asv compares commits; this compares backends in one environment. ``python asv_bench/report.py``
prints the newest results, or those of the given files, with the machine.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

RESULTS = Path(__file__).resolve().parents[1] / ".asv" / "results"
REFERENCE = "torch:cpu"
# The unit of a table is the first in which its smallest number is at least 1.
SCALES = {
    "seconds": {"s": 1.0, "ms": 1e-3, "µs": 1e-6},
    "bytes": {"GB": 1e9, "MB": 1e6, "kB": 1e3},
}


class Benchmark(NamedTuple):
    """The results of one benchmark: a number for each case, or None if it was skipped or failed."""

    name: str
    unit: str
    started: float
    axes: tuple[str, ...]
    values: dict[tuple[str, ...], float | None]

    @property
    def backends(self) -> list[str]:
        """The backends with a result, in the order of the parameter."""
        if "backend" not in self.axes:
            return []
        return list(dict.fromkeys(case[0] for case, x in self.values.items() if x is not None))


def read(file: Path, patterns: Sequence[str] = ()) -> list[Benchmark]:
    """Return the benchmarks of a file of asv's results, ``MACHINE/COMMIT-ENVIRONMENT.json``.

    Cases that match no pattern of ``--bench`` are left out, because asv writes the same for them as
    for skipped ones. `started` is in seconds since the epoch.
    """
    results = json.loads(file.read_text(encoding="utf-8"))
    known = json.loads((file.parents[1] / "benchmarks.json").read_text(encoding="utf-8"))
    benchmarks = []
    for name, row in results["results"].items():
        entry = dict(zip(results["result_columns"], row, strict=False))
        cases = list(product(*entry["params"]))
        # asv writes NaN for a case that was skipped, null for one that failed, or for all.
        numbers = entry["result"] or [None] * len(cases)
        values = [None if x is None or math.isnan(x) else x for x in numbers]
        about = known.get(name, {})
        benchmarks.append(
            Benchmark(
                name,
                about.get("unit", ""),
                entry["started_at"] / 1000,
                tuple(about.get("param_names", ())),
                {
                    tuple(text.strip("'") for text in case): value
                    for case, value in zip(cases, values, strict=True)
                    if _is_asked(f"{name}({', '.join(case)})" if case else name, patterns)
                },
            )
        )
    return benchmarks


def _is_asked(case: str, patterns: Sequence[str]) -> bool:
    """Return whether asv runs a case with these patterns."""
    return not patterns or any(re.search(pattern, case) for pattern in patterns)


def lines(benchmark: Benchmark) -> Iterator[str]:
    """Yield the lines of a table: a row for each case, with ratios to `REFERENCE` if it ran."""
    unit, scale = _unit(benchmark)
    if "backend" not in benchmark.axes:
        for case, value in benchmark.values.items():
            text = "-" if value is None else _number(value / scale)
            yield f"{' '.join((benchmark.name, *case))}: {text} {unit}"
        return
    names = benchmark.backends
    if not names:
        yield f"{benchmark.name}: no backend for it is installed"
        return
    reference = REFERENCE if REFERENCE in names else names[0]
    yield f"{benchmark.name}, {unit} (ratio to {reference})"
    rows = list(dict.fromkeys(case[1:] for case in benchmark.values))
    axes = benchmark.axes[1:]
    widths = [max(map(len, texts)) for texts in zip(axes, *rows, strict=True)]
    for head, row in ((axes, None), *((row, row) for row in rows)):
        cells = (
            names if row is None else [_cell(benchmark, b, row, reference, scale) for b in names]
        )
        left = [text.rjust(width) for text, width in zip(head, widths, strict=True)]
        yield " ".join(["  ", *left, *(cell.rjust(17) for cell in cells)])


def _cell(
    benchmark: Benchmark, backend: str, row: tuple[str, ...], reference: str, scale: float
) -> str:
    value, base = (benchmark.values.get((b, *row)) for b in (backend, reference))
    if value is None:
        return "-"
    return _number(value / scale) + (f" ({value / base:.2f})" if base else "")


def _unit(benchmark: Benchmark) -> tuple[str, float]:
    """Return the unit for a table and its size."""
    numbers = [abs(x) for x in benchmark.values.values() if x]
    scales = SCALES.get(benchmark.unit)
    if scales is None or not numbers:
        return benchmark.unit, 1.0
    fitting = [(unit, size) for unit, size in scales.items() if min(numbers) >= size]
    return fitting[0] if fitting else list(scales.items())[-1]


def _number(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def newest(folder: Path = RESULTS) -> Path:
    """Return the file of the results that were written last."""
    files = list(folder.glob("*/*-*.json"))
    if not files:
        raise FileNotFoundError(f"{folder} holds no results of a commit: run `make bench` first")
    return max(files, key=lambda file: file.stat().st_mtime)


def show(file: Path, since: float = 0.0, patterns: Sequence[str] = ()) -> list[Benchmark]:
    """Print the machine and the benchmarks that started after a time; return the benchmarks."""
    environment = environment_file(file)
    if environment.exists():
        print(f"\n{environment.read_text(encoding='utf-8').rstrip()}")
    benchmarks = [benchmark for benchmark in read(file, patterns) if benchmark.started >= since]
    for benchmark in benchmarks:
        if "backend" in benchmark.axes or benchmark is benchmarks[0]:
            print()
        print("\n".join(lines(benchmark)))
    return benchmarks


def environment_file(file: Path) -> Path:
    """Return the file of the library versions and the hardware, which asv does not keep."""
    return file.with_suffix(".txt")


def main(arguments: list[str] | None = None) -> int:
    """Print the tables of result files."""
    parser = argparse.ArgumentParser(prog="report.py", description=__doc__.split("\n\n")[0])
    parser.add_argument("files", nargs="*", type=Path, help="results (default: the newest)")
    options: Any = parser.parse_args(arguments)
    try:
        for file in options.files or [newest()]:
            print(f"{file}:")
            show(file)
    except FileNotFoundError as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
