"""A task whose scores are one tile, by few calls, for short sequences.

It gives what the fast pass of `forward_sweep` gives, and leaves to it what that pass would find
unreliable. That pass takes 1.4 to 1.5 times as long with 32 tokens, 1.08 to 1.13 with 128 (12 heads
of 64).
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from polyattn.plugin import Array, Problem, Span
from polyattn_numpy.forward_sweep import LEAST
from polyattn_numpy.prepared import PreparedCall
from polyattn_numpy.scratch import Scratch, ones
from polyattn_numpy.softmax_sums import weighted_sum
from polyattn_numpy.tile_scores import VECTORS
from polyattn_numpy.tile_visibility import RegionMask, TileVisibility
from polyattn_numpy.tiling import ScoreTile, ThreadTask, row_sizes

# Features that add only masks to the exponential between the two products.
SUPPORTED = frozenset({
    "batch_broadcast", "causal", "grouped_heads", "logsumexp", "mask", "mask_expression",
    "mask_mod", "query_offset", "query_offset_array", "scale", "value_size", "window",
})  # fmt: skip
# With fewer scores, an item computed by itself costs more than the keys that it leaves out.
SCORES_OF_AN_ITEM = 2**16


@lru_cache(maxsize=32)
def may_fit_at_once(problem: Problem, tile: int) -> bool:
    """Return whether, by static facts, the scores of each head can be computed as one tile."""
    return (
        problem.features <= SUPPORTED
        and problem.dtype == problem.accumulator
        and 0 not in problem.scores
        and problem.query_length * problem.group_size > VECTORS
        and problem.key_length <= math.isqrt(tile)
        # A band that crosses several strips leaves some of them out.
        and problem.query_length <= row_sizes(problem, tile)[1]
    )


def fits_at_once(call: PreparedCall) -> bool:
    """Return whether `write_at_once` supports a call."""
    return (
        call.table is None
        and call.pages is None
        and may_fit_at_once(call.problem, call.tile)
        and all(x.dtype.isnative and x.strides[-1] == x.itemsize for x in call.x[:3])
    )


def separates_items(call: PreparedCall) -> bool:
    """Return whether each item is a task of its own, without the keys that its mask hides."""
    return call.x.mask is not None and math.prod(call.problem.scores[-3:]) >= SCORES_OF_AN_ITEM


def write_at_once(
    call: PreparedCall, output: Array, logsumexp: Array | None, task: ThreadTask, scratch: Scratch
) -> bool:
    """Write the output and logsumexp of a task, or return False if a row is unreliable."""
    if task.parts > 1:
        return False
    columns, masks = seen_part(call, task)
    if not columns.length:
        return False
    at, span = (*task.outer, slice(*task.batch), slice(*task.heads)), slice(*columns)
    query, key, value = call.query[at], call.key[at][:, :, span], call.value[at][:, :, span]
    batch, heads, group_size, length, size = query.shape
    shape, keys, dtype = (batch, heads, group_size * length), key.shape[-2], key.dtype
    scaled = scratch.array("query", (*shape, size), dtype)
    factor = call.problem.scale * call.exp_factor
    np.multiply(query, dtype.type(factor), out=scaled.reshape(query.shape))
    s = scratch.array("scores", (*shape, keys), dtype)
    np.matmul(scaled, key.swapaxes(-1, -2), out=s)
    call.exp(s, s)
    by_head = s.reshape(batch, heads, group_size, length, keys).swapaxes(2, 3)
    for where, seen in masks:
        by_head[where] *= seen
    total = scratch.array("total", (*shape, 1), dtype)
    np.matmul(s, ones(keys, dtype), total)
    if not (total.min() >= LEAST and total.max() < math.inf):
        return False
    weighted = output[at].reshape(*shape, -1)
    # The smaller array of the two: of 16 or 32 keys, the output takes 1.01 to 1.06 times as long.
    divide_weights = keys < weighted.shape[-1]
    if divide_weights:
        s /= total
    weighted_sum(s, value, weighted)
    if not divide_weights:
        weighted /= total
    if logsumexp is not None:
        np.log(total, out=logsumexp[at].reshape(total.shape))
    return bool(np.isfinite(weighted).all())


def seen_part(call: PreparedCall, task: ThreadTask) -> tuple[Span, list[RegionMask]]:
    """Return the keys of a task and the masks of its scores, without the keys that no row sees."""
    columns = task.columns
    if call.mask is None:
        return columns, []
    banded = call.problem.masks_by_position
    tile = ScoreTile(task.heads, task.rows, columns, banded, columns.length)
    masks = TileVisibility(call, task).masks(tile)
    if masks is None:
        return Span(columns.start, columns.start), []
    if len(masks) != 1 or masks[0][1].size != columns.length or not separates_items(call):
        return columns, masks
    mask = masks[0][1]
    (visible,) = mask.reshape(-1).nonzero()
    first, last = int(visible[0]), int(visible[-1]) + 1
    kept = mask[..., first:last]
    some = Span(columns.start + first, columns.start + last)
    return some, [] if kept.all() else [(..., kept)]
