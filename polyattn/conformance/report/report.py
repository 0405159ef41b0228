"""What was found of a backend, as a table for people.

A row is a feature, a dtype or a corner of the semantics, a column a kernel, and a cell the largest
error in units of eps · Σ w|v|, or why the kernel refuses.
"""

from __future__ import annotations

import platform
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import NamedTuple

import polyattn
from polyattn.call.features import DTYPES, FEATURES
from polyattn.conformance.cases.case import Case
from polyattn.conformance.cases.catalogue import TOPICS
from polyattn.conformance.checks.target import KernelVariant, Target
from polyattn.conformance.reference.tolerance import Deviation
from polyattn.text_table import table

__all__ = [
    "PROMISES",
    "ROWS",
    "Cell",
    "Failure",
    "Report",
    "Row",
    "Section",
    "cell_text",
    "rows_of",
]


class Row(NamedTuple):
    """A sentence of the semantics, and which cases are about it."""

    group: str
    name: str
    meaning: str
    is_about: Callable[[Case], bool]


def _rows() -> Iterator[Row]:
    yield Row("features", "plain", "the formula and nothing more", lambda c: not c.features)
    for name, meaning in FEATURES.items():
        yield Row("features", name, meaning, partial(_needs, name))
    for dtype in DTYPES:
        yield Row("dtypes", dtype, f"{dtype} inputs", partial(_is_of, dtype))
    for topic in TOPICS:
        if topic != "formula":
            yield Row("corners", topic, topic, partial(_is_about, topic))


def _needs(feature: str, case: Case) -> bool:
    return feature in case.features


def _is_of(dtype: str, case: Case) -> bool:
    return case.dtype == dtype


def _is_about(topic: str, case: Case) -> bool:
    return case.topic == topic


ROWS = tuple(_rows())
EXTREME = "extreme values"
#: Of the rows, those that are no cases' but a check of their own.
PROMISES = {
    "gradients": "by the library's own differentiation",
    "deterministic": "the same call twice gives the same bits",
    "batch invariant": "an item alone has the bits that it has among others",
    "eight threads at once": "the first calls of a process are as any other",
}


@dataclass
class Cell:
    """What became of a kernel in a row.

    Attributes
    ----------
    agreed, refused : int
        The number of cases that agree with the oracle, and that the kernel refuses.
    units, share : float
        The largest error of those that agree, in units of eps · Σ w|v| and as a share of its limit.
    worst : str or None
        The case of that error.
    reasons : Counter of str
        Why it refuses, with the number of cases.
    failures : list of str
        What is wrong, a text for each case that does not agree and is charged to this row.
    elsewhere : int
        The number of cases that do not agree and are charged to another feature.
    note : str or None
        In place of all that: why the row does not apply.
    """

    agreed: int = 0
    refused: int = 0
    units: float = 0.0
    share: float = 0.0
    worst: str | None = None
    reasons: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    elsewhere: int = 0
    note: str | None = None

    def add(self, case: str, off: Deviation | None, refusal: str | None) -> None:
        """Count a case in."""
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
    """One thing that is wrong.

    Attributes
    ----------
    kernel : str
        Of which kernel; empty for the plugin as a whole.
    charged : str
        The features that are to blame, or the promise that is not kept.
    text : str
        What is wrong.
    """

    kernel: str
    charged: str
    text: str

    def __str__(self) -> str:
        return f"{self.kernel}: {self.text}" if self.kernel else self.text


@dataclass
class Section:
    """What became of one backend.

    Attributes
    ----------
    target : Target
        The backend.
    kernels : tuple of KernelVariant
        The columns.
    cells : dict
        By row and kernel; see `cell`.
    failures : list of Failure
        All that is wrong, the simplest first.
    plugin : dict of str to str
        What was found of the plugin as a whole.
    """

    target: Target
    kernels: tuple[KernelVariant, ...]
    cells: dict[tuple[str, KernelVariant], Cell] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    plugin: dict[str, str] = field(default_factory=dict)

    def cell(self, row: str, variant: KernelVariant) -> Cell:
        """Return the cell of a row, named, and a kernel."""
        return self.cells.setdefault((row, variant), Cell())

    @cached_property
    def versions(self) -> str:
        """The library and its version."""
        root = self.target.library.partition(".")[0]
        return f"{root} {getattr(sys.modules.get(root), '__version__', '')}".strip()


@dataclass
class Report:
    """What became of all that was checked.

    Attributes
    ----------
    sections : list of Section
        One a backend.
    done, total : int
        How many steps were done, and how many there were; fewer if it was interrupted.
    """

    sections: list[Section] = field(default_factory=list)
    done: int = 0
    total: int = 0

    @property
    def failed(self) -> int:
        """The number of failures."""
        return sum(len(section.failures) for section in self.sections)

    def as_dict(self) -> dict[str, object]:
        """Return the report in plain types, for JSON."""
        return {
            "polyattn": polyattn.__version__,
            "python": platform.python_version(),
            "machine": platform.machine(),
            "failed": self.failed,
            "done": self.done,
            "total": self.total,
            "backends": [
                {
                    "name": str(section.target),
                    "library": section.versions,
                    "failures": [failure._asdict() for failure in section.failures],
                    "plugin": section.plugin,
                    "kernels": [
                        {
                            "name": str(variant),
                            "rows": {
                                row: section.cell(row, variant).as_dict() for row, _ in row_names()
                            },
                        }
                        for variant in section.kernels
                    ],
                }
                for section in self.sections
            ],
        }

    def __str__(self) -> str:
        return "\n".join(line for section in self.sections for line in _lines(section))


def rows_of(case: Case) -> list[Row]:
    """Return the rows that a case is about.

    Extreme values have large errors by nature, which would hide those of everything else.
    """
    return [
        row
        for row in ROWS
        if row.is_about(case) and (case.topic != EXTREME or row.group == "corners")
    ]


def row_names() -> list[tuple[str, str]]:
    """Return the names of all rows, and what each means."""
    return [(row.name, row.meaning) for row in ROWS] + list(PROMISES.items())


# ---- printing ----------------------------------------------------------------------------------


def _lines(section: Section) -> Iterator[str]:
    yield f"{section.target} ({section.versions})"
    yield ""
    footnotes: dict[str, int] = {}
    rows = [("", *map(str, section.kernels))]
    for name, _ in row_names():
        cells = [cell_text(section.cell(name, variant), footnotes) for variant in section.kernels]
        rows.append((name, *cells))
    yield from table(rows)
    yield ""
    yield "  Figures: the largest error, in units of eps · Σ w|v|; of extreme values it is large by"
    yield "  nature, and in no other row.  -  refused: not declared."
    for reason, number in footnotes.items():
        yield f"  [{number}] refused: {reason}"
    for promise, found in section.plugin.items():
        yield f"  {promise}: {found}"
    yield f"  {len(section.failures) or 'no'} failure{'s' * (len(section.failures) != 1)}"
    yield from _failure_lines(section.failures)
    yield ""


def _failure_lines(failures: list[Failure]) -> Iterator[str]:
    """The first two of each kind, and how many more there are."""
    kinds: dict[tuple[str, str], list[Failure]] = defaultdict(list)
    for failure in failures:
        kinds[failure.kernel, failure.charged].append(failure)
    for (_, charged), those in kinds.items():
        yield from (f"  FAIL {failure}" for failure in those[:2])
        if len(those) > 2:
            yield f"       and {len(those) - 2} more of {charged}; --json and --html have all"


def cell_text(cell: Cell, footnotes: dict[str, int]) -> str:
    """Return a cell in a few characters; reasons go to the footnotes, by number."""
    if cell.failures:
        return f"FAIL ({len(cell.failures)} of {len(cell.failures) + cell.agreed})"
    if cell.note is not None:
        return cell.note
    if cell.elsewhere and not cell.agreed:
        return "fails elsewhere"
    if not cell.agreed and not cell.refused:
        return "no case"
    text = f"{cell.units:.2g}" if cell.agreed else ""
    if cell.elsewhere:  # a cause that other features share hides whether this one is right
        text += f", {cell.elsewhere} fail elsewhere"
    every = dict.fromkeys(r for reasons in cell.reasons for r in reasons.split("; "))
    own = [reason for reason in every if not reason.startswith("it does not compute")]
    marks = "".join(f"[{footnotes.setdefault(r, len(footnotes) + 1)}]" for r in own)
    return f"{text} {marks}".strip() or "-"
