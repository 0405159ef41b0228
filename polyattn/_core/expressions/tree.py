"""Masks of trees of drafts, as speculative decoding has."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from polyattn._base.arrays import Array, ArrayFacts, cast, clip, index_range, is_one_of, library_of
from polyattn._base.host import is_host, is_unreadable
from polyattn._core.expressions.coverage import Block, Coverage
from polyattn._core.expressions.indices import ScoreDims, ScoreIndices
from polyattn._core.expressions.masks import Mask


@dataclass(frozen=True, eq=False, repr=False)
class Tree(Mask):
    """All keys before the drafts, which are the rows, and of the drafts those that an array shows.

    A part has all drafts, and the number of its first row.
    """

    name: ClassVar[str] = "tree"
    axes: ClassVar[dict[str, str]] = {"ancestors": ".--", "first_row": "."}
    positional: ClassVar[bool] = True
    ancestors: Any  # (..., n, n)
    first_row: Any = None

    def seen(self, at: ScoreIndices) -> Array:
        *lead, many, _ = self.ancestors.shape
        row = at.row if self.first_row is None else at.row + at.per_item(self.first_row)
        draft = at.column - at.position() + row
        known = clip(at.xp, draft, 0, many - 1)
        count = math.prod(lead)
        items = at.xp.reshape(index_range(at.xp, 0, count, self.ancestors), tuple(lead))
        item = at.per_item(items)
        table = at.xp.reshape(self.ancestors, (count, many, many))
        return (draft < 0) | (draft < many) & at.looked_up(table, item, row, known)

    def _coverage(self, block: Block) -> Coverage:
        rows = block.position()
        start = rows.least - block.rows[0]  # of the drafts
        if self.first_row is not None:
            start = start - block.per_item(self.first_row)
        first, stop = block.columns
        return Coverage(first <= rows.greatest, stop <= start)

    def check(self, dims: ScoreDims) -> None:
        facts: ArrayFacts = self.ancestors
        if self.first_row is None and not is_one_of(facts.shape[-1], dims.query_length, None):
            raise ValueError(
                f"masks.tree must have L = {dims.query_length} drafts; got {facts.shape[-1]}"
            )
        dims.check_batch("masks.tree: parents", facts.shape[:-2], facts.shape[:-1], "(..., L)")


def ancestors_of(parents: Array) -> Array:
    """Return which drafts are an ancestor of each or itself, (..., n, n), from that or (..., n)."""
    xp, many = library_of(parents, "masks.tree: parents").xp, parents.shape[-1]
    if many is None:
        raise ValueError("masks.tree needs a number of drafts that is known when it is called")
    index = index_range(xp, 0, many, parents)
    row = index[:, None]
    if parents.dtype == xp.bool:
        return parents & (index <= row)
    parents = cast(xp, parents, index.dtype)
    if is_host(parents) and not is_unreadable(parents):
        wrong = (parents < -1) | (parents >= index)
        if wrong.any():
            at = tuple(map(int, xp.argwhere(wrong)[0]))
            raise ValueError(
                "masks.tree: a parent must come before its draft, or be -1 for none; got"
                f" {int(parents[at])} for the draft at {at}"
            )
    seen = (parents[..., None] == index) & (index < row) | (index == row)
    for _ in range((many - 1).bit_length()):  # each step doubles the depth that is covered
        steps = cast(xp, seen, xp.float32)
        seen = xp.matmul(steps, steps) > 0
    return seen
