"""Print rows of text in columns, and paragraphs, as wide as the terminal."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from itertools import zip_longest

from polyattn._base.tracing import constant_when_traced

NARROWEST = 8  # columns of text: a column of a table is not made narrower
LEAST = 60  # columns of the terminal: one that is narrower wraps the lines itself


@constant_when_traced
def terminal_width() -> int:
    """Return the columns of the terminal, or of COLUMNS; in a file a line may have any length."""
    return max(LEAST, shutil.get_terminal_size((sys.maxsize, 1)).columns)


def printable(text: str) -> str:
    """Return text with a ? for each control character: it could change a terminal, or hide text."""
    return "".join(x if x.isprintable() or x == "\n" else "?" for x in text)


def table(rows: Sequence[tuple[str, ...]], right: Sequence[int] = ()) -> list[str]:
    """Return the rows as lines, each column as wide as its widest cell.

    If they do not fit the terminal, the widest columns become narrower and their cells wrap.
    Columns with their number in `right` are right-aligned.
    """
    widths = _fitted([max(map(len, column)) for column in zip(*rows, strict=True)])
    signed = [width if n in right else -width for n, width in enumerate(widths)]
    lines = []
    for row in rows:
        cells = [_wrapped(cell, width) for cell, width in zip(row, widths, strict=True)]
        lines += [line(parts, signed) for parts in zip_longest(*cells, fillvalue="")]
    return lines


def line(cells: Iterable[str], widths: Iterable[int]) -> str:
    """Return the cells as one line: right-aligned in a width, left-aligned in a negative one."""
    columns = zip(cells, widths, strict=True)
    return "  " + "  ".join(c.rjust(n) if n > 0 else c.ljust(-n) for c, n in columns).rstrip()


def paragraph(text: str, indent: str = "  ") -> list[str]:
    """Return the text as lines that fit the terminal; `indent` begins all but the first."""
    return [
        part
        for given in text.splitlines() or [""]
        for part in _wrapped(given, terminal_width(), indent)
    ]


def _fitted(widths: list[int]) -> list[int]:
    room = terminal_width() - 2 * len(widths)
    while sum(widths) > room and max(widths) > NARROWEST:
        widths[widths.index(max(widths))] -= 1
    return widths


def _wrapped(text: str, width: int, indent: str = "") -> list[str]:
    if len(text) <= width:
        return [text]
    return textwrap.wrap(text, width, subsequent_indent=indent, break_on_hyphens=False)
