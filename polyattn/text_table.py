"""Print rows of text in columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["line", "table"]


def table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Return the rows as lines, each column as wide as its widest cell."""
    widths = [-max(map(len, column)) for column in zip(*rows, strict=True)]
    return [line(row, widths) for row in rows]


def line(cells: Iterable[str], widths: Iterable[int]) -> str:
    """Return the cells as one line: right-aligned in a width, left-aligned in a negative one."""
    columns = zip(cells, widths, strict=True)
    return "  " + "  ".join(c.rjust(n) if n > 0 else c.ljust(-n) for c, n in columns).rstrip()
