"""Print the results in a terminal, at most 100 columns wide, one group of rows at a time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from polyattn._base import text_table
from polyattn.bench.machine import fact, wrapped
from polyattn.bench.results import BenchResults, Timing

# The columns after length, backend and kernel, and their widths.
COLUMNS = {"ms": 6, "quartiles": 13, "rate": 7, "ratio": 6, "roof": 5}
LEGEND = (
    "ms: the median time of a call, and its quartiles; ratio: the time over that of {}; roof: the"
    " rate as a share of the roofline."
)
SAME = " *: the same kernel, called by several backends."
# A rate above a limit shows that the limit is wrong.
WRONG = 1.0
LIMIT_IS_WRONG = (
    " A dash as roof: the call was faster than the limit, which was measured while the"
    " machine was busy, or is that of the memory for arrays in a cache."
)


def head(results: BenchResults) -> list[str]:
    """Return the first lines: the call, the machine and the command to repeat the run."""
    call = text_table.paragraph(f"polyattn bench: {results.workload}")
    lines = [*call, *results.machine.lines()]
    return [*lines, f"  {'repeat':<11}{results.command}"]  # in one line, to be pasted


def heading(results: BenchResults, names: Iterable[str]) -> list[str]:
    """Return the lines above the rows: the roof of each device and the column titles."""
    unit, scale = rate_unit(results)
    lines = [
        line
        for device, peak in results.roofs.items()
        for line in fact(
            "roof",
            f"{device}: {digits(peak.product / scale)} {unit} in a matrix product"
            f" ({peak.backend}), {digits(peak.bandwidth / 1e9)} GB/s",
        )
    ]
    titles = "length", "backend", "kernel", *(unit if x == "rate" else x for x in COLUMNS)
    return [*lines, "", _line(titles, _room(names))]


def group(results: BenchResults, rows: Sequence[Timing], names: Iterable[str]) -> list[str]:
    """Return the lines of the rows of one length."""
    room = _room(names)
    return [line for row in rows for line in _row(results, row, room)] + [""]


def footer(results: BenchResults, names: Sequence[str]) -> list[str]:
    """Return the lines below the rows."""
    shares = [results.of_roof(row) for row in results.rows]
    wrong = LIMIT_IS_WRONG if max(filter(None, shares), default=0) > WRONG else ""
    same = SAME if any(map(results.same_kernel, results.rows)) else ""
    return wrapped(LEGEND.format(names[0]) + same + wrong, "  ")


def _room(names: Iterable[str]) -> int:
    return max(len(name) for name in ("backend", *names))


def _row(results: BenchResults, row: Timing, room: int) -> list[str]:
    if row.seconds is None:
        return wrapped(row.note or "", f"  {row.length:>6}  {row.backend:<{room}}  ")
    line = _line(_cells(results, row), room)
    return [line] if row.note is None else [line, *fact("", row.note)]


def _cells(results: BenchResults, row: Timing) -> tuple[str, ...]:
    middle, low, high = row.spread
    _, scale = rate_unit(results)
    return (
        str(row.length),
        row.title,
        results.marked_kernel(row),
        duration(middle),
        f"{duration(low)}-{duration(high)}",
        digits((results.rate(row) or 0) / scale),
        "-" if row.ratio is None else digits(row.ratio),
        share(results.of_roof(row)),
    )


def _line(cells: Sequence[str], room: int) -> str:
    return text_table.line(cells, [6, -room, -8, *COLUMNS.values()])


def rate_unit(results: BenchResults) -> tuple[str, float]:
    """Return the rate unit for the fastest device and its size in operations per second."""
    fastest = max((peak.product for peak in results.roofs.values()), default=0.0)
    return ("TFLOP/s", 1e12) if fastest >= 2e12 else ("GFLOP/s", 1e9)


def duration(seconds: float) -> str:
    """Return seconds as milliseconds with at least three digits."""
    return digits(1e3 * seconds)


def share(part: float | None) -> str:
    """Return a share as a percentage with at least two digits."""
    if part is None or part > WRONG:
        return "-"
    return f"{part:.0%}" if part >= 0.0995 else f"{part:.1%}"


def digits(value: float) -> str:
    """Return a number with three significant digits, or with all digits before the point."""
    if not value:
        return "0"
    return f"{value:.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"
