"""Summarise the results of a function in all cases as a table: a row for each feature."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from polyattn._base.text_table import paragraph, table
from polyattn._core.call.features import DTYPES, FEATURES
from polyattn._core.expressions.expression import Expression
from polyattn.conformance.cases.cache_cases import of_item, of_row
from polyattn.conformance.cases.case import Case
from polyattn.conformance.cases.catalogue import ESSENTIAL, size_cases
from polyattn.conformance.cases.gradient_cases import GRADIENT_CASES, POISONED_GRADIENT_CASES
from polyattn.conformance.cases.topics import TOPICS
from polyattn.conformance.checks.frames import call_named
from polyattn.conformance.functions.check import (
    AGREES,
    DIFFERS,
    NO_ARGUMENT,
    RAISES,
    RETURNS,
    Finding,
    check_callable,
    check_gradients,
    check_logsumexp,
    check_parts,
    has_gradients,
)
from polyattn.conformance.functions.signatures import Function

__all__ = ["Row", "as_dict", "lines", "summarise", "summary"]
__dir__ = __all__.copy


class Row(NamedTuple):
    """The results of the cases about one feature, dtype or topic.

    Attributes
    ----------
    kind : str
        ``feature``, ``arrays``, ``dtype``, ``topic`` or ``parts``.
    name : str
        The name of the feature, dtype, topic or part.
    findings : dict of str to Finding
        The results by case name.
    """

    kind: str
    name: str
    findings: dict[str, Finding]

    def count(self, status: str) -> int:
        """Count the cases with a status."""
        return sum(finding.status == status for finding in self.findings.values())

    @property
    def differing(self) -> int:
        """The number of cases that differ or raise."""
        return self.count(DIFFERS) + self.count(RAISES)

    @property
    def worst(self) -> float | None:
        """The largest error in units; None if no case ran."""
        units = [f.deviation.units for f in self.findings.values() if f.deviation is not None]
        return max(units, default=None)

    @property
    def interpretations(self) -> dict[str, int]:
        """The number of differing cases by the interpretation that explains them ("" if none)."""
        differing = (f for f in self.findings.values() if f.status == DIFFERS)
        return dict(Counter(f.interpretation for f in differing))


#: The row of calls with more than one option.
TOGETHER = "options together"
#: The kind of each row, by its name.
_KINDS = {
    **{name: "feature" for name in FEATURES if name not in ("logsumexp", "dropout")},
    **{"rank": "arrays", "layout": "arrays"},
    **dict.fromkeys(DTYPES, "dtype"),
    **{name: "topic" for name in (*TOPICS, TOGETHER) if name != "formula"},
    **dict.fromkeys(("sizes", "gradients", "logsumexp"), "parts"),
    **{"items by themselves": "parts", "rows by themselves": "parts"},
}
_ROWS = ("cache, new rows", "pages, new rows")
_ONE_THING = ("scale", "softcap", "causal", "grouped heads", "sinks", "mask hides some rows")
#: The rows of other checks: which, and the names of the cases.
_OTHERS: dict[str, tuple[Callable[..., Finding], tuple[str, ...]]] = {
    "logsumexp": (check_logsumexp, ("plain", *_ONE_THING)),
    "items by themselves": (partial(check_parts, part=of_item), ("plain", *_ROWS)),
    "rows by themselves": (partial(check_parts, part=of_row), _ROWS),
}


def _row_of(case: Case) -> str | None:
    """Return the row of a case: what differs from a plain call; None if only ours has that."""
    if _is_only_ours(case):
        return None
    if case.topic != "formula":
        return case.topic if case.dtype == "float32" or case.name in ESSENTIAL else None
    differs = set(case.features)
    if any(name.startswith("query_offset") for name in differs) and len(differs) == 2:
        differs.discard("causal")  # an offset changes only calls where positions matter
    if (case.one_head or len(case.batch) != 1) and "batch_broadcast" not in case.features:
        differs.add("rank")
    if case.layout != "...HLD":
        differs.add("layout")
    if case.dtype != "float32" or not differs:
        differs.add(case.dtype)
    (first, *others) = differs
    if others:
        return TOGETHER if case.dtype == "float32" else None
    return first if first in _KINDS else None


def _is_only_ours(case: Case) -> bool:
    """Return whether a call has expressions or dropout, which only polyattn takes."""
    options = case.arguments()[1].values()
    return "dropout" in case.features or any(isinstance(x, Expression) for x in options)


#: Cases with their row and check.
Plan = list[tuple[Case, str, Callable[..., Finding]]]


def planned(cases: Iterable[Case], differentiable: bool) -> Plan:
    """Return what is checked: a case, its row, and the check."""
    named = {case.name: case for case in cases}
    plan: Plan = [(x, row, check_callable) for x in named.values() if (row := _row_of(x))]
    sizes = all_sizes() if named.keys() >= ESSENTIAL.keys() else []
    plan += [(case, "sizes", check_callable) for case in sizes]
    if differentiable:
        with_gradients = (POISONED_GRADIENT_CASES | GRADIENT_CASES).values()
        chosen = [case for case in with_gradients if case.name in named and not _is_only_ours(case)]
        plan += [(case, "gradients", check_gradients) for case in (*chosen, *sizes)]
    for row, (check, names) in _OTHERS.items():
        plan += [(named[name], row, check) for name in names if name in named]
    return plan


def all_sizes() -> list[Case]:
    """Return a case of every size, of which half have E = D, since some functions have no other."""
    cases = list(size_cases("float32"))
    cases[::2] = [replace(case, E=None) for case in cases[::2]]
    return cases


def grouped(plan: Plan, findings: Iterable[Finding]) -> list[Row]:
    """Return the findings of a plan as the rows of a table."""
    rows = {name: Row(kind, name, {}) for name, kind in _KINDS.items()}
    for (case, row, _), finding in zip(plan, findings, strict=True):
        rows[row].findings[case.name] = finding
    return [row for row in rows.values() if row.findings]


def summarise(
    function: Function,
    cases: Iterable[Case],
    to: Callable[[Any], Any],
    back: Callable[[Any], Any],
    progress: Callable[[Iterable[Any]], Iterable[Any]] = iter,
) -> list[Row]:
    """Check a function with all cases that have a row, and group the results by it.

    The arguments are those of `check_callable`; `progress` wraps the iteration, as `tqdm` does.
    """
    plan = planned(cases, has_gradients(to))
    findings = [
        call_named(f"case {case}", check, function, case, to, back)
        for case, _, check in progress(plan)
    ]
    return grouped(plan, findings)


def lines(rows: Iterable[Row]) -> list[str]:
    """Return rows as the lines of a table, with a legend."""
    rows = list(rows)
    said = (f.remark for row in rows for f in row.findings.values())
    head = ("", "agree", "worst error", next((x for x in said if x.startswith(RETURNS)), ""))
    legend = "  Errors are in units of eps · Σ w|v|; inf: not exact where it must be."
    cells = [head, *((row.name, *summary(row)) for row in rows)]
    return [*table(cells), "", *paragraph(legend)]


def summary(row: Row) -> tuple[str, str, str]:
    """Return how many cases agree, the largest error, and remarks on those that do not."""
    able = len(row.findings) - row.count(NO_ARGUMENT)
    units = "-" if row.worst is None else f"{row.worst:.2g}"
    return f"{row.count(AGREES)} of {able}" if able else "-", units, "; ".join(_remarks(row))


def as_dict(row: Row) -> dict[str, object]:
    """Return the kind, the name and the finding of each case in plain types, for JSON."""
    findings = {
        name: {**finding._asdict(), "deviation": (off := finding.deviation) and off._asdict()}
        for name, finding in row.findings.items()
    }
    return {"kind": row.kind, "name": row.name, "cases": findings}


def _remarks(row: Row) -> Iterator[str]:
    for interpretation, count in row.interpretations.items():
        yield f"{interpretation or 'no other meaning explains it'} ({count})"
    errors = Counter(f.error for f in row.findings.values() if f.status == RAISES)
    yield from (f"{error} ({count})" for error, count in errors.most_common(2))
    said = [f.remark for f in row.findings.values() if not f.remark.startswith(RETURNS)]
    yield from (f"{remark} ({count})" for remark, count in Counter(filter(None, said)).items())
    missing = {f.missing for f in row.findings.values() if f.status == NO_ARGUMENT}
    if missing:
        yield f"no argument for {', '.join(sorted({m for ms in missing for m in ms.split(', ')}))}"
