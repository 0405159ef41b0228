"""Collect the results of a backend and print them as a table.

A row is a feature, a dtype or a corner case of the semantics, a column is a kernel, and a cell is
the largest error in units of eps · Σ w|v|, or the reason why the kernel refuses.
"""

from __future__ import annotations

import platform
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import polyattn
from polyattn._base.text_table import paragraph, table
from polyattn._core.call.features import DTYPES, FEATURES
from polyattn.conformance.cases.case import Case
from polyattn.conformance.cases.topics import TOPICS
from polyattn.conformance.checks.cases import aspects
from polyattn.conformance.checks.gradients import DERIVATIVES
from polyattn.conformance.checks.promises import PROMISES
from polyattn.conformance.checks.target import KernelVariant, Target
from polyattn.conformance.reference.tolerance import Deviation


class Aspect(NamedTuple):
    """The subject of a row of the table."""

    group: str
    name: str
    meaning: str


EXTREME = "extreme values"
#: Rows with their own check instead of cases.
CHECKED_ROWS = {
    "gradients": "by the library's own differentiation",
    **{name: FEATURES[name].meaning for name in DERIVATIVES},
    **{promise.row: promise.meaning for promise in PROMISES.values()},
}
ROWS = (
    Aspect("features", "plain", "no feature beyond the plain formula"),
    *(Aspect("features", n, x.meaning) for n, x in FEATURES.items() if n not in DERIVATIVES),
    *(Aspect("dtypes", dtype, f"{dtype} inputs") for dtype in DTYPES),
    *(Aspect("corners", topic, topic) for topic in TOPICS if topic != "formula"),
    *(Aspect("promises", name, meaning) for name, meaning in CHECKED_ROWS.items()),
)


@dataclass
class Cell:
    """The results of a kernel in a row."""

    agreed: int = 0  # cases that agree with the oracle
    refused: int = 0  # cases that the kernel refuses
    units: float = 0.0  # the largest error, in units of eps · Σ w|v|
    share: float = 0.0  # the largest share of its limit that an error has
    worst: str | None = None  # the case of that share
    reasons: Counter[str] = field(default_factory=Counter)  # why it refuses, and how often
    failures: list[str] = field(default_factory=list)  # failing cases that count in this row
    elsewhere: int = 0  # failing cases that count in the row of another feature
    note: str | None = None  # printed instead: why the row does not apply

    def add(self, case: str, off: Deviation | None, refusal: str | None) -> None:
        """Count the result of a case."""
        if off is None:
            self.refused += 1
            self.reasons[refusal or ""] += 1
            return
        self.agreed += 1
        if self.worst is None or off.share > self.share:
            self.share, self.worst = off.share, case
        self.units = max(self.units, off.units)

    def as_dict(self) -> dict[str, object]:
        """Return the cell in plain types, for JSON."""
        return {**self.__dict__, "reasons": dict(self.reasons)}


class Failure(NamedTuple):
    """A failing case or promise."""

    kernel: str  # empty for the plugin as a whole
    charged: str  # the features that cause it, or the broken promise
    text: str

    def __str__(self) -> str:
        return f"{self.kernel}: {self.text}" if self.kernel else self.text


@dataclass
class Section:
    """The results of one backend: a column for each kernel."""

    target: Target
    kernels: tuple[KernelVariant, ...]
    cells: dict[tuple[str, KernelVariant], Cell] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)  # the simplest first
    plugin: dict[str, str] = field(default_factory=dict)  # results for the plugin as a whole

    def cell(self, row: str, variant: KernelVariant) -> Cell:
        """Return the cell of a row, by name, and a kernel."""
        return self.cells.setdefault((row, variant), Cell())

    def row(self, row: str) -> list[Cell]:
        """Return the cells of a row, by name."""
        return [self.cell(row, variant) for variant in self.kernels]

    @cached_property
    def versions(self) -> str:
        """The library and its version, and what other distributions give."""
        root = self.target.library.partition(".")[0]
        library = f"{root} {getattr(sys.modules.get(root), '__version__', '')}".strip()
        given = [f"{kernel} from {where}" for kernel, where in self.target.origins.items()]
        return "; ".join([library, *given])

    def as_dict(self) -> dict[str, object]:
        """Return the section in plain types, for JSON."""
        rows = {v: {x.name: self.cell(x.name, v).as_dict() for x in ROWS} for v in self.kernels}
        return {
            **{"name": str(self.target), "library": self.versions},
            "failures": [failure._asdict() for failure in self.failures],
            "plugin": self.plugin,
            "kernels": [{"name": str(variant), "rows": row} for variant, row in rows.items()],
        }


@dataclass
class Report:
    """The results of all backends."""

    sections: list[Section] = field(default_factory=list)
    done: int = 0  # steps; fewer than the total if it was interrupted
    total: int = 0

    @property
    def failed(self) -> int:
        """The number of failures."""
        return sum(len(section.failures) for section in self.sections)

    def as_dict(self) -> dict[str, object]:
        """Return the report in plain types, for JSON."""
        return {
            **{"polyattn": polyattn.__version__, "python": platform.python_version()},
            **{"machine": platform.machine(), "failed": self.failed},
            **{"done": self.done, "total": self.total},
            "backends": [section.as_dict() for section in self.sections],
        }

    def __str__(self) -> str:
        so_far = "" if self.done == self.total else f" in {self.done} of {self.total} checks"
        return "\n".join(line for section in self.sections for line in _lines(section, so_far))


def rows_of(case: Case) -> list[Aspect]:
    """Return the rows that show a case.

    Extreme values always have large errors, which would hide those of other cases.
    """
    shown = {EXTREME} if case.topic == EXTREME else aspects(case)
    return [row for row in ROWS if row.name in shown]


# ---- printing ----------------------------------------------------------------------------------


def _lines(section: Section, so_far: str) -> Iterator[str]:
    yield f"{section.target} ({section.versions})"
    yield ""
    footnotes: dict[str, int] = {}
    yield from table(table_rows(section, footnotes))
    yield ""
    for remark in _remarks(section, footnotes, so_far):
        yield from paragraph(remark, "    ")
    yield ""


def _remarks(section: Section, footnotes: dict[str, int], so_far: str) -> Iterator[str]:
    yield "  Numbers are the largest error in units of eps · Σ w|v|. Extreme values have large"
    yield "  errors and count only in their own row.  -  refused: the kernel does not declare it."
    for reason, number in footnotes.items():
        yield f"  [{number}] refused: {reason}"
    for promise, result in section.plugin.items():
        yield f"  {promise}: {result}"
    number = len(section.failures)
    if number or not so_far:
        yield f"  {number or 'no'} failure{'s' * (number != 1)}{so_far}"
    else:
        yield f"  interrupted: nothing failed{so_far}"
    yield from _failure_lines(section.failures)


def _failure_lines(failures: list[Failure]) -> Iterator[str]:
    """Yield the first two failures of each kind, and the number of others."""
    kinds: dict[tuple[str, str], list[Failure]] = defaultdict(list)
    for failure in failures:
        kinds[failure.kernel, failure.charged].append(failure)
    for (_, charged), alike in kinds.items():
        yield from (f"  FAIL {failure}" for failure in alike[:2])
        if len(alike) > 2:
            yield f"       and {len(alike) - 2} more for {charged}; --json lists all"


def table_rows(section: Section, footnotes: dict[str, int]) -> list[tuple[str, ...]]:
    """Return the table of a backend, its head first; reasons are added to the footnotes."""
    rows = [(x.name, *(cell_text(c, footnotes) for c in section.row(x.name))) for x in ROWS]
    return [("", *map(str, section.kernels)), *(x for x in rows if {*x[1:]} != {"no case"})]


def cell_text(cell: Cell, footnotes: dict[str, int]) -> str:
    """Return a cell as a short text; its reasons are added to the numbered footnotes."""
    if cell.failures:
        return f"FAIL ({len(cell.failures)} of {len(cell.failures) + cell.agreed})"
    if cell.note is not None:
        return cell.note
    if cell.elsewhere and not cell.agreed:
        return "fails elsewhere"
    if not cell.agreed and not cell.refused:
        return "no case"
    text = f"{cell.units:.2g}" if cell.agreed else ""
    if cell.elsewhere:  # a cause shared with other features
        text += f", {cell.elsewhere} fail elsewhere"
    reasons = dict.fromkeys(r for reasons in cell.reasons for r in reasons.split("; "))
    noted = [reason for reason in reasons if not reason.startswith("it does not compute")]
    marks = "".join(f"[{footnotes.setdefault(r, len(footnotes) + 1)}]" for r in noted)
    return f"{text} {marks}".strip() or "-"
