"""Write rows as an HTML table, which a notebook shows."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape


def html_table(rows: Iterable[Iterable[str]]) -> str:
    """Return rows of text as an HTML table, the first of them its head."""
    head, *body = [[escape(cell) for cell in row] for row in rows]
    lines = ["".join(f"<th>{cell}</th>" for cell in head)]
    lines += ["".join(f"<td>{cell}</td>" for cell in row) for row in body]
    return "<table>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>"
