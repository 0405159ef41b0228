"""Pictures of masks as SVG, for notebooks: without matplotlib.

Requirements: a picture is small and quickly made; a mask that cannot be evaluated by itself, such
as one with a traced array, is shown as code only.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from html import escape

from polyattn._core.expressions.masks import Mask
from polyattn.plot.mask_picture import COLOURS, FRAME, evaluate

SIDE = 192  # pixels
# With more rows or keys, a picture shows tiles.
MOST_CELLS = 128


def as_html(mask: Mask) -> str:
    """Return a mask as HTML: its code, and a picture where it can be drawn."""
    try:
        picture = _picture(mask)
    except Exception:  # of a function of the user, or of an array without values
        picture = ""
    return f"<div><code>{escape(repr(mask))}</code></div>{picture}"


def _picture(mask: Mask) -> str:
    call, _, tiles, cells = evaluate(mask)
    kinds = tiles if cells is None or max(call.lengths) > MOST_CELLS else cells
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{SIDE + 2}" height="{SIDE + 2}"'
        f' viewBox="-1 -1 {SIDE + 2} {SIDE + 2}" role="img" aria-label="the mask"'
        f' shape-rendering="crispEdges"><rect width="{SIDE}" height="{SIDE}" fill="#fff"'
        f' stroke="{FRAME}"/>{"".join(_rectangles(kinds.tolist()))}</svg>'
    )


def _rectangles(kinds: list[list[int]]) -> Iterator[str]:
    """Yield a rectangle for each run of one kind in a row."""
    height = SIDE / len(kinds)
    for n, row in enumerate(kinds):
        width, start = SIDE / len(row), 0
        for kind, run in itertools.groupby(row):
            length = len(list(run))
            yield (
                f'<rect x="{start * width:g}" y="{n * height:g}" width="{length * width:g}"'
                f' height="{height:g}" fill="{COLOURS[kind]}"/>'
            )
            start += length
