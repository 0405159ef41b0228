"""A pass over the tiles of a piece, in memory that its thread keeps.

There are three ways to go. The plain one takes exponentials as they come, without a row's maximum:
it needs no pass to find it and none to subtract it. What comes out proves, row by row, whether that
was right. The sum of a row's weights bounds each of them, so where it and the output are finite
nothing overflowed, and where it is not small nothing that counts was lost below. A NaN or infinity
behind a mask spoils that proof, and a clean pass gives the same numbers without what is hidden.
Rows that remain, for they have large scores or see no number, are done again with care: with the
running maximum.

Which way a row goes depends on what it sees and on nothing else, and so does each of its bits.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from polyattn.plugin import Array, Indices
from polyattn_numpy.blocks import Piece, Tile
from polyattn_numpy.online_softmax import Running, spoilt_product, weighted_sum
from polyattn_numpy.prepared import Call
from polyattn_numpy.scratch import Memory, fast_exp2, ones
from polyattn_numpy.visibility import Hidden, Sight

__all__ = ["Sweep"]

# Sums of weights below this may have lost what lies below float32's range.
LEAST = 2.0**-20
# So few rows that a product by vectors reads each key once from memory and then from cache.
VECTORS = 8
LOG2_E = math.log2(math.e)


# ---- the pass ----------------------------------------------------------------------------------


class Sweep:
    """A pass over the tiles of a piece.

    Parameters
    ----------
    call : Call
        The call.
    piece : Piece
        Which part of it.
    memory : Memory
        Where the result is, until it is lent again.
    clean : bool
        Whether to mind what absent keys and values hold.
    careful : bool
        Whether to subtract maxima.
    """

    def __init__(
        self,
        call: Call,
        piece: Piece,
        memory: Memory,
        *,
        clean: bool = False,
        careful: bool = False,
    ) -> None:
        problem, x = call.problem, call.x
        self.call, self.piece, self.problem, self.scratch = call, piece, problem, memory.take
        self.clean, self.careful = clean, careful
        self.dtype = np.dtype(problem.accumulator)
        self.modified = problem.softcap is not None or x.score_mod is not None or x.bias is not None
        self.masked = x.mask is not None or problem.query_offset is None
        self.plain = not (clean or careful or self.modified or self.masked or problem.dropout)
        self.sight = Sight(call, piece)
        in_nats = careful or x.score_mod is not None or x.bias is not None
        self.unit = LOG2_E if not in_nats and fast_exp2(self.dtype) else 1.0
        self.exp = np.exp if self.unit == 1.0 else np.exp2
        self.key, self.value = call.cut(call.key, piece), call.cut(call.value, piece)
        query = call.cut(call.query, piece, None, piece.rows).swapaxes(2, 3)
        *self.shape, self.members, size = query.shape
        factor = problem.scale * self.unit
        if problem.softcap is not None:
            factor = problem.scale / problem.softcap
        self.factor = self.dtype.type(factor)
        self.query = self._scratch("query", size)
        # Another similarity is scaled when it is known: it need not be linear in the query.
        factor = self.factor if x.similarity is None else self.dtype.type(1)
        np.multiply(query, factor, out=self.query.reshape(query.shape))

    def _scratch(self, name: str, size: int) -> Array:
        batch, heads, rows = self.shape
        return self.scratch(name, (batch, heads, rows * self.members, size), self.dtype)

    def run(self) -> Running:
        """Go over all the tiles."""
        running = self._start()
        for tile in self.sight.tiles():
            self._add(running, tile)
        return running

    def proven(self, running: Running) -> Array | bool:
        """Say where a pass without maxima was right: everywhere, or in which rows."""
        output, total = running.output, running.total
        # A sum is finite only if all are, and is read but once.
        if math.isfinite(output.sum()) and total.min() >= LEAST and total.max() < math.inf:
            return True
        enough = total >= LEAST
        # Where a row sees no key there is nothing to lose, but a sink.
        if self.call.x.sinks is None and not enough.all():
            enough |= self.sight.is_nothing()
        right: Array = enough & (total < math.inf) & np.isfinite(output).all(axis=-1, keepdims=True)
        return right if not right.all() else True

    def hides_only_numbers(self) -> bool:
        """Say whether nothing that may be hidden is known to be NaN or infinite."""
        x = self.call.x
        if x.bias is not None or x.score_mod is not None:
            return False
        return all(math.isfinite(x.sum(dtype=self.dtype)) for x in (self.key, self.value))

    # ---- sums ----

    def _start(self) -> Running:
        """Return the state before any key."""
        output, total = self._scratch("output", self.problem.value_size), self._scratch("total", 1)
        reference = np.zeros((1, 1, 1, 1), self.dtype)
        if self.careful:
            reference = self._scratch("reference", 1)
            reference[...] = -math.inf
        has_sinks = self.call.x.sinks is not None and self.piece.part == 0
        # Where every tile has all the rows, the first may write what the others add to.
        self.adds = has_sinks or not self.plain or self.problem.masks_by_position
        if self.adds:
            output[...] = 0
            total[...] = 0
        if has_sinks:
            self._add_sinks(reference, total)
        return Running(output, reference, total)

    def _add_sinks(self, reference: Array, total: Array) -> None:
        sinks = np.asarray(self.call.x.sinks, self.dtype).reshape(-1, 1, self.members, 1)
        sinks = sinks[slice(*self.piece.heads)]
        by_head = (*self.shape, self.members, 1)
        if self.careful:
            reference.reshape(by_head)[...] = sinks
            total.reshape(by_head)[...] = sinks != -math.inf
        else:
            total.reshape(by_head)[...] = self.exp(sinks * self.dtype.type(self.unit))

    def _add(self, running: Running, tile: Tile) -> None:
        """Add what the keys of a tile give its rows."""
        heads, rows = self.piece.own(tile)
        own = (slice(None), heads, slice(rows.start * self.members, rows.stop * self.members))
        query, output, total = self.query[own], running.output[own], running.total[own]
        keys, values = self.key[:, heads], self.value[:, heads]
        product = self.scratch("product", output.shape, self.dtype)
        sums = self.scratch("sums", total.shape, self.dtype)
        is_plain = self.plain and not tile.ragged
        present = None
        for columns in tile.columns.split(tile.width):
            self.call.check()
            span, adds = slice(*columns), self.adds or columns.start > tile.columns.start
            part = tile if is_plain else tile._replace(columns=columns)
            hidden = [] if is_plain else self.sight.hidden(part)
            if hidden is None:
                continue
            s = self._scores(query, self._block("keys", keys[:, :, span]))
            if is_plain:
                self.exp(s, s)
            elif self.clean:
                present = self._weigh_what_is_seen(s, part, hidden, running, own)
            else:
                self._weigh(s, part, hidden)
            value = self._block("values", values[:, :, span])
            np.matmul(s, ones(columns.length, self.dtype), sums if adds else total)
            if self.problem.dropout:
                self._drop(self._by_head(s), part)
            if present is not None and not np.isfinite(value).all():
                product[...] = spoilt_product(s, present, value)
            else:
                weighted_sum(s, value, product if adds else output)
            if adds:
                np.add(total, sums, total)
                np.add(output, product, output)

    # ---- scores and weights of a tile ----

    def _block(self, name: str, block: Array) -> Array:
        """Return keys or values as the products take them."""
        if block.dtype == self.dtype and block.strides[-1] == self.dtype.itemsize:
            return block
        copy = self.scratch(name, block.shape, self.dtype)
        np.copyto(copy, block, casting="unsafe")
        return copy

    def _scores(self, query: Array, key: Array) -> Array:
        """Return scale · q·k, or what stands in its place, in the unit of the exponential."""
        s = self.scratch("scores", (*query.shape[:-1], key.shape[2]), self.dtype)
        similarity = self.call.x.similarity
        if similarity is not None:
            alike = similarity.between(query, key, np.matmul, self.call.xp)
            np.multiply(alike, self.factor, out=s)
        elif query.shape[2] <= VECTORS:
            np.matmul(key[:, :, None], query[..., None], s[..., None])
        else:
            np.matmul(query, key.swapaxes(2, 3), s)
        return s

    def _by_head(self, s: Array) -> Array:
        """Return a view of scores with the axes (b, k, row, g, key)."""
        batch, heads, rows, size = s.shape
        return s.reshape(batch, heads, rows // self.members, self.members, size)

    def _weigh(self, s: Array, tile: Tile, hidden: list[Hidden]) -> None:
        """Make weights of scores, relative to no maximum."""
        if self.modified:
            self._modify(self._by_head(s), tile)
        self.exp(s, s)
        by_head = self._by_head(s)
        for where, seen in hidden:
            by_head[where] *= seen

    def _weigh_what_is_seen(
        self, s: Array, tile: Tile, hidden: list[Hidden], running: Running, own: Any
    ) -> Array:
        """Make weights of scores, whatever the absent ones are; return which are present."""
        by_head = self._by_head(s)
        if self.modified:
            self._modify(by_head, tile)
        if self.call.bias is not None:
            np.copyto(by_head, -math.inf, where=self._bias(tile) == -math.inf)
        for where, seen in hidden:
            np.copyto(by_head[where], -math.inf, where=~seen)
        present: Array = s != -math.inf
        if self.careful:
            self._shift(s, *(array[own] for array in running))
        self.exp(s, s)
        return present

    def _shift(self, s: Array, output: Array, reference: Array, total: Array) -> None:
        """Subtract from scores a maximum that may rise, and let the sums shrink by that."""
        highest = np.maximum(reference, s.max(axis=-1, keepdims=True))
        shift = np.where(highest == -math.inf, 0, highest)
        s -= shift
        shrink = np.exp(reference - shift)
        output *= shrink
        total *= shrink
        reference[...] = highest

    def _modify(self, s: Array, tile: Tile) -> None:
        """Let softcap, a score function and a bias have the scores, by head."""
        if self.problem.softcap is not None:
            np.tanh(s, s)
            s *= self.dtype.type(self.problem.softcap * self.unit)
        if self.call.x.score_mod is not None:
            heads_first = s.swapaxes(2, 3)
            b, k, g, rows, size = heads_first.shape
            scores = heads_first.reshape(b, k * g, rows, size)
            changed = self._indices(tile).modified(scores)
            heads_first[...] = np.broadcast_to(changed, scores.shape).reshape(heads_first.shape)
        if self.call.bias is not None:
            s += self._bias(tile)

    def _drop(self, weights: Array, tile: Tile) -> None:
        """Drop weights, by head. What is left is divided when the sums are."""
        heads_first = weights.swapaxes(2, 3)
        b, k, g, rows, size = heads_first.shape
        kept = self._indices(tile).keep_mask()
        heads_first *= np.broadcast_to(kept, (b, k * g, rows, size)).reshape(heads_first.shape)

    def _indices(self, tile: Tile) -> Indices:
        return self.call.indices(self.piece, tile.heads, tile.rows, tile.columns)

    def _bias(self, tile: Tile) -> Array:
        """Return what of the bias falls on a tile, with the axes (b, k, row, g, key)."""
        assert self.call.bias is not None
        piece = self.piece._replace(heads=tile.heads)
        return self.call.cut(self.call.bias, piece, None, tile.rows, tile.columns).swapaxes(2, 3)
