"""The suite's cases without pytest: what became of each, gathered into a table for people.

A row is a feature, a dtype or a corner of the semantics, a column a kernel, and a cell the largest
error in units of eps · Σ w|v|, or why the kernel refuses.
"""

from __future__ import annotations

import platform
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from importlib.metadata import version
from typing import NamedTuple, TypeVar

import polyattn
from polyattn import registry
from polyattn.conformance import checks
from polyattn.conformance.cases import CASES, TOPICS, Case
from polyattn.conformance.gradients import GRADIENT_CASES, check_gradients
from polyattn.conformance.subject import Checked, Subject
from polyattn.conformance.tolerance import Deviation
from polyattn.explain import table
from polyattn.problem import DTYPES, FEATURES

__all__ = ["Cell", "Report", "Row", "Section", "run", "steps"]


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


class _Failed(NamedTuple):
    checked: Checked
    case: Case
    features: frozenset[str]  # that the failure is about
    text: str


@dataclass
class Section:
    """What became of one backend."""

    subject: Subject
    kernels: tuple[Checked, ...]
    cells: dict[tuple[str, Checked], Cell] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    failed_cases: list[_Failed] = field(default_factory=list)

    def cell(self, row: str, checked: Checked) -> Cell:
        """Return the cell of a row, named, and a kernel."""
        return self.cells.setdefault((row, checked), Cell())

    @cached_property
    def versions(self) -> str:
        """The library and its version."""
        root = self.subject.library.partition(".")[0]
        return f"{root} {version(root.replace('_', '-'))}"


@dataclass
class Report:
    """What became of all that was checked."""

    sections: list[Section] = field(default_factory=list)

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
            "backends": [
                {
                    "name": str(section.subject),
                    "library": section.versions,
                    "failures": section.failures,
                    "kernels": [
                        {
                            "name": str(checked),
                            "rows": {
                                row: section.cell(row, checked).as_dict() for row, _ in row_names()
                            },
                        }
                        for checked in section.kernels
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


# ---- running -----------------------------------------------------------------------------------


class Step(NamedTuple):
    """One thing to do: a case, or a promise, of a kernel."""

    section: Section
    checked: Checked
    what: Case | str


def steps(
    subjects: Iterable[Subject],
    cases: Mapping[str, Case] = CASES,
    kernels: Sequence[str] = (),
) -> list[Step]:
    """Return all that a report has to do.

    Parameters
    ----------
    subjects : iterable of Subject
        The backends.
    cases : mapping of str to Case
        The calls.
    kernels : sequence of str
        The kernels to check; none for all.

    Raises
    ------
    ValueError
        If a backend has no kernel of a name.
    """
    found = []
    for subject in subjects:
        names = list(dict.fromkeys(checked.kernel.name for checked in subject.kernels))
        for name in kernels:
            if name not in names:
                raise ValueError(f"{subject} has no kernel {name!r}; it has {', '.join(names)}")
        checked = tuple(c for c in subject.kernels if not kernels or c.kernel.name in kernels)
        section = Section(subject, checked)
        for each in checked:
            found += [Step(section, each, what) for what in _work(subject, each, cases)]
    return found


def _work(subject: Subject, checked: Checked, cases: Mapping[str, Case]) -> Iterator[Case | str]:
    promised = [case for case in cases.values() if checks.is_promised(subject, checked, case)]
    if checked.kernel.compiles:
        refused = [case for case in promised if not checks.takes(subject, checked, case)]
        promised = checks.covering(subject, checked, promised) + refused
    yield from promised
    yield from PROMISES


def run(work: Iterable[Step]) -> Report:
    """Do it.

    Parameters
    ----------
    work : iterable of Step
        What `steps` returned, perhaps with a progress bar around it.

    Returns
    -------
    Report
        What became of it; it prints as tables.
    """
    report = Report()
    for section, checked, what in work:
        if section not in report.sections:
            report.sections.append(section)
        if isinstance(what, Case):
            _do_case(section, checked, what)
        else:
            _do_promise(section, checked, what)
    for section in report.sections:
        _charge(section)
        _note_what_does_not_apply(section)
    return report


def _do_case(section: Section, checked: Checked, case: Case) -> None:
    try:
        outcome = checks.check_case(section.subject, checked, case)
    except Exception as error:
        text = _text(error)
        about = case.features
        if text.startswith(f"{case}: logsumexp"):  # the output is right
            about = frozenset({"logsumexp"})
        section.failed_cases.append(_Failed(checked, case, about, text))
        return
    for row in rows_of(case):
        section.cell(row.name, checked).add(case.name, outcome.output, outcome.refusal)
    if outcome.logsumexp is not None and case.topic != EXTREME:
        section.cell("logsumexp", checked).add(case.name, outcome.logsumexp, None)


def _do_promise(section: Section, checked: Checked, name: str) -> None:
    subject, cell = section.subject, section.cell(name, checked)
    declared = {
        "deterministic": checked.kernel.deterministic,
        "batch invariant": checked.kernel.batch_invariant,
    }
    try:
        if name == "gradients":
            _do_gradients(subject, checked, cell)
        elif not declared[name]:
            cell.note = "not declared"
        elif name == "deterministic":
            checks.check_determinism(subject, checked)
            cell.note = "holds"
        else:
            checks.check_batch_invariance(subject, checked)
            cell.note = "holds"
    except Exception as error:
        cell.failures.append(_text(error))
        section.failures.append(f"{checked}: {_text(error)}")


def _do_gradients(subject: Subject, checked: Checked, cell: Cell) -> None:
    for case in () if checked.kernel.compiles else GRADIENT_CASES.values():
        if checks.is_promised(subject, checked, case) and checks.takes(subject, checked, case):
            found = check_gradients(subject, checked, case)
            for off in (found or {}).values():
                cell.add(case.name, off, None)
    if not cell.agreed:
        cell.note = "none of the library's"


def _text(error: Exception) -> str:
    return str(error) if isinstance(error, AssertionError) else f"raised {error!r}"


def _charge(section: Section) -> None:
    """Charge each case that failed to the features to blame: the fewest that fail together.

    Where the plain formula is wrong, or softcap alone, a case of softcap and bias says nothing
    about bias.
    """
    section.failed_cases.sort(key=lambda failed: len(failed.features))
    sets: dict[Checked, set[frozenset[str]]] = defaultdict(set)
    for failed in section.failed_cases:
        sets[failed.checked].add(failed.features)
    for checked, case, about, text in section.failed_cases:
        within = [features for features in sets[checked] if features <= about]
        fewest = [f for f in within if not any(other < f for other in within)]
        blamed = frozenset[str]().union(*fewest)
        for row in ROWS:
            if row not in rows_of(case) and row.name not in blamed:
                continue
            cell = section.cell(row.name, checked)
            is_to_blame = row.name in blamed or (row.name == "plain" and not blamed)
            if row.group != "features" or is_to_blame:
                cell.failures.append(text)
            else:
                cell.elsewhere += 1
        section.failures.append(f"{checked}: {text}")


def _note_what_does_not_apply(section: Section) -> None:
    for checked in section.kernels:
        for dtype in DTYPES:
            if dtype not in section.subject.dtypes:
                section.cell(dtype, checked).note = "not taken"
        if not checked.kernel.poison_safe:
            section.cell("poison in a masked key", checked).note = "not declared"
        if "logsumexp" not in checked.kernel.features:
            section.cell("logsumexp", checked).reasons["it does not compute logsumexp"] = 1
            section.cell("logsumexp", checked).refused = 1


# ---- printing ----------------------------------------------------------------------------------


def _lines(section: Section) -> Iterator[str]:
    yield f"{section.subject} ({section.versions})"
    yield ""
    footnotes: dict[str, int] = {}
    rows = [("", *map(str, section.kernels))]
    for name, _ in row_names():
        cells = [cell_text(section.cell(name, checked), footnotes) for checked in section.kernels]
        rows.append((name, *cells))
    yield from table(rows)
    yield ""
    yield "  Figures: the largest error, in units of eps · Σ w|v|.  -  refused: not declared."
    for reason, number in footnotes.items():
        yield f"  [{number}] refused: {reason}"
    yield f"  {len(section.failures) or 'no'} failure{'s' * (len(section.failures) != 1)}"
    for failure in section.failures[:20]:
        yield f"  FAIL {failure}"
    if len(section.failures) > 20:
        yield f"  ... and {len(section.failures) - 20} more, all of them in --json and --html"
    yield ""


def cell_text(cell: Cell, footnotes: dict[str, int]) -> str:
    """Return a cell in a few characters; reasons go to the footnotes, by number.

    Parameters
    ----------
    cell : Cell
        The cell.
    footnotes : dict of str to int
        The reasons that have a number, to which new ones are added.
    """
    if cell.failures:
        return f"FAIL ({len(cell.failures)} of {len(cell.failures) + cell.agreed})"
    if cell.note is not None:
        return cell.note
    if not cell.agreed and not cell.refused:
        return "fails elsewhere" if cell.elsewhere else "no case"
    text = f"{cell.units:.2g}" if cell.agreed else ""
    own = [reason for reason in cell.reasons if not reason.startswith("it does not compute")]
    marks = "".join(f"[{footnotes.setdefault(r, len(footnotes) + 1)}]" for r in own)
    return f"{text} {marks}".strip() or "-"


def default_subjects(library: str | None) -> list[Subject]:
    """Return every backend that can be used here, or ``array-api`` if a library is named."""
    if library is not None:
        return [Subject(registry.ARRAY_API, library)]
    return [Subject(name) for name in registry.names() if registry.load(name) is None]


def progress(work: Sequence[Step]) -> Iterable[Step]:
    """Return the steps with a progress bar."""
    return bar(work, lambda step: f"{step.section.subject} {step.checked}")


T = TypeVar("T")


def bar(work: Iterable[T], describe: Callable[[T], str]) -> Iterator[T]:
    """Go through some work with a progress bar on standard error, if that is a terminal.

    Parameters
    ----------
    work : iterable
        The steps.
    describe : callable
        What the bar says beside a step.

    Yields
    ------
    object
        Each step.
    """
    from tqdm import tqdm

    shown = tqdm(list(work), unit="case", disable=None, leave=False, dynamic_ncols=True)
    for step in shown:
        shown.set_description(describe(step), refresh=False)
        yield step
