"""A pass over the tiles of a piece that adds what they give to the gradients.

The weights p are computed again from the logsumexp: p = exp(score - logsumexp). With d the sum of
output · output gradient over a row, the gradient of a score is p · (output gradient · value - d).
Both subtractions are part of the products before them: queries and output gradients have one more
column, keys and values a column of ones.

A tile is computed fast first: what masks hide is multiplied by 0. If the result is not finite, it
is computed again with what is hidden left out. So NaN behind a mask changes no other bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import array_api_compat.numpy as xp
import numpy as np

from polyattn.plugin import Array, Backend, Operands, Problem
from polyattn_numpy.blocks import Tile, split_heads
from polyattn_numpy.gradient_sums import GradientSums
from polyattn_numpy.online_softmax import product_of_seen
from polyattn_numpy.prepared import PreparedCall
from polyattn_numpy.scratch import Scratch, ones
from polyattn_numpy.tile_scores import TileScores
from polyattn_numpy.visibility import RegionMask

__all__ = ["BackwardSweep", "Results"]

# In place of the logsumexp of a row that sees no key. Its weights exp(-NOTHING) are 0.
NOTHING = 1e30


class Results(NamedTuple):
    """The results of a call and their gradients, with the axes of `PreparedCall`."""

    output: Array
    logsumexp: Array
    output_gradient: Array
    logsumexp_gradient: Array | None

    @classmethod
    def of(cls, problem: Problem, x: Operands) -> Results:
        """Return those of a call."""
        ndim = len(problem.batch or (1,)) + 3

        def split(array: Any) -> Array:
            return split_heads(problem, np.asarray(array), ndim)

        direct = x.logsumexp_gradient
        return cls(
            split(x.output),
            split(np.asarray(x.known_logsumexp)[..., None]),
            split(x.output_gradient),
            None if direct is None else split(np.asarray(direct)[..., None]),
        )


class Step(NamedTuple):
    """A tile with its operands, of which those of rows and keys have the additional column."""

    tile: Tile
    masks: list[RegionMask]
    where: Any  # an index of its heads and rows
    query: Array
    output_gradient: Array
    key: Array
    value: Array


class Scores(NamedTuple):
    """The scores of a tile with the logsumexp subtracted, and what they were computed from."""

    final: Array
    capped: Any  # after the softcap
    similar: Any  # by another similarity than q·k


class Shares(NamedTuple):
    """What a tile adds to the gradients."""

    query: Array
    key: Array
    value: Array
    bias: Array | None
    scale: Array | None  # by row
    softcap: Array | None  # by row
    of_score: Sequence[Array]
    of_similarity: Sequence[Array]

    def are_finite(self) -> bool:
        """Return whether no number is NaN or infinite, as far as sums of squares can tell."""
        arrays = [self.query, self.key, self.value, self.scale, self.softcap]
        arrays += [*self.of_score, *self.of_similarity]
        return all(math.isfinite(np.vdot(x, x)) for x in arrays if x is not None)


class BackwardSweep(TileScores):
    """A pass over the tiles of a piece, which adds to the gradients of a call."""

    def __init__(
        self,
        call: PreparedCall,
        results: Results,
        sums: GradientSums,
        number: int,
        scratch: Scratch,
        backend: Backend,
    ) -> None:
        super().__init__(call, sums.cut[number], scratch)
        problem, x = call.problem, call.x
        self.sums, self.number, self.backend = sums, number, backend
        self.turn = sums.turns.begin(number)
        self.modified = problem.softcap is not None or x.score_mod is not None
        self.linear = not self.modified and x.similarity is None
        # Whether absent or dropped keys may hold what is not finite.
        self.careful = problem.masks or problem.dropout > 0
        self.per_scale = 1.0 if problem.softcap is None else 1 / problem.softcap
        self.factor = self.dtype.type(problem.scale * self.per_scale)
        self._start(results)

    def run(self) -> None:
        """Add all tiles, from the first key to the last."""
        steps = [
            tile._replace(columns=columns)
            for tile in self.visibility.tiles()
            for columns in tile.columns.split(tile.width)
        ]
        steps.sort(key=lambda tile: tile.columns.start)
        for tile in steps:
            self.call.check()
            self.turn.reach(tile.columns.start)
            self._add(tile)
        self.turn.reach(self.problem.key_length)
        self._end()
        self.turn.reach(math.inf)

    # ---- rows ----

    def _rows_of(self, array: Array) -> Array:
        """Return the piece's rows of an array, with the axes (b, k, row, g, size)."""
        return self.piece.view(array, None, self.piece.rows).swapaxes(2, 3)

    def _start(self, results: Results) -> None:
        """Read the rows of the piece, and set their sums to 0."""
        problem = self.problem
        self.query = self._per_row("query", problem.head_size + 1)
        shift = self.query[..., -1:]
        self._by_head(shift)[...] = self._rows_of(results.logsumexp)
        self.empty = shift == -math.inf
        np.negative(shift, shift)
        shift[self.empty] = -NOTHING
        self._read_query(self.factor if self.call.x.similarity is None else 1)
        self.output_gradient = self._per_row("output gradient", problem.value_size + 1)
        gradient, delta = self.output_gradient[..., :-1], self.output_gradient[..., -1:]
        self._by_head(gradient)[...] = self._rows_of(results.output_gradient)
        output = self._rows_of(results.output).astype(self.dtype, copy=False)
        products = np.einsum("bkrge,bkrge->bkrg", output, self._by_head(gradient))
        np.negative(products[..., None], self._by_head(delta))
        if results.logsumexp_gradient is not None:
            self._by_head(delta)[...] += self._rows_of(results.logsumexp_gradient)
        if self.empty.any():
            np.copyto(self.output_gradient, 0, where=self.empty)
        if self.sums.delta is not None:
            np.negative(self._by_head(delta), self._rows_of(self.sums.delta))
        if problem.dropout:
            gradient /= self.dtype.type(1 - problem.dropout)
        self.query_gradient = self._per_row("query gradient", problem.head_size)
        self.row_sums = {name: self._per_row(name, 1) for name in ("bias", "scale", "softcap")}
        for total in (self.query_gradient, *self.row_sums.values()):
            total.fill(0)

    def _read_query(self, factor: Any) -> None:
        """Read the queries times a factor, 0 for rows that see no key."""
        query = self.query[..., :-1]
        np.multiply(self._rows_of(self.call.query), factor, out=self._by_head(query))
        if self.empty.any():
            np.copyto(query, 0, where=self.empty)

    def _end(self) -> None:
        """Add the sums of the rows to the gradients."""
        scale = self.row_sums["scale"]
        if self.call.x.similarity is None:
            if not self.factor:
                self._read_query(self.dtype.type(1))
            by_row = np.einsum("bkrd,bkrd->bkr", self.query_gradient, self.query[..., :-1])
            scale[...] = by_row[..., None]
            scale /= self.factor or self.dtype.type(1)
            self.query_gradient *= self.factor
        scale *= self.dtype.type(self.per_scale)
        self.turn.wait_for_rows()
        for total, part in (
            (self.sums.query, self.query_gradient),
            (self.sums.scale, self.row_sums["scale"]),
            (self.sums.softcap, self.row_sums["softcap"]),
        ):
            if total is not None:
                self._rows_of(total)[...] += self._by_head(part)
        bias = self.sums.bias
        if bias is not None and bias.shape[-1] == 1:
            target = self._rows_of(bias)
            target += _sum_to(self._by_head(self.row_sums["bias"]), target.shape)

    # ---- tiles ----

    def _add(self, tile: Tile) -> None:
        """Add a tile."""
        masks = self.visibility.masks(tile)
        if masks is None:
            return
        heads, (first, last) = self.piece.relative(tile)
        where = (slice(None), heads, slice(first * self.group_size, last * self.group_size))
        span = slice(*tile.columns)
        step = Step(
            tile,
            masks,
            where,
            self.query[where],
            self.output_gradient[where],
            self._with_ones("keys", self.key[:, heads, span]),
            self._with_ones("values", self.value[:, heads, span]),
        )
        shares = self._shares(step, exact=False)
        if self.careful and not shares.are_finite():
            shares = self._shares(step, exact=True)
        self._add_shares(step, shares)

    def _with_ones(self, name: str, block: Array) -> Array:
        """Return a copy of keys or values with a column of ones."""
        *axes, size = block.shape
        copy = self.scratch(name, (*axes, size + 1), self.dtype)
        copy[..., :-1] = block
        copy[..., -1] = 1
        return copy

    def _add_shares(self, step: Step, shares: Shares) -> None:
        """Add what a tile gives to the sums of its rows, then to those of its keys in turn."""
        sums, columns = self.sums, step.tile.columns
        self.query_gradient[step.where] += shares.query
        for name, part in (("scale", shares.scale), ("softcap", shares.softcap)):
            if part is not None:
                self.row_sums[name][step.where] += part
        if sums.bias is not None and sums.bias.shape[-1] == 1:
            self.row_sums["bias"][step.where] += shares.bias
        self.turn.wait_for_keys(columns)
        heads = step.where[1]
        for total, part in ((sums.key, shares.key), (sums.value, shares.value)):
            target = self.piece.view(total, columns)[:, heads]
            np.add(target, part, target)
        if sums.bias is not None and sums.bias.shape[-1] != 1:
            piece = self.piece._replace(heads=step.tile.heads)
            target = piece.view(sums.bias, None, step.tile.rows, columns).swapaxes(2, 3)
            target += shares.bias
        sums.add_carried(self.number, shares.of_score, shares.of_similarity)

    def _shares(self, step: Step, *, exact: bool) -> Shares:
        """Return what a tile gives; only if exact, whatever hidden keys and values hold."""
        scores = self._scores(step)
        weights, seen = scores.final, None
        if exact:
            seen = self._hide(step, weights)
        np.exp(weights, weights)
        if not exact:
            by_head = self._by_head(weights)
            for where, mask in step.masks:
                by_head[where] *= mask
        gradient = self.scratch("score gradient", weights.shape, self.dtype)
        kept = self._weigh_gradient(step, weights, gradient, exact)
        over_keys = None if seen is None else seen.swapaxes(2, 3)
        value = self._product(
            "value share", kept.swapaxes(2, 3), over_keys, step.output_gradient[..., :-1]
        )
        if seen is not None:
            for array in (gradient, scores.capped, scores.similar):
                if array is not None:
                    np.copyto(array, 0, where=~seen)
        bias = self._bias_share(step, gradient)
        softcap, of_score = self._pull_back(step, scores, gradient)
        if scores.similar is None:
            query = self._product("query share", gradient, seen, step.key[..., :-1])
            key = self._product(
                "key share", gradient.swapaxes(2, 3), over_keys, step.query[..., :-1]
            )
            return Shares(query, key, value, bias, None, softcap, of_score, ())
        scale = np.einsum("bkrj,bkrj->bkr", gradient, scores.similar)[..., None]
        gradient *= self.factor
        alike: Any = self.call.x.similarity
        rows, keys = step.query[..., :-1], step.key[..., :-1]
        query, key, carried = alike.pullback(rows, keys, gradient, np.matmul, xp)
        return Shares(query, key, value, bias, scale, softcap, of_score, carried)

    def _product(self, name: str, weights: Array, seen: Array | None, x: Array) -> Array:
        """Return weights · x, to which x adds nothing where it is not seen."""
        if seen is not None and not np.isfinite(x).all():
            return product_of_seen(weights, seen, x)
        shape = (*weights.shape[:-1], x.shape[-1])
        return np.matmul(weights, x, self.scratch(name, shape, self.dtype))

    # ---- scores ----

    def _scores(self, step: Step) -> Scores:
        """Return the scores of a tile, with the logsumexp subtracted."""
        query, key, capped, similar = step.query, step.key, None, None
        shape = (*query.shape[:-1], key.shape[2])
        s = self.scratch("scores", shape, self.dtype)
        similarity = self.call.x.similarity
        if self.linear:
            np.matmul(query, key.swapaxes(2, 3), s)
        elif similarity is None:
            np.matmul(query[..., :-1], key[..., :-1].swapaxes(2, 3), s)
        else:
            similar = similarity.between(query[..., :-1], key[..., :-1], np.matmul, xp)
            np.multiply(similar, self.factor, out=s)
        by_head = self._by_head(s)
        if self.problem.softcap is not None:
            self._cap(s)
        if self.modified:
            capped = self.scratch("capped", shape, self.dtype)
            np.copyto(capped, s)
        if self.call.x.score_mod is not None:
            self._apply_score_mod(by_head, step.tile)
        if self.call.bias is not None:
            by_head += self._bias(step.tile)
        if not self.linear:
            s += query[..., -1:]
        return Scores(s, capped, similar)

    def _hide(self, step: Step, s: Array) -> Array:
        """Set hidden scores to -inf, and return which are seen."""
        by_head = self._by_head(s)
        if self.call.bias is not None:
            np.copyto(by_head, -math.inf, where=self._bias(step.tile) == -math.inf)
        for where, mask in step.masks:
            np.copyto(by_head[where], -math.inf, where=~mask)
        seen: Array = s != -math.inf
        return seen

    # ---- gradients of scores ----

    def _weigh_gradient(self, step: Step, weights: Array, gradient: Array, exact: bool) -> Array:
        """Write the gradient of the scores, and return the weights that dropout keeps."""
        if not self.problem.dropout:
            np.matmul(step.output_gradient, step.value.swapaxes(2, 3), gradient)
            gradient *= weights
            return weights
        kept = self.call.by_row(self._indices(step.tile).keep_mask())
        dropped = self.scratch("kept weights", weights.shape, self.dtype)
        values = step.value[..., :-1].swapaxes(2, 3)
        np.matmul(step.output_gradient[..., :-1], values, gradient)
        np.multiply(self._by_head(weights), kept, out=self._by_head(dropped))
        by_head = self._by_head(gradient)
        by_head *= kept
        if exact:
            for array in (dropped, gradient):
                np.copyto(self._by_head(array), 0, where=~kept)
        gradient += step.output_gradient[..., -1:]
        gradient *= weights
        return dropped

    def _bias_share(self, step: Step, gradient: Array) -> Array | None:
        """Return what a tile adds to the gradient of the bias, or to that of its rows."""
        total = self.sums.bias
        if total is None:
            return None
        if total.shape[-1] == 1:
            return np.matmul(gradient, ones(gradient.shape[-1], self.dtype))
        axes = self._bias(step.tile).shape
        found = _sum_to(self._by_head(gradient), axes)
        return found if self.linear else np.array(found)

    def _pull_back(
        self, step: Step, scores: Scores, gradient: Array
    ) -> tuple[Array | None, Sequence[Array]]:
        """Turn the gradient of modified scores into that of products; return that of the rule."""
        softcap, of_score = None, list[Array]()
        if self.call.x.score_mod is not None:
            by_head = self._by_head(gradient)
            before, of_score = self._indices(step.tile).score_pullback(
                self._heads_first(self._by_head(scores.capped)),
                self._heads_first(by_head),
                self.backend.pullback,
            )
            by_head[...] = self.call.by_row(np.asarray(before))
        if self.problem.softcap is not None:
            cap = self.dtype.type(self.problem.softcap)
            softcap = np.einsum("bkrj,bkrj->bkr", gradient, scores.capped)[..., None]
            # The slope of c · tanh(x) is c - (c · tanh(x))² / c.
            slope = np.multiply(scores.capped, scores.capped, out=scores.capped)
            slope /= -cap
            slope += cap
            gradient *= slope
        return softcap, of_score


def _sum_to(array: Array, shape: Sequence[int]) -> Array:
    """Sum an array over the axes along which one of this shape was broadcast to it."""
    axes = tuple(n for n, size in enumerate(shape) if size != array.shape[n])
    return array.sum(axis=axes, keepdims=True) if axes else array
