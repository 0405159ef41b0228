"""Write the HTML pages of ``polyattn bench`` and ``polyattn check``: each is one file."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --soft: #667085; --line: #d9dee7; --paper: #fff;
  --good: 152 45% 42%; --bad: #b42318; --bad-paper: #fde8e6; --bar: 205 70% 45% }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ef; --soft: #98a2b3; --line: #333b49;
  --paper: #14181f; --good: 152 45% 45%; --bad: #ff8a80; --bad-paper: #4a1f1b } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 70rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.5rem; margin-bottom: .2rem } h2 { font-size: 1.15rem; margin: 2.2rem 0 .5rem }
p, li { max-width: 46rem } .soft { color: var(--soft) }
.verdict, .bad { font-weight: 600 } .verdict.bad { color: var(--bad) }
figure { margin: 1.5rem 0; background: #fff; border: 1px solid var(--line); border-radius: 6px;
  padding: .5rem; max-width: 48rem }
figure svg { width: 100%; height: auto; display: block }
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
td.bar { min-width: 5rem; background: linear-gradient(to right,
  hsl(var(--bar) / .3) var(--part), transparent var(--part)) }
.legend span { display: inline-block; padding: 0 .5rem; margin-right: .2rem }
summary { color: var(--bad); margin-top: 1rem } code { font-size: .82rem; overflow-wrap: anywhere }
ol { font-size: .88rem }
"""


def html_table(rows: Iterable[Iterable[str]], bars: str | None = None) -> str:
    """Return rows of text as an HTML table, the first of them its head.

    The percentages of the column titled `bars` have a bar of their length behind them.
    """
    head, *body = [[escape(cell) for cell in row] for row in rows]
    starts = ['<td class="bar" style="--part: {}">' if x == bars else "<td>" for x in head]
    lines = ["".join(f"<th>{cell}</th>" for cell in head)]
    for row in body:
        cells = zip(starts, row, strict=True)
        lines.append("".join(f"{start.format(cell)}{cell}</td>" for start, cell in cells))
    return "<table>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>"


def html_page(heading: str, subject: str, body: str) -> str:
    """Return a page that loads nothing; `body` is HTML, the other two are text."""
    return (
        f'<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(heading)}: {escape(subject)}</title>\n<style>{_STYLE}</style>\n"
        f"<h1>{escape(heading)}</h1>\n{body}\n</html>\n"
    )
