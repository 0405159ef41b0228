"""Write the results of a check as files: a page, JUnit's XML, a badge, a script of a failure."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from html import escape
from typing import Any, NamedTuple

from polyattn._base.files import check_file, write_file
from polyattn._base.streams import complain, show
from polyattn.conformance.functions.check import DIFFERS, NO_ARGUMENT, RAISES
from polyattn.conformance.functions.report import Row
from polyattn.conformance.report.report import ROWS, Report, cell_text

_BADGE = """<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="20" role="img">
<title>polyattn check: {text}</title>
<rect width="{width}" height="20" rx="3" fill="{colour}"/><rect width="103" height="20" rx="3"/>
<g fill="#fff" font-family="Verdana,sans-serif" font-size="11"><text x="6" y="14">polyattn check\
</text><text x="109" y="14">{text}</text></g></svg>
"""
#: What a file contains, or the function that finds it after the results are printed.
Content = str | Callable[[], str | None] | None
OPTIONS = ("html", "junit", "badge", "repro")


class Result(NamedTuple):
    """The result of a row of a kernel, or of a case of a function."""

    subject: str
    name: str
    kind: str  # "failure", "skipped" or "", if it agrees
    text: str


def results_of(report: Report) -> Iterator[Result]:
    """Yield a result for each kernel and row, and for each promise of a plugin as a whole."""
    for section in report.sections:
        for variant in section.kernels:
            for row in ROWS:
                cell = section.cell(row.name, variant)
                is_checked = cell.agreed or cell.note == "holds"
                kind = "failure" if cell.failures else "" if is_checked else "skipped"
                text = "\n".join(cell.failures) or "; ".join(cell.reasons) or cell_text(cell, {})
                yield Result(f"{section.target}.{variant}", row.name, kind, text)
        for name, result in section.plugin.items():
            text = next((x.text for x in section.failures if x.charged == name), result)
            yield Result(f"{section.target}.plugin", name, "failure" * (result == "no"), text)


def results_of_function(function: str, rows: Iterable[Row]) -> Iterator[Result]:
    """Yield a result for each case of a function, under the name of its row."""
    kinds = {DIFFERS: "failure", RAISES: "failure", NO_ARGUMENT: "skipped"}
    for row in rows:
        for case, found in row.findings.items():
            missing = f"no argument for {found.missing}" * (found.status == NO_ARGUMENT)
            off = found.deviation.fault if found.deviation else None
            text = "; ".join(filter(None, (found.error, found.interpretation, off, missing)))
            yield Result(f"{function}.{row.name}", case, kinds.get(found.status, ""), text)


def made(results: list[Result]) -> dict[str, Content]:
    """Return the contents of the files of results, by their options."""
    return {"junit": junit(results), "badge": badge(results)}


def junit(results: list[Result]) -> str:
    """Return results as JUnit's XML."""
    kinds = [result.kind for result in results]
    counts = f'failures="{kinds.count("failure")}" skipped="{kinds.count("skipped")}"'
    lines = [f'<testsuite name="polyattn check" tests="{len(results)}" {counts}>']
    for subject, name, kind, text in results:
        inner = f'<{kind} message="{escape(text)}"/>' if kind else ""
        case = f'classname="{escape(subject)}" name="{escape(name)}"'
        lines.append(f"<testcase {case}>{inner}</testcase>")
    text = "\n".join(['<?xml version="1.0" encoding="utf-8"?>', *lines, "</testsuite>", ""])
    return "".join(x if x.isprintable() or x == "\n" else "?" for x in text)  # XML has no escapes


def badge(results: list[Result]) -> str:
    """Return a badge, an image of SVG: how many results agree, of those that were checked."""
    kinds = [result.kind for result in results if result.kind != "skipped"]
    wrong = kinds.count("failure")
    text = f"{len(kinds) - wrong} of {len(kinds)} agree"
    return _BADGE.format(text=text, width=114 + 7 * len(text), colour="#c33" if wrong else "#2a4")


def as_json(value: Any) -> str:
    """Return JSON, with null for infinite errors, which JSON lacks."""

    def finite(x: Any) -> Any:
        if isinstance(x, dict):
            return {name: finite(y) for name, y in x.items()}
        if isinstance(x, (list, tuple)):
            return [finite(y) for y in x]
        return None if isinstance(x, float) and not math.isfinite(x) else x

    return json.dumps(finite(value), indent=2, allow_nan=False)


def check_files(options: Any) -> None:
    """Raise if a file that is asked for cannot be written, before any work."""
    for name in OPTIONS:
        if (file := getattr(options, name)) is not None:
            check_file(f"--{name}", file)


def give(options: Any, text: object, made: Mapping[str, Content]) -> None:
    """Print the results, and write the files that are asked for even if that fails."""
    try:
        show(text)
    finally:
        for name, content in made.items():
            if (file := getattr(options, name)) is None or content is None:
                continue
            if (found := content() if callable(content) else content) is not None:
                write_file(file, found)
            else:
                complain(f"polyattn check: no failure is one call of arrays: {file} is not made")
