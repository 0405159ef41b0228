"""A call with its arrays in the layout from which tasks are cut.

Every array gets all batch axes, and its axis of heads H is split into the key/value heads G and the
query heads H/G that read one of them. For query (2, 8, L, D) and key (1, 4, S, D)::

    query (2, 4, 2, L, D)   key (2, 4, S, D), broadcast   bias (1, 8, L, S) -> (1, 4, 2, L, S)

The exponential is exp, or exp2 where that is faster and nothing changes the scores but a softcap.
Then the scores are multiplied by the `exp_factor`, log2(e): exp2(log2(e) · s) = exp(s).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from polyattn.plugin import Array, Indices, Mask, Operands, Problem, Span, combined_mask
from polyattn_numpy.mask_table import MaskTable
from polyattn_numpy.scratch import fast_exp2, xp
from polyattn_numpy.tiling import ThreadTask, has_few_scores, split_heads

LOG2_E = math.log2(math.e)


class PreparedCall(NamedTuple):
    """A call; `outer` are the batch axes but the last, `batch` is the last, of length 1 if none."""

    problem: Problem
    x: Operands  # as they were given
    query: Array  # (outer..., batch, G, H/G, L, D)
    key: Array  # (outer..., batch, G, S, D); a pool (pages, G, page, D) with a table of pages
    value: Array  # (outer..., batch, G, S, E), or (pages, G, page, E)
    bias: Array | None  # (outer..., batch, G, H/G, L, S), 1 along the axes that it broadcasts over
    tile: int  # most scores of a tile
    mask: Mask | None  # causal, window and mask= together
    table: MaskTable | None
    check: Callable[[], None]  # raises once the call has failed or been interrupted
    exp: Any  # np.exp or np.exp2
    exp_factor: float  # exp(exp_factor · s) is e^s: 1, or log2(e) for np.exp2
    pages: Array | None  # the pages of each item, (outer..., batch, n)
    lengths: Array | None  # the number of keys of each item in them, (outer..., batch)

    def indices(self, task: ThreadTask, heads: Span, rows: Span, columns: Span) -> Indices:
        """Return the indices of some key/value heads, rows and keys of a task."""
        batch, group_size = self.problem.batch or (1,), self.problem.group_size
        flat = 0
        for axis, index in zip(batch, task.outer, strict=False):
            flat = flat * axis + index
        first = flat * batch[-1] + task.batch.start
        items = Span(first, first + task.batch.length)
        heads = Span(heads.start * group_size, heads.stop * group_size)
        return Indices(self.problem, xp, self.x, rows, columns, items=items, heads=heads)

    def by_row(self, array: Array) -> Array:
        """Turn what broadcasts to (b, H, row, key) of a tile into the axes (b, k, row, g, key)."""
        return split_heads(self.problem, array, 4).swapaxes(2, 3)


def prepare(problem: Problem, x: Operands, tile: int, check: Callable[[], None]) -> PreparedCall:
    """Return a call with its arrays in the layout from which tasks are cut."""
    batch = problem.batch or (1,)

    def spread(array: Array) -> Array:
        shape = (*batch, *array.shape[-3:])
        return array if array.shape == shape else np.broadcast_to(array, shape)

    key, value, pages, lengths = x.key, x.value, None, None
    if x.block_table is None:
        key, value = spread(key), spread(value)
    else:
        pages = np.broadcast_to(x.block_table, (*batch, x.block_table.shape[-1]))
        lengths = np.broadcast_to(np.asarray(x.key_lengths), batch)
    mask = combined_mask(problem, x)
    by_exp2 = uses_exp2(problem, tile)
    return PreparedCall(
        problem=problem,
        x=x,
        query=split_heads(problem, spread(x.query)),
        key=key,
        value=value,
        bias=None if x.bias is None else split_heads(problem, x.bias),
        tile=tile,
        mask=mask,
        table=None if mask is None else MaskTable.of(mask, problem, x, tile),
        check=check,
        exp=np.exp2 if by_exp2 else np.exp,
        exp_factor=LOG2_E if by_exp2 else 1.0,
        pages=pages,
        lengths=lengths,
    )


def uses_exp2(problem: Problem, tile: int) -> bool:
    """Return whether weights are powers of 2, in all passes of a call: static facts decide."""
    if not problem.features.isdisjoint(("bias", "score_mod", "score_expression")):
        return False
    # The gradient of few scores is that of the dense kernel, which uses exp.
    return not has_few_scores(problem, tile) and fast_exp2(problem.accumulator)
