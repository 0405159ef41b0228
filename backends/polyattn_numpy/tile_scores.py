"""The scores of the tiles of a task: what the passes forward and backward share.

All passes compute a score from the same factors in the same order, so that they give it the same
bits. The gradient stands on that: the output belongs to weights that have the bits of the weights
which the backward pass computes again. Otherwise the gradients of a row's scores do not add up to
0, and the gradient of the query has an error as large as what all keys have in common.
"""

from __future__ import annotations

import math

import numpy as np

from polyattn.plugin import Array, BackendPrimitives, Indices
from polyattn_numpy.prepared import PreparedCall
from polyattn_numpy.scratch import Scratch, xp
from polyattn_numpy.tile_visibility import RegionMask, TileVisibility
from polyattn_numpy.tiling import ScoreTile, ThreadTask

PRIMITIVES = BackendPrimitives(xp)
# For so few rows, products with vectors read each key from memory once and then from the cache.
VECTORS = 8
# A float16 shifted into the place of a float32's bits is 2^112 times too small.
_SCALE = np.float32(2.0**112)
_SIGN_AND_NUMBER = np.uint32(0x8FFFE000)
# From here on it is infinite or NaN in float16.
_INFINITE = np.float32(2.0**16)


class TileScores:
    """The scores of a task by tile, in scratch arrays with the axes (b, k, rows · g, key)."""

    def __init__(self, call: PreparedCall, task: ThreadTask, scratch: Scratch) -> None:
        self.call, self.task, self.problem = call, task, call.problem
        self.scratch = scratch.array
        self.dtype = np.dtype(call.problem.accumulator)
        self.visibility = TileVisibility(call, task)
        self.key, self.value = call.key, call.value
        if call.pages is None:
            self.key, self.value = task.view(call.key), task.view(call.value)
        self.shape = (task.batch.length, task.heads.length, task.rows.length)
        self.group_size = call.problem.group_size
        self.exp_factor, self.exp = call.exp_factor, call.exp
        # A softcap is applied to scores that are divided by it, and gives them their unit.
        cap = self.problem.softcap
        factor = self.problem.scale * self.exp_factor if cap is None else self.problem.scale / cap
        self.score_factor = self.dtype.type(factor)
        # Other similarities are scaled afterwards: they need not be linear in the query.
        self.query_factor = self.score_factor if call.x.similarity is None else self.dtype.type(1)

    def _per_row(self, name: str, size: int) -> Array:
        """Return a scratch array with some numbers for each row."""
        batch, heads, rows = self.shape
        return self.scratch(name, (batch, heads, rows * self.group_size, size), self.dtype)

    def _block(self, name: str, block: Array) -> Array:
        """Return keys or values in the dtype and layout of the products."""
        if block.dtype == self.dtype and block.strides[-1] == self.dtype.itemsize:
            return block
        copy = self.scratch(name, block.shape, self.dtype)
        convert(block, copy)
        return copy

    def _by_head(self, s: Array) -> Array:
        """Return a view of scores with the axes (b, k, row, g, key)."""
        batch, heads, rows, size = s.shape
        return s.reshape(batch, heads, rows // self.group_size, self.group_size, size)

    def _heads_first(self, s: Array) -> Array:
        """Return scores by head with the axes (b, H, row, key) that `Indices` have."""
        b, k, rows, g, size = s.shape
        return s.swapaxes(2, 3).reshape(b, k * g, rows, size)

    def _products(self, query: Array, key: Array, s: Array) -> Array | None:
        """Write the scores before any cap, and return other similarities than products."""
        similarity = self.call.x.similarity
        if similarity is not None:
            similar: Array = similarity.between(query, key, PRIMITIVES)
            np.multiply(similar, self.score_factor, out=s)
            return similar
        if query.shape[2] <= VECTORS:
            np.matmul(key[:, :, None], query[..., None], s[..., None])
        else:
            np.matmul(query, key.swapaxes(2, 3), s)
        return None

    def _cap(self, s: Array) -> None:
        """Apply the softcap to scores that were divided by it."""
        np.tanh(s, s)
        s *= self.dtype.type((self.problem.softcap or 0) * self.exp_factor)

    def _apply_score_mod(self, s: Array, tile: ScoreTile) -> None:
        modified = self._indices(tile).modified(self._heads_first(s))
        s[...] = self.call.by_row(np.asarray(modified))

    def _hide(self, tile: ScoreTile, masks: list[RegionMask], s: Array) -> Array:
        """Set hidden scores to -inf, and return which are seen."""
        by_head = self._by_head(s)
        if self.call.bias is not None:
            np.copyto(by_head, -math.inf, where=self._bias(tile) == -math.inf)
        for where, mask in masks:
            np.copyto(by_head[where], -math.inf, where=~mask)
        seen: Array = s != -math.inf
        return seen

    def _indices(self, tile: ScoreTile) -> Indices:
        return self.call.indices(self.task, tile.heads, tile.rows, tile.columns)

    def _bias(self, tile: ScoreTile) -> Array:
        """Return a tile's view of the bias, with the axes (b, k, row, g, key)."""
        task = self.task._replace(heads=tile.heads)
        return task.view(self.call.bias, None, tile.rows, tile.columns).swapaxes(2, 3)


def convert(block: Array, out: Array) -> None:
    """Write an array into one of another dtype."""
    # NumPy converts float16 number by number; these four passes take a fifth of its time.
    if block.dtype != np.float16 or out.dtype != np.float32 or not block.dtype.isnative:
        np.copyto(out, block, casting="unsafe")
        return
    np.copyto(out.view(np.int32), block.view(np.int16))  # which repeats the sign
    bits = out.view(np.uint32)
    np.left_shift(bits, 13, bits)
    np.bitwise_and(bits, _SIGN_AND_NUMBER, bits)
    np.multiply(out, _SCALE, out)
    if not (out.size == 0 or (out.max() < _INFINITE and out.min() > -_INFINITE)):
        np.copyto(out, block)
