"""The report as one page that needs nothing beside itself."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from polyattn.bench import picture
from polyattn.bench.report import Report, Row
from polyattn.bench.table import COLUMNS, LEGEND, cells_of, digits, rate_unit

__all__ = ["page"]

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --soft: #667085; --line: #d9dee7; --paper: #fff;
  --share: 205 70% 45% }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ef; --soft: #98a2b3; --line: #333b49;
  --paper: #14181f } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 62rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.5rem; margin-bottom: .2rem } h2 { font-size: 1.15rem; margin: 2.2rem 0 .5rem }
p { max-width: 46rem } .soft { color: var(--soft) } .bad { font-weight: 600 }
figure { margin: 1.5rem 0; background: #fff; border: 1px solid var(--line); border-radius: 6px;
  padding: .5rem; max-width: 48rem }
figure svg { width: 100%; height: auto; display: block }
.scroll { overflow-x: auto } table { border-collapse: collapse; font-size: .88rem }
th, td { padding: .28rem .7rem; border-bottom: 1px solid var(--line); text-align: right;
  white-space: nowrap; font-variant-numeric: tabular-nums } th { font-weight: 600 }
.name { text-align: left } td.note { text-align: left; color: var(--soft); white-space: normal }
tr.first td { border-top: 2px solid var(--line) }
td.share { min-width: 5rem; background: linear-gradient(to right,
  hsl(var(--share) / .3) var(--part), transparent var(--part)) }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1.2rem; font-size: .9rem }
dt { color: var(--soft) } dd { margin: 0; overflow-wrap: anywhere } code { font-size: .85rem }
"""


def page(report: Report) -> str:
    """Return a report as an HTML page."""
    said = str(report.workload)
    stopped = (
        '<p class="bad">It was interrupted before its end.</p>\n' if report.interrupted else ""
    )
    drawn = f'<figure role="img" aria-label="Rates against length">{picture.svg(report)}</figure>\n'
    return (
        f'<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>polyattn bench: {escape(said)}</title>\n<style>{_STYLE}</style>\n"
        f'<h1>polyattn bench</h1>\n<p class="soft">{escape(said)}</p>\n{stopped}'
        f"{drawn}{''.join(_table(report))}"
        f"<p>{escape(LEGEND)}</p>\n<h2>What it ran on</h2>\n<dl>{''.join(_facts(report))}</dl>\n"
        f"<h2>To repeat it</h2>\n<p><code>{escape(report.command)}</code></p>\n</html>\n"
    )


def _table(report: Report) -> Iterator[str]:
    titles = [*COLUMNS]
    titles[2] = rate_unit(report)[0]
    heads = "".join(f"<th>{title}</th>" for title in titles)
    names = '<th>length</th><th class="name">backend</th><th class="name">kernel</th>'
    yield f'<div class="scroll"><table><thead><tr>{names}{heads}</tr></thead><tbody>\n'
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
        share = f' class="share" style="--part: {part:.0%}"' if title == "roof" else ""
        yield f"<td{share}>{escape(cell)}</td>"


def _facts(report: Report) -> Iterator[str]:
    unit, scale = rate_unit(report)
    facts = report.machine.facts()
    for device, peak in report.roofs.items():
        facts[f"roof of {device}"] = (
            f"{digits(peak.product / scale)} {unit} in a matrix product ({peak.backend}),"
            f" {digits(peak.bandwidth / 1e9)} GB/s"
        )
    for name, text in facts.items():
        yield f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>\n"
