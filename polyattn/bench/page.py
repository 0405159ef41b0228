"""Write the results as an HTML page."""

from __future__ import annotations

from html import escape

from polyattn._base.html_page import html_page, html_table
from polyattn.bench.picture import svg
from polyattn.bench.report import Results
from polyattn.bench.table import LEGEND, cells, roof_texts, titles


def page(results: Results) -> str:
    """Return the results as an HTML page: the picture, the rows of the table and the facts."""
    stopped = '<p class="bad">The run was interrupted.</p>\n' if results.interrupted else ""
    rows = [
        (*titles(results), "note"),
        *((*cells(results, row), row.note or "") for row in results.rows),
    ]
    roofs = {f"roof of {device}": text for device, text in roof_texts(results).items()}
    facts = results.machine.facts() | roofs | {"repeat": results.command}
    body = (
        f'<p class="soft">{escape(str(results.workload))}</p>\n{stopped}'
        f'<figure role="img" aria-label="Rates against length">{svg(results)}</figure>\n'
        f'<div class="scroll">{html_table(rows, bars="roof")}</div>\n<p>{escape(LEGEND)}</p>\n'
        f"{html_table([('measured on', ''), *facts.items()])}"
    )
    return html_page("polyattn bench", str(results.workload), body)
