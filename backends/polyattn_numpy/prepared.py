"""A call with its arrays in the layout from which tasks are cut."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import array_api_compat.numpy as xp
import numpy as np

from polyattn.plugin import Array, Indices, Mask, Operands, Problem, Span, combined_mask
from polyattn_numpy.mask_table import MaskTable
from polyattn_numpy.scratch import fast_exp2
from polyattn_numpy.tiling import ThreadTask, has_few_scores, split_heads

LOG2_E = math.log2(math.e)


class PreparedCall(NamedTuple):
    """A call, its arrays with the axes (outer..., batch, G, H/G, length, size)."""

    problem: Problem
    x: Operands
    query: Array
    key: Array  # without the axis H/G; a pool (pages, G, page, D) if there is a table of pages
    value: Array  # likewise
    bias: Array | None  # of length 1 along the axes that it broadcasts over
    tile: int  # most scores of a tile
    mask: Mask | None  # causal, window and mask= together
    table: MaskTable | None
    check: Callable[[], None]  # raises once the call has failed or been interrupted
    per_nat: float  # scores are in units of nats, or of bits for exp2
    exp: Any  # np.exp or np.exp2
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
    query = split_heads(problem, spread(x.query))
    bias = None if x.bias is None else split_heads(problem, x.bias)
    mask = combined_mask(problem, x)
    table = None if mask is None else MaskTable.of(mask, problem, x, tile)
    unit = (LOG2_E, np.exp2) if counts_in_bits(problem, tile) else (1.0, np.exp)
    return PreparedCall(
        *(problem, x, query, key, value, bias, tile, mask, table, check, *unit, pages, lengths)
    )


def counts_in_bits(problem: Problem, tile: int) -> bool:
    """Return whether scores are in bits, which static facts decide for all passes of a call."""
    if not problem.features.isdisjoint(("bias", "score_mod", "score_expression")):
        return False
    # The gradient of few scores is that of the dense kernel, which counts in nats.
    return not has_few_scores(problem, tile) and fast_exp2(problem.accumulator)
