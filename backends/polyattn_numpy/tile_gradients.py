"""The gradients that a tile of scores gives.

The weights p are computed again from the logsumexp: p = exp(score - logsumexp). With d the sum of
output · output gradient over a row, the gradient of a score is p · (output gradient · value - d).
The second subtraction is part of the product: output gradients have one more column, of -d, and
values one of ones. The logsumexp is subtracted by itself, so that the scores have the bits of the
forward pass.

A tile is computed fast first: hidden weights are multiplied by 0. If the result is not finite, it
is computed again without the hidden keys. So NaN behind a mask changes no bit of the rest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from polyattn.plugin import Array, sum_to
from polyattn_numpy.prepared import PreparedCall
from polyattn_numpy.scratch import Scratch, ones
from polyattn_numpy.softmax_sums import product_of_seen
from polyattn_numpy.tile_scores import PRIMITIVES, TileScores
from polyattn_numpy.tile_visibility import RegionMask
from polyattn_numpy.tiling import ScoreTile, ThreadTask


class TileOperands(NamedTuple):
    """A tile with its operands; k are its key/value heads, and rows those of all heads of a group.

    Output gradient and value have the additional column.
    """

    tile: ScoreTile
    masks: list[RegionMask]
    where: Any  # an index of its heads and rows
    query: Array  # (b, k, rows · g, D), scaled
    logsumexp: Array  # (b, k, rows · g, 1), times the `exp_factor`
    output_gradient: Array  # (b, k, rows · g, E + 1)
    key: Array  # (b, k, keys, D)
    value: Array  # (b, k, keys, E + 1)


class PartialGradients(NamedTuple):
    """The share of a tile in the gradients."""

    query: Array  # (b, k, rows · g, D)
    key: Array  # (b, k, keys, D)
    value: Array  # (b, k, keys, E)
    bias: Array | None  # by row where the bias has no axis of keys
    scale: Array | None  # by row; None if it follows from the query's
    softcap: Array | None  # by row
    of_score: Sequence[Array]
    of_similarity: Sequence[Array]

    def are_finite(self) -> bool:
        """Return whether all sums of squares are finite, so that all numbers are."""
        arrays = [*self[:6], *self.of_score, *self.of_similarity]
        return all(math.isfinite(np.vdot(x, x)) for x in arrays if x is not None)


class TileGradients(TileScores):
    """The gradients that the tiles of a task give, in scratch arrays."""

    def __init__(self, call: PreparedCall, task: ThreadTask, scratch: Scratch) -> None:
        super().__init__(call, task, scratch)
        problem, x = call.problem, call.x
        self.modified = problem.softcap is not None or x.score_mod is not None
        # Whether the product of query and key gives the scores, but for the bias.
        self.linear = not self.modified and x.similarity is None
        # Whether hidden or dropped keys may hold NaN or infinity.
        self.careful = problem.masks or problem.dropout > 0
        self.per_scale = 1.0 if problem.softcap is None else 1 / problem.softcap
        self.factor = self.dtype.type(problem.scale * self.per_scale)
        self.ends_in_keys = call.bias is not None and call.bias.shape[-1] != 1

    def shares(self, step: TileOperands) -> PartialGradients:
        """Return what a tile adds to the gradients."""
        shares = self._compute(step, exact=False)
        if self.careful and not shares.are_finite():
            return self._compute(step, exact=True)
        return shares

    def _compute(self, step: TileOperands, *, exact: bool) -> PartialGradients:
        """Return the shares; if exact, NaN in hidden keys and values does not reach them."""
        weights, capped, similar = self._scores(step)
        seen = seen_by_key = None
        if exact:
            seen = self._hide(step.tile, step.masks, weights)
            seen_by_key = seen.swapaxes(2, 3)
        self.exp(weights, weights)
        if step.masks and not exact:
            by_head = self._by_head(weights)
            for where, mask in step.masks:
                by_head[where] *= mask
        gradient = self.scratch("score gradient", weights.shape, self.dtype)
        kept = self._weigh_gradient(step, weights, gradient, exact).swapaxes(2, 3)
        value = self._product("value share", kept, seen_by_key, step.output_gradient[..., :-1])
        if seen is not None:
            for array in (gradient, capped, similar):
                if array is not None:
                    np.copyto(array, 0, where=~seen)
        bias = self._bias_share(step, gradient)
        softcap, of_score = self._through_modification(step, capped, gradient)
        similarity = self.call.x.similarity
        if similarity is not None:
            query, key, scale, of_similarity = self._through_similarity(
                step, similarity, similar, gradient
            )
        else:
            scale, of_similarity = None, ()
            query = self._product("query share", gradient, seen, step.key)
            key = self._product("key share", gradient.swapaxes(2, 3), seen_by_key, step.query)
            if self.linear and self.exp_factor != 1:
                key /= self.dtype.type(self.exp_factor)
        return PartialGradients(
            query=query,
            key=key,
            value=value,
            bias=bias,
            scale=scale,
            softcap=softcap,
            of_score=of_score,
            of_similarity=of_similarity,
        )

    def _product(self, name: str, weights: Array, seen: Array | None, x: Array) -> Array:
        """Return weights · x, to which x adds nothing where it is not seen."""
        if seen is not None and not np.isfinite(x).all():
            return product_of_seen(weights, seen, x)
        shape = (*weights.shape[:-1], x.shape[-1])
        return np.matmul(weights, x, self.scratch(name, shape, self.dtype))

    # ---- scores ----

    def _scores(self, step: TileOperands) -> tuple[Array, Array | None, Array | None]:
        """Return the scores minus the logsumexp; the capped ones; and the similarities."""
        shape, capped = (*step.query.shape[:-1], step.key.shape[2]), None
        s = self.scratch("scores", shape, self.dtype)
        similar = self._products(step.query, step.key, s)
        if self.problem.softcap is not None:
            self._cap(s)
        if self.modified:
            capped = self.scratch("capped", shape, self.dtype)
            np.copyto(capped, s)
        if self.call.x.score_mod is not None:
            self._apply_score_mod(self._by_head(s), step.tile)
        if self.call.bias is not None:
            by_head = self._by_head(s)
            by_head += self._bias(step.tile)
        s -= step.logsumexp
        return s, capped, similar

    # ---- gradients of scores ----

    def _weigh_gradient(
        self, step: TileOperands, weights: Array, gradient: Array, exact: bool
    ) -> Array:
        """Write the gradient of the scores, and return the weights that dropout keeps."""
        if not self.problem.dropout:
            np.matmul(step.output_gradient, step.value.swapaxes(2, 3), gradient)
            gradient *= weights
            return weights
        kept = self.call.by_row(self._indices(step.tile).keep_mask())
        dropped = self.scratch("kept weights", weights.shape, self.dtype)
        np.matmul(step.output_gradient[..., :-1], step.value[..., :-1].swapaxes(2, 3), gradient)
        np.copyto(dropped, weights)
        for array in map(self._by_head, (dropped, gradient)):
            array *= kept
            if exact:
                np.copyto(array, 0, where=~kept)
        gradient += step.output_gradient[..., -1:]
        gradient *= weights
        return dropped

    def _bias_share(self, step: TileOperands, gradient: Array) -> Array | None:
        """Return the gradient of a tile of the bias, by row where it has no axis of keys."""
        if self.call.bias is None:
            return None
        if not self.ends_in_keys:
            return np.matmul(gradient, ones(gradient.shape[-1], self.dtype))
        share = sum_to(np, self._by_head(gradient), self._bias(step.tile).shape)
        # The gradient will be overwritten by that of the scores before they are modified.
        return share if self.linear else np.array(share)

    def _through_modification(
        self, step: TileOperands, capped: Array | None, gradient: Array
    ) -> tuple[Array | None, Sequence[Array]]:
        """Turn a gradient into that before score_mod and softcap; return theirs."""
        of_score: Sequence[Array] = ()
        if capped is None:
            return None, of_score
        if self.call.x.score_mod is not None:
            by_head = self._by_head(gradient)
            before, of_score = self._indices(step.tile).score_pullback(
                self._heads_first(self._by_head(capped)),
                self._heads_first(by_head),
                PRIMITIVES.pullback,
            )
            by_head[...] = self.call.by_row(np.asarray(before))
        if self.problem.softcap is None:
            return None, of_score
        cap, exp_factor = map(self.dtype.type, (self.problem.softcap, self.exp_factor))
        of_softcap = np.einsum("bkrj,bkrj->bkr", gradient, capped)[..., None] / (cap * exp_factor)
        # The slope of c · tanh(x) is c - (c · tanh(x))² / c.
        capped *= capped
        capped /= -cap * exp_factor * exp_factor
        capped += cap
        gradient *= capped
        return of_softcap, of_score

    def _through_similarity(
        self, step: TileOperands, similarity: Any, similar: Array, gradient: Array
    ) -> tuple[Array, Array, Array, Sequence[Array]]:
        """Return the gradients of query, key, scale and arrays from that of similarities."""
        scale = np.einsum("bkrj,bkrj->bkr", gradient, similar)[..., None]
        gradient *= self.factor
        # It takes what is not finite as 0, so a gradient of 0 keeps NaN out.
        found = similarity.pullback(step.query, step.key, gradient, PRIMITIVES)
        return found[0], found[1], scale, found[2]
