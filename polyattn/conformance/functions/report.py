"""Summarise the results of a function in all cases as a table: a row for each feature."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from polyattn._base.text_table import paragraph, table
from polyattn._core.call.features import DTYPES, FEATURES
from polyattn._core.expressions.expression import Expression
from polyattn.conformance.cases.case import Case
from polyattn.conformance.cases.catalogue import TOPICS
from polyattn.conformance.checks.frames import call_named
from polyattn.conformance.functions.check import (
    AGREES,
    DIFFERS,
    NO_ARGUMENT,
    RAISES,
    Finding,
    Function,
    check_callable,
)

__all__ = ["Row", "as_dict", "lines", "summarise", "summary"]


class Row(NamedTuple):
    """The results of the cases about one feature, dtype or topic.

    Attributes
    ----------
    kind : str
        ``feature``, ``arrays``, ``dtype`` or ``topic``.
    name : str
        The name of the feature, dtype or topic.
    findings : dict of str to Finding
        The results by case name.
    """

    kind: str
    name: str
    findings: dict[str, Finding]

    def count(self, status: str) -> int:
        """Count the cases with a status.

        Parameters
        ----------
        status : str
            A status of `Finding`.

        Returns
        -------
        int
        """
        return sum(finding.status == status for finding in self.findings.values())

    @property
    def worst(self) -> float | None:
        """The largest error in units; None if no case ran."""
        units = [f.deviation.units for f in self.findings.values() if f.deviation is not None]
        return max(units, default=None)

    @property
    def interpretations(self) -> dict[str, int]:
        """The number of differing cases by the interpretation that explains them ("" if none)."""
        return dict(
            Counter(f.interpretation for f in self.findings.values() if f.status == DIFFERS)
        )


#: The rows: kinds and names.
_ROWS = (
    *(("feature", name) for name in FEATURES if name not in ("logsumexp", "dropout")),
    ("arrays", "rank"),
    ("arrays", "layout"),
    *(("dtype", name) for name in DTYPES),
    *(("topic", name) for name in TOPICS if name != "formula"),
)


def _row_of(case: Case) -> tuple[str, str] | None:
    """Return the row of a case, which differs from a plain call in one thing; None for others."""
    if _is_only_ours(case):
        return None
    if case.topic != "formula":
        return ("topic", case.topic) if case.dtype == "float32" else None
    apart = [("feature", name) for name in case.features]
    if len(apart) == 2 and ("feature", "causal") in apart:
        # An offset changes only calls where positions matter.
        apart = [x for x in apart if x[1].startswith("query_offset")] or apart
    if (case.one_head or len(case.batch) != 1) and "batch_broadcast" not in case.features:
        apart.append(("arrays", "rank"))
    if case.layout != "...HLD":
        apart.append(("arrays", "layout"))
    if case.dtype != "float32" or not apart:
        apart.append(("dtype", case.dtype))
    return apart[0] if len(apart) == 1 and apart[0] in _ROWS else None


def _is_only_ours(case: Case) -> bool:
    """Return whether a call has expressions or dropout, which only polyattn takes."""
    options = case.arguments()[1].values()
    return "dropout" in case.features or any(isinstance(x, Expression) for x in options)


def summarise(
    function: Function,
    cases: Iterable[Case],
    to: Callable[[Any], Any],
    back: Callable[[Any], Any],
    progress: Callable[[Iterable[Case]], Iterable[Case]] | None = None,
) -> list[Row]:
    """Check a function with the cases about one thing each, and group the results.

    Parameters
    ----------
    function : callable
        As for `check_callable`.
    cases : iterable of Case
        The cases to choose from.
    to, back : callable
        As for `check_callable`.
    progress : callable, optional
        Wraps the iteration over the cases, as `tqdm` does.

    Returns
    -------
    list of Row
        One for each feature, array property, dtype and topic that has cases.
    """
    chosen = [(case, row) for case in cases if (row := _row_of(case)) is not None]
    rows = {row: Row(*row, {}) for row in _ROWS}
    through: Iterable[Case] = [case for case, _ in chosen]
    for case, (_, row) in zip(progress(through) if progress else through, chosen, strict=True):
        rows[row].findings[case.name] = call_named(
            f"case {case}", check_callable, function, case, to, back
        )
    return [row for row in rows.values() if row.findings]


def lines(rows: Iterable[Row]) -> list[str]:
    """Return the rows as the lines of a table.

    Parameters
    ----------
    rows : iterable of Row
        The result of `summarise`.

    Returns
    -------
    list of str
        A line for each row, and a legend.
    """
    cells = [("", "agree", "worst error", ""), *((row.name, *summary(row)) for row in rows)]
    legend = "  Errors are in units of eps · Σ w|v|; inf: not exact where it must be."
    return [*table(cells), "", *paragraph(legend)]


def summary(row: Row) -> tuple[str, str, str]:
    """Return the cells of a row.

    Parameters
    ----------
    row : Row
        The row.

    Returns
    -------
    agree, units, remarks : str
        The number that agree, the largest error, and remarks on those that do not.
    """
    able = len(row.findings) - row.count(NO_ARGUMENT)
    units = "-" if row.worst is None else f"{row.worst:.2g}"
    return f"{row.count(AGREES)} of {able}" if able else "-", units, "; ".join(_remarks(row))


def as_dict(row: Row) -> dict[str, object]:
    """Return a row in plain types, for JSON.

    Parameters
    ----------
    row : Row
        The row.

    Returns
    -------
    dict
        Its kind and name, and the finding of each case.
    """
    findings = {
        name: {
            **finding._asdict(),
            "deviation": finding.deviation and finding.deviation._asdict(),
        }
        for name, finding in row.findings.items()
    }
    return {"kind": row.kind, "name": row.name, "cases": findings}


def _remarks(row: Row) -> Iterator[str]:
    for interpretation, count in row.interpretations.items():
        yield f"{interpretation or 'no other meaning explains it'} ({count})"
    errors = Counter(f.error for f in row.findings.values() if f.status == RAISES)
    yield from (f"{error} ({count})" for error, count in errors.most_common(2))
    missing = {f.missing for f in row.findings.values() if f.status == NO_ARGUMENT}
    if missing:
        yield f"no argument for {', '.join(sorted({m for ms in missing for m in ms.split(', ')}))}"
