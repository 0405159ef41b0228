"""A piece whose scores are one tile, by few calls: in short sequences Python is what takes long.

It gives what the fast pass of `sweep` gives, and leaves to it what that pass would find unreliable.
"""

from __future__ import annotations

import math

import numpy as np

from polyattn.plugin import Array
from polyattn_numpy.blocks import Piece, Tile, group_size_of, row_sizes
from polyattn_numpy.online_softmax import weighted_sum
from polyattn_numpy.prepared import PreparedCall
from polyattn_numpy.scratch import Scratch, fast_exp2, ones
from polyattn_numpy.sweep import LEAST, LOG2_E, VECTORS
from polyattn_numpy.visibility import Visibility

__all__ = ["fits_at_once", "write_at_once"]


def fits_at_once(call: PreparedCall) -> bool:
    """Return whether the scores of a head are one tile, of products and masks only."""
    problem, x = call.problem, call.x
    plain = x.bias is None and x.score_mod is None and x.similarity is None and x.sinks is None
    if not plain or problem.softcap is not None or problem.dropout or call.table is not None:
        return False
    rows = problem.query_length * group_size_of(problem)
    # A band that crosses several strips leaves some of them out.
    is_one_tile = problem.key_length <= math.isqrt(call.tile) and (
        problem.query_length <= row_sizes(problem, call.tile)[1]
    )
    return (
        is_one_tile
        and rows > VECTORS
        and all(
            array.dtype == problem.accumulator and array.strides[-1] == array.itemsize
            for array in (x.query, x.key, x.value)
        )
    )


def write_at_once(
    call: PreparedCall, output: Array, logsumexp: Array | None, piece: Piece, scratch: Scratch
) -> bool:
    """Write the output and logsumexp of a piece, or return False if a row is unreliable."""
    if piece.parts > 1:
        return False
    at, columns = (*piece.outer, slice(*piece.batch), slice(*piece.heads)), slice(*piece.columns)
    query, key, value = call.query[at], call.key[at][:, :, columns], call.value[at][:, :, columns]
    batch, heads, group_size, length, size = query.shape
    shape, keys, dtype = (batch, heads, group_size * length), key.shape[-2], key.dtype
    in_bits = fast_exp2(dtype)
    scaled = scratch.array("query", (*shape, size), dtype)
    factor = call.problem.scale * (LOG2_E if in_bits else 1.0)
    np.multiply(query, dtype.type(factor), out=scaled.reshape(query.shape))
    s = scratch.array("scores", (*shape, keys), dtype)
    np.matmul(scaled, key.swapaxes(-1, -2), out=s)
    (np.exp2 if in_bits else np.exp)(s, s)
    if call.mask is not None:
        tile = Tile(piece.heads, piece.rows, piece.columns, call.problem.masks_by_position, keys)
        masks = Visibility(call, piece).masks(tile)
        if masks is None:
            return False
        by_head = s.reshape(batch, heads, group_size, length, keys).swapaxes(2, 3)
        for where, seen in masks:
            by_head[where] *= seen
    total = scratch.array("total", (*shape, 1), dtype)
    np.matmul(s, ones(keys, dtype), total)
    weighted = output[at].reshape(*shape, -1)
    weighted_sum(s, value, weighted)
    if not (total.min() >= LEAST and total.max() < math.inf and math.isfinite(weighted.sum())):
        return False
    weighted /= total
    if logsumexp is not None:
        np.log(total, out=logsumexp[at].reshape(total.shape))
    return True
