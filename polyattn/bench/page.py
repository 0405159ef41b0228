"""Write the report as an HTML page."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from polyattn._base.html_page import html_page
from polyattn.bench import picture
from polyattn.bench.report import Report, Row
from polyattn.bench.table import COLUMNS, LEGEND, cells_of, rate_unit, roof_texts


def page(report: Report) -> str:
    """Return a report as an HTML page."""
    stopped = '<p class="bad">The run was interrupted.</p>\n' if report.interrupted else ""
    body = (
        f'<p class="soft">{escape(str(report.workload))}</p>\n{stopped}'
        f'<figure role="img" aria-label="Rates against length">{picture.svg(report)}</figure>\n'
        f"{''.join(_table(report))}<p>{escape(LEGEND)}</p>\n"
        f"<h2>Measured on</h2>\n<dl>{''.join(_facts(report))}</dl>\n"
        f"<h2>Repeat</h2>\n<p><code>{escape(report.command)}</code></p>"
    )
    return html_page("polyattn bench", str(report.workload), body)


def _table(report: Report) -> Iterator[str]:
    titles = [*COLUMNS]
    titles[2] = rate_unit(report)[0]
    heads = "".join(f"<th>{title}</th>" for title in titles)
    names = '<th>length</th><th class="name">backend</th><th class="name">kernel</th>'
    yield '<div class="scroll"><table class="figures">\n'
    yield f"<thead><tr>{names}{heads}</tr></thead><tbody>\n"
    before = None
    for row in report.rows:
        start = "" if row.length == before else ' class="first"'
        yield f"<tr{start}>{''.join(_row(report, row))}</tr>\n"
        before = row.length
    yield "</tbody></table></div>\n"


def _row(report: Report, row: Row) -> Iterator[str]:
    yield f'<td>{row.length}</td><td class="name">{escape(row.backend)}</td>'
    if row.seconds is None:
        yield f'<td class="note" colspan="{1 + len(COLUMNS)}">{escape(row.note or "")}</td>'
        return
    note = f' title="{escape(row.note)}"' if row.note else ""
    yield f'<td class="name"{note}>{escape(row.kernel or "")}{"*" if row.note else ""}</td>'
    for title, cell in zip(COLUMNS, cells_of(report, row), strict=True):
        part = min(report.of_roof(row) or 0, 1)
        share = f' class="bar" style="--part: {part:.0%}"' if title == "roof" else ""
        yield f"<td{share}>{escape(cell)}</td>"


def _facts(report: Report) -> Iterator[str]:
    roofs = {f"roof of {device}": text for device, text in roof_texts(report).items()}
    facts = report.machine.facts() | roofs
    for name, text in facts.items():
        yield f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>\n"
