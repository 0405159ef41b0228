"""Write the report as an HTML page, which is one file and loads nothing."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from html import escape
from itertools import groupby

import polyattn
from polyattn.conformance.functions.check import AGREES
from polyattn.conformance.functions.report import Row, summary
from polyattn.conformance.report.report import ROWS, Cell, Report, Section, cell_text

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --soft: #667085; --line: #d9dee7; --paper: #fff;
  --good: 152 45% 42%; --bad: #b42318; --bad-paper: #fde8e6 }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ef; --soft: #98a2b3; --line: #333b49;
  --paper: #14181f; --good: 152 45% 45%; --bad: #ff8a80; --bad-paper: #4a1f1b } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 70rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.5rem; margin-bottom: .2rem } h2 { font-size: 1.15rem; margin: 2.2rem 0 .5rem }
p, li { max-width: 46rem } .soft { color: var(--soft) }
.verdict { font-weight: 600 } .verdict.bad { color: var(--bad) }
.scroll { overflow-x: auto } table { border-collapse: collapse; font-size: .88rem }
th, td { padding: .28rem .7rem; border-bottom: 1px solid var(--line); text-align: left;
  white-space: nowrap; font-variant-numeric: tabular-nums } th { font-weight: 600 }
thead th { position: sticky; top: 0; background: var(--paper) } tbody th { font-weight: 400 }
tbody th small { display: block; color: var(--soft); white-space: normal; max-width: 20rem }
tr.group th { padding-top: 1rem; color: var(--soft); font-size: .78rem; letter-spacing: .06em;
  text-transform: uppercase; border-bottom-color: var(--ink) }
td { --share: .4 }
td.agrees { background: hsl(var(--good) / var(--share)) }
td.refused, td.note { color: var(--soft) } td.wide { white-space: normal; min-width: 22rem }
td.fails { background: var(--bad-paper); color: var(--bad); font-weight: 600 }
.legend span { display: inline-block; padding: 0 .5rem; margin-right: .2rem }
summary { color: var(--bad); margin-top: 1rem } code { font-size: .82rem; overflow-wrap: anywhere }
ol { font-size: .88rem }
"""

_INTRO = """
<p>Each row is a feature, a dtype or a corner case of attention; each column is a kernel. A number
is the largest error of an element in the cases of the row, in units of <b>eps · Σ w|v|</b>: what
one rounding of every weight can cause. A deeper green means that an element used a larger share of
its limit. The limit is twice the error of the textbook formula in the same dtypes, plus a measured
floor. It is wide for extreme values, which have their own row and count in no other. Point at a
cell to see its cases.</p>
<p class="legend"><span class="soft">–</span> refused: the kernel does not declare the feature, and
raises if it is required.
<span class="soft">[1]</span> refused in some cases, for the reason with that number.</p>
"""

_OF_A_FUNCTION = """
<p>Each row is a feature, a dtype or a corner case of attention. <i>agree</i> counts the cases that
the function has arguments for. The error is the largest of an element, in units of
<b>eps · Σ w|v|</b>; <i>inf</i> means that a result must be exact and is not. The last column names
the other meaning that the results agree with.</p>
"""


def page(report: Report) -> str:
    """Return a report as an HTML page."""
    failed = report.failed
    verdict = f"{failed} failure{'s' * (failed != 1)}" if failed else "All cases agree"
    if report.done < report.total:
        verdict = (
            f"Interrupted after {report.done} of {report.total} checks, {failed or 'none'} failed"
        )
    body = "\n".join(line for section in report.sections for line in _section(section))
    return _whole(verdict, bool(failed) or report.done < report.total, _INTRO + body)


def callable_page(name: str, rows: Sequence[Row]) -> str:
    """Return the report of a function as an HTML page."""
    differing = sum(row.differing for row in rows)
    verdict = f"{differing} cases differ" if differing else "All cases agree"
    lines = (
        f'<tr><th>{escape(row.name)}</th><td class="{_verdict(row)}">{count}</td>'
        f'<td>{escape(units)}</td><td class="soft wide">{escape(remarks)}</td></tr>'
        for row in rows
        for count, units, remarks in [summary(row)]
    )
    table = _table(("agree", "worst error", ""), lines)
    return _whole(verdict, bool(differing), f"<h2>{escape(name)}</h2>{_OF_A_FUNCTION}{table}")


def _verdict(row: Row) -> str:
    if row.differing:
        return "fails"
    return "agrees" if row.count(AGREES) else "note"


def _whole(verdict: str, bad: bool, body: str) -> str:
    when = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    where = f"Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    head = (
        f'<p class="soft">polyattn {polyattn.__version__}, {escape(where)}, {when}</p>\n'
        f'<p class="verdict{" bad" if bad else ""}">{verdict}.</p>\n'
    )
    return (
        f'<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>polyattn check: {escape(verdict)}</title>\n<style>{_STYLE}</style>\n"
        f"<h1>polyattn check</h1>\n{head}{body}\n</html>\n"
    )


def _table(heads: Iterable[object], lines: Iterable[str]) -> str:
    columns = "".join(f"<th>{escape(str(head))}</th>" for head in heads)
    body = "\n".join(lines)
    return (
        f'<div class="scroll"><table><thead><tr><th></th>{columns}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _section(section: Section) -> Iterator[str]:
    yield f"<h2>{escape(str(section.target))}</h2>"
    yield f'<p class="soft">{escape(section.versions)}</p>'
    footnotes: dict[str, int] = {}
    yield _table(section.kernels, _lines(section, footnotes))
    if footnotes:
        yield f"<p>Refused:</p>{_listed('ol', footnotes)}"
    if section.failures:
        listed = _listed("ul", section.failures)
        number = len(section.failures)
        yield f"<details open><summary>{number} failures</summary>{listed}</details>"
    held = (f"{name[0].upper()}{name[1:]}: {result}." for name, result in section.plugin.items())
    yield _listed("ul", held)


def _listed(tag: str, items: Iterable[object]) -> str:
    return f"<{tag}>{''.join(f'<li>{escape(str(item))}</li>' for item in items)}</{tag}>"


def _lines(section: Section, footnotes: dict[str, int]) -> Iterator[str]:
    for group, rows in groupby(ROWS, lambda row: row.group):
        yield f'<tr class="group"><th colspan="{1 + len(section.kernels)}">{group}</th></tr>'
        for _, name, meaning in rows:
            small = f"<small>{escape(meaning)}</small>" if meaning != name else ""
            cells = "".join(_cell(cell, footnotes) for cell in section.row(name))
            yield f"<tr><th>{escape(name)}{small}</th>{cells}</tr>"


def _cell(cell: Cell, footnotes: dict[str, int]) -> str:
    text = escape(cell_text(cell, footnotes)).replace("-", "–")
    kind = _kind(cell)
    share = f' style="--share: {0.12 + 0.6 * min(cell.share, 1):.2f}"' if kind == "agrees" else ""
    return f'<td class="{kind}"{share} title="{escape(_title(cell))}">{text}</td>'


def _kind(cell: Cell) -> str:
    if cell.failures:
        return "fails"
    if cell.note is not None or not cell.agreed + cell.refused:
        return "agrees" if cell.note == "holds" else "note"
    return "agrees" if cell.agreed else "refused"


def _title(cell: Cell) -> str:
    parts = []
    if cell.agreed:
        parts.append(
            f"{cell.agreed} agree; the worst, {cell.worst}, uses {cell.share:.0%} of its limit"
        )
    if cell.refused:
        parts.append(f"{cell.refused} refused: {'; '.join(cell.reasons)}")
    return ". ".join([*cell.failures[:3], *parts])
