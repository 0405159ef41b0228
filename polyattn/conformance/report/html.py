"""Write a report as an HTML page, which is one file and loads nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from html import escape

import polyattn
from polyattn.conformance.report.report import Report, Section, table_rows

_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>polyattn check</title>
<style>
:root {{ color-scheme: light dark }}
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2rem; overflow-x: auto }}
table {{ border-collapse: collapse }} th, td {{ padding: .3rem .7rem; text-align: left }}
td {{ border-bottom: 1px solid #8886 }} td:first-child {{ white-space: nowrap }}
</style>
<h1>polyattn check</h1>
<p>polyattn {version}. Errors are in units of eps · Σ w|v|. {verdict}.</p>
{body}
</html>
"""


def page(report: Report) -> str:
    """Return a report as an HTML page."""
    failed = report.failed
    verdict = f"{failed} failure{'s' * (failed != 1)}" if failed else "All cases agree"
    if report.done < report.total:
        done = f"{report.done} of {report.total}"
        verdict = f"Interrupted after {done} checks, {failed or 'none'} failed"
    return _whole(verdict, (part for section in report.sections for part in _parts(section)))


def functions_page(tables: Mapping[str, Iterable[Iterable[str]]], differing: int) -> str:
    """Return the tables of the reports of functions as an HTML page."""
    verdict = f"{differing} cases differ" if differing else "All cases agree"
    return _whole(verdict, (f"<h2>{escape(n)}</h2>{_table(rows)}" for n, rows in tables.items()))


def _whole(verdict: str, parts: Iterable[str]) -> str:
    return _PAGE.format(version=polyattn.__version__, verdict=verdict, body="\n".join(parts))


def _parts(section: Section) -> Iterator[str]:
    footnotes: dict[str, int] = {}
    yield f"<h2>{escape(str(section.target))}</h2><p>{escape(section.versions)}</p>"
    yield _table(table_rows(section, footnotes))
    yield _listed("Refused", "ol", footnotes)
    yield _listed("Failures", "ul", section.failures)
    yield _listed("The plugin", "ul", (f"{name}: {x}" for name, x in section.plugin.items()))


def _table(rows: Iterable[Iterable[str]]) -> str:
    """Return rows of text, the first of them the head."""
    head, *body = [[escape(cell) for cell in row] for row in rows]
    lines = ["".join(f"<th>{cell}</th>" for cell in head)]
    lines += ["".join(f"<td>{cell}</td>" for cell in row) for row in body]
    return "<table>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>"


def _listed(what: str, tag: str, items: Iterable[object]) -> str:
    lines = "".join(f"<li>{escape(str(item))}</li>" for item in items)
    return f"<h3>{what}</h3><{tag}>{lines}</{tag}>" if lines else ""
