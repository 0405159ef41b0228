"""The keys with the largest scores of each row, computed in tiles, with memory for one of them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from polyattn._base.arrays import Array, cast, index_range
from polyattn._base.span import Span
from polyattn._core.call.operands import Operands
from polyattn._core.call.problem import Problem
from polyattn._core.tiles.axes import part_of, scaled
from polyattn._core.tiles.band import column_span
from polyattn._core.tiles.indices import Indices
from polyattn._kernels.dense import COMPUTED, scores
from polyattn._kernels.visible import hide, visible_tiles
from polyattn.plugin import Backend, Kernel

# The scores of a tile over all items and heads: 16 MiB of float32, and some copies.
AREA = 2**22
# The keys of a tile, at least, and four times those that are kept from one tile to the next.
LEAST = 2**10


@dataclass(frozen=True)
class TopKeys(Kernel):
    """The keys of the largest scores."""

    name: ClassVar[str] = "top_keys"
    # A norm of scores needs whole rows; the others change no order of scores.
    features = COMPUTED - {"dropout", "normalizer", "score_norm", "sinks"}

    count: int = 1

    def reasons_against(self, problem: Problem) -> list[str]:
        """Return why scores cannot be cut into tiles."""
        if problem.is_symbolic:
            return ["its tiles need lengths that are known"]
        return ["it computes no arrays that are cut into chunks"] if problem.chunks else []

    def weights(
        self, problem: Problem, operands: Operands, head_weights: Array | None, backend: Backend
    ) -> tuple[Array, Array | None]:
        """Return the keys, (..., H, L, count).

        With weights of heads, (..., H, L), those of the sums over heads, (..., 1, L, count).
        """
        xp: Any = backend.xp
        length, keys = problem.scores[-2:]
        lead = max(1, math.prod(problem.batch) * problem.heads)
        wide = max(4 * self.count, LEAST, AREA // (lead * max(1, length)))
        tall = max(1, AREA // (lead * min(wide, max(1, keys))))
        blocks = []
        for rows in list(Span(0, length).split(tall)) or [Span(0, 0)]:
            of_heads = None
            if head_weights is not None:
                of_heads = head_weights[..., rows.start : rows.stop, None]
            blocks.append(self._of_rows(problem, operands, of_heads, backend, rows, wide))
        return blocks[0] if len(blocks) == 1 else xp.concat(blocks, axis=-2), None

    def _of_rows(
        self, problem: Problem, x: Operands, of_heads: Array | None, backend: Backend, rows: Span,
        wide: int,
    ) -> Array:  # fmt: skip
        xp: Any = backend.xp
        heads = problem.heads if of_heads is None else min(1, problem.heads)
        shape = (*problem.batch, heads, rows.length)
        query = scaled(problem, x.query[..., rows.start : rows.stop, :], xp)
        # So many absent keys, of the score −inf.
        none = index_range(xp, 0, self.count, x.query) * 0
        best = xp.broadcast_to(cast(xp, none, query.dtype) - math.inf, (*shape, self.count))
        places = xp.broadcast_to(cast(xp, none, xp.int32), best.shape)
        tiles = column_span(problem, rows).split(wide)
        for columns, masked in visible_tiles(problem, x, backend, rows, tiles):
            at = Indices(problem, xp, x, rows, columns)
            key = part_of(problem, x.key, columns, xp)
            s = scores(problem, x, backend, query, key, at, masked=masked).final
            if of_heads is not None:
                seen = xp.max(s, axis=-3, keepdims=True) != -math.inf
                s = xp.where(s < 0, 0.0, s) * cast(xp, of_heads, s.dtype)
                s = hide(xp, xp.sum(s, axis=-3, keepdims=True), seen)
            s = xp.where(xp.isnan(s), math.inf, s)  # first of all, to reach the output
            numbers = cast(xp, index_range(xp, *columns, x.query), xp.int32)
            numbers = xp.broadcast_to(numbers, (*shape, columns.length))
            best, places = xp.concat([best, s], axis=-1), xp.concat([places, numbers], axis=-1)
            found = backend.largest(best, self.count)
            best, places = (xp.take_along_axis(one, found, axis=-1) for one in (best, places))
        # Absent ones at the end.
        absent = problem.key_length
        places = xp.sort(xp.where(best == -math.inf, absent, places), axis=-1)
        return cast(xp, xp.where(places == absent, -1, places), xp.int32)
