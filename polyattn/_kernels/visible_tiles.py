"""Which tiles of scores hold a visible one, as far as static facts and readable arrays show."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from polyattn._base.span import Span
from polyattn._core.call.operands import Operands
from polyattn._core.call.problem import Problem
from polyattn._core.tiles.band import column_span
from polyattn._core.tiles.coverage import TileQuery, combined_mask
from polyattn.plugin import Backend


def visible_tiles(
    problem: Problem, x: Operands, backend: Backend, rows: Span, tiles: Iterable[Span]
) -> Iterator[tuple[Span, bool]]:
    """Yield the keys of each tile that may hold a visible score, and whether it hides some."""
    if 0 in problem.scores:
        return
    mask, seen = combined_mask(problem, x), column_span(problem, rows)
    reads = not problem.transforms and not problem.traced and backend.is_eager(x.query)
    for columns in tiles:
        if columns.stop <= seen.start or columns.start >= seen.stop:
            continue
        if mask is None:
            yield columns, False
            continue
        answer = TileQuery(problem, x, backend.xp, rows, columns, reads=reads).of(mask)
        if answer.any_visible:
            yield columns, not answer.all_visible
