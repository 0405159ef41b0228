"""Pictures of masks and scores as SVG, for notebooks: without matplotlib.

Requirements: a picture is small and quickly made; an expression that cannot be evaluated by itself,
such as one with a traced array, is shown as code only.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from html import escape

from polyattn._base.arrays import facts_of
from polyattn._core.expressions.masks import Mask
from polyattn._core.expressions.scores import Score
from polyattn.plot.mask_picture import COLOURS, FRAME, evaluate, library_for

SIDE = 192  # pixels
# With more rows or keys, a picture shows tiles.
MOST_CELLS = 128
ROWS = 32  # of the map of a score
SPAN = 20  # of the curve of a score, from −20 to 20


def as_html(value: Mask | Score) -> str:
    """Return a mask or score as HTML: its code, and a picture where it can be drawn."""
    try:
        picture = _mask(value) if isinstance(value, Mask) else _score(value)
    except Exception:  # of a function of the user, or of an array without values
        picture = ""
    return f"<div><code>{escape(repr(value))}</code></div>{picture}"


def _mask(mask: Mask) -> str:
    call, _, tiles, cells = evaluate(mask)
    rows, keys = call.lengths
    kinds = tiles if cells is None or max(rows, keys) > MOST_CELLS else cells
    return _picture(_painted([[COLOURS[kind] for kind in row] for row in kinds.tolist()]), "mask")


def _score(score: Score) -> str:
    """Return the map of what the score adds to 0 for head 0, or else the curve of its result."""
    like, xp, name = library_for(score)
    device = {} if name != "torch" else {"device": facts_of(like).device}
    i = xp.reshape(xp.arange(ROWS, **device), (ROWS, 1))
    j = xp.reshape(i, (1, ROWS))
    zero = xp.zeros((1, 1), dtype=xp.int64 if name == "torch" else i.dtype, **device)
    flat = xp.zeros((ROWS, ROWS), dtype=xp.float32, **device)
    added = score(flat, zero, zero, i, j).tolist()
    if len(set(itertools.chain(*added))) > 1:
        return _picture(_painted(_greys(added)), "score")
    line = xp.reshape(xp.linspace(-SPAN, SPAN, 81, dtype=xp.float32, **device), (1, 81))
    results = score(line, zero, zero, zero, zero).tolist()[0]
    return _picture(_curve(results), "score")


def _greys(numbers: list[list[float]]) -> list[list[str]]:
    """Return a shade for each number, the largest the darkest; an infinite one is white."""
    finite = [x for row in numbers for x in row if abs(x) < float("inf")]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    spread = (high - low) or 1.0

    def shade(x: float) -> str:
        if not abs(x) < float("inf"):
            return "#ffffff"
        return "#{0:02x}{0:02x}{0:02x}".format(round(240 - 200 * (x - low) / spread))

    return [[shade(x) for x in row] for row in numbers]


def _painted(colours: list[list[str]]) -> Iterator[str]:
    """Yield a rectangle for each run of one colour in a row."""
    height = SIDE / len(colours)
    for n, row in enumerate(colours):
        width, start = SIDE / len(row), 0
        for colour, run in itertools.groupby(row):
            length = len(list(run))
            yield (
                f'<rect x="{start * width:g}" y="{n * height:g}" width="{length * width:g}"'
                f' height="{height:g}" fill="{colour}"/>'
            )
            start += length


def _curve(results: list[float]) -> Iterator[str]:
    """Yield the axes, and the results of scores from −SPAN to SPAN."""
    half = SIDE / 2
    yield f'<path d="M0 {half:g}H{SIDE}M{half:g} 0V{SIDE}" stroke="{FRAME}" fill="none"/>'
    step = SIDE / (len(results) - 1)
    points = " ".join(
        f"{n * step:.1f},{half - y * half / SPAN:.1f}"
        for n, y in enumerate(results)
        if abs(y) <= SPAN
    )
    yield f'<polyline points="{points}" stroke="{COLOURS[-1]}" stroke-width="2" fill="none"/>'


def _picture(shapes: Iterable[str], of: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{SIDE + 2}" height="{SIDE + 2}"'
        f' viewBox="-1 -1 {SIDE + 2} {SIDE + 2}" role="img" aria-label="the {of}"'
        f' shape-rendering="crispEdges"><rect width="{SIDE}" height="{SIDE}" fill="#fff"'
        f' stroke="{FRAME}"/>{"".join(shapes)}</svg>'
    )
