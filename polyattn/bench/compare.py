"""Compare two reports, of two machines or of two days.

Only rows of the same call, backend and length are compared. The range of a ratio is the widest
that the quartiles of both rows allow.
"""

from __future__ import annotations

from collections.abc import Iterator

from polyattn._base.text_table import paragraph, table
from polyattn.bench.machine import fact
from polyattn.bench.results import BenchResults, Timing
from polyattn.bench.table import digits, duration
from polyattn.bench.timing import FEWEST

Key = tuple[int, str]
LEGEND = """\
  B/A: the ratio of the medians, and its widest range by the quartiles;
  ~ the range contains 1, so the two may be equally fast."""


def compare(first: BenchResults, second: BenchResults, a: str = "A", b: str = "B") -> list[str]:
    """Return lines with the differences of the machines, then the times and their ratios."""
    ours, theirs = _timed(first), _timed(second)
    if first.workload != second.workload:
        raise ValueError(
            f"these are different calls and cannot be compared\n  {a}: {first.workload}\n"
            f"  {b}: {second.workload}"
        )
    both = [key for key in ours if key in theirs]
    if not both:
        raise ValueError(
            f"no backend has a time at the same length in both\n  {a}: {_named(ours)}\n"
            f"  {b}: {_named(theirs)}"
        )
    lines = [*paragraph(f"polyattn bench: {first.workload}"), *fact("A", a), *fact("B", b)]
    lines += ["", *_differences(first, second), "", *_table(both, ours, theirs)]
    for name, rows, others in (("A", ours, theirs), ("B", theirs, ours)):
        alone = {key: rows[key] for key in rows if key not in others}
        lines += fact(f"only {name}", _named(alone)) if alone else []
    return [*lines, "", *paragraph(LEGEND)]


def _timed(results: BenchResults) -> dict[Key, Timing]:
    return {(row.length, row.backend): row for row in results.rows if row.seconds is not None}


def _named(rows: dict[Key, Timing]) -> str:
    lengths: dict[str, list[str]] = {}
    for length, backend in rows:
        lengths.setdefault(backend, []).append(str(length))
    return "; ".join(f"{name} at {', '.join(own)}" for name, own in lengths.items()) or "none"


def _ratio(a: Timing, b: Timing) -> tuple[float, float, float]:
    """Return the ratio of the medians, and its range by the quartiles."""
    (first, a_low, a_high), (second, b_low, b_high) = a.spread, b.spread
    return second / first, b_low / a_high, b_high / a_low


def _differences(first: BenchResults, second: BenchResults) -> Iterator[str]:
    """Yield the facts in which the machines differ."""
    ours, theirs = first.machine.facts(), second.machine.facts()
    names = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
    if first.machine.is_busy and "load" not in names:
        names.append("load")
    for name in names:
        yield from fact(name, f"A: {ours.get(name, '-')}")
        yield from fact("", f"B: {theirs.get(name, '-')}")
    for name, results in (("A", first), ("B", second)):
        if results.interrupted:
            yield f"  {name} was interrupted."
    if set(names) <= {"load", "date"}:
        yield "  The same processor and libraries."


def _table(both: list[Key], ours: dict[Key, Timing], theirs: dict[Key, Timing]) -> list[str]:
    rows = [("length", "backend", "A ms", "B ms", "B/A", "range")]
    before = both[0][0]
    for length, name in both:
        a, b = ours[length, name], theirs[length, name]
        middle, low, high = _ratio(a, b)
        times = (duration(a.spread.median), duration(b.spread.median))
        spread = f"{digits(low)}-{digits(high)}{' ~' * (low <= 1 <= high)}"
        if min(a.rounds, b.rounds) < FEWEST:
            spread = "unknown: only one call"
        other = f"  ({a.kernel} and {b.kernel})" if a.kernel != b.kernel else ""
        if length != before:
            rows.append(("",) * 6)
        before = length
        rows.append((str(length), name, *times, digits(middle), spread + other))
    return table(rows, right=(0, 2, 3, 4))
