"""The operations of a library that the array-API kernels call."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from polyattn._base import arrays
from polyattn._base.arrays import Array
from polyattn._base.span import Span
from polyattn._core.call.problem import Problem


class BackendPrimitives:
    """The part of a backend that the array-API kernels compute with.

    Parameters
    ----------
    xp : module
        The standard's namespace of the library.
    """

    def __init__(self, xp: Any) -> None:
        self.xp = xp

    @property
    def block(self) -> int:
        """The number of scores that stay in the cache from one operation to the next."""
        return 2**15

    def matmul(self, a: Array, b: Array) -> Array:
        """Multiply matrices (..., M, K) and (..., K, N) of one dtype, float32 or float64."""
        return self.xp.matmul(a, b)

    def compared(self, compare: Callable[[Array, Array], Array], query: Array, key: Array) -> Array:
        """Return `compare(query, key)`, (..., l, s), whose derivative takes 0 for NaN and ±inf.

        A score that a row does not see has a gradient of 0, and 0 · NaN is NaN.
        """
        xp, exact = self.xp, self.constant(compare(query, key))
        result = compare(*[xp.where(xp.isfinite(x), x, 0.0) for x in (query, key)])
        # The gradient of a NaN that is seen must be NaN.
        rows, keys = (
            xp.sum(xp.where(xp.isfinite(x), 0.0, x), axis=-1, keepdims=True) for x in (query, key)
        )
        lost = xp.where(xp.isnan(exact), rows + xp.matrix_transpose(keys) + exact, exact)
        return result + xp.where(xp.isfinite(exact), 0.0, lost)

    def constant(self, array: Array) -> Array:
        """Return an array that a derivative takes for a constant."""
        return array

    def visible_product(self, weights: Array, seen: Array, x: Array) -> Array:
        """Multiply weights and x, where an entry of x that is not seen adds nothing.

        0 · NaN is NaN, so an entry that is not finite must not reach the rows that do not see it.
        Weights (..., M, K) are 0 where the bool array `seen`, (..., M, K), is False; x is
        (..., K, N), and all but `seen` have one dtype.
        """
        xp = self.xp
        weights = xp.where(seen, weights, 0.0)  # NaN in a row of which a visible score is NaN
        result = self.matmul(weights, xp.where(xp.isfinite(x), x, 0.0))
        # The derivative by the weights of a row is NaN where a number is not finite that it sees.
        one = 1 + 0 * xp.sum(weights, axis=-1, keepdims=True)
        seen = arrays.cast(xp, seen, x.dtype)
        # NaN counts as both infinities, whose sum it is.
        for infinity in (math.inf, -math.inf):
            spoils = arrays.cast(xp, (x == infinity) | xp.isnan(x), x.dtype)
            spoilt = self.matmul(seen, spoils) > 0
            spoilt_by = xp.where(spoilt, xp.full_like(result, infinity), xp.zeros_like(result))
            result = result + spoilt_by * one
        return result

    def zeroed(self, array: Array, keep: Array) -> Array:
        """Return an array with 0 where the bool array `keep` is False, also in place of NaN."""
        return self.xp.where(keep, array, self.xp.zeros_like(array))

    def softmax(self, scores: Array) -> tuple[Array, Array, Array]:
        """Return the softmax over the last axis, before its division.

        Scores are −inf where a key is absent. Do not write to them: they are needed again.

        Returns
        -------
        weights : Array
            ``exp(scores − maximum)``, 0 in a row that is all −inf.
        maximum : Array
            The maximum of each row, with the last axis kept.
        total : Array
            The sum of each row's weights, with the last axis kept.
        """
        xp = self.xp
        maximum = xp.max(scores, axis=-1, keepdims=True)
        shift = xp.where(maximum == -float("inf"), xp.zeros_like(maximum), maximum)
        weights = xp.exp(scores - shift)
        return weights, maximum, xp.sum(weights, axis=-1, keepdims=True)

    def sigmoid(self, scores: Array) -> Array:
        """Return ``1 / (1 + exp(−scores))``, 0 with a derivative of 0 for −inf.

        Do not write to the scores: they are needed again.
        """
        xp = self.xp
        # The exponential that cannot overflow: neither it nor its derivative is infinite.
        negative = scores < 0
        small = xp.exp(xp.where(negative, scores, -scores))
        return xp.where(negative, small, xp.ones_like(small)) / (1 + small)

    def largest(self, numbers: Array, count: int) -> Array:
        """Return the places of the largest numbers of each row, in ascending order.

        Of equal ones the first; rows (..., n) have at least `count` numbers, and none is NaN.
        """
        order = self.xp.argsort(numbers, axis=-1, descending=True, stable=True)
        return self.xp.sort(order[..., :count], axis=-1)

    def over_size(
        self, term: Callable[[Any, Array, Array], Array], query: Array, key: Array
    ) -> Array:
        """Sum a function of one entry of queries (..., l, D) and keys (..., s, D) over D.

        It takes the index of the entry, and this entry of the queries, (..., l, 1), and of the
        keys, (..., 1, s). Memory is for l · s numbers, the sums, and not D times as many.
        """
        total = None
        for d in range(query.shape[-1]):
            one = term(d, query[..., :, d, None], key[..., None, :, d])
            total = one if total is None else total + one
        if total is None:
            return self.xp.sum(query[..., :, None, :] + key[..., None, :, :], axis=-1)
        return total

    def row_blocks(self, query: Array, key: Array) -> list[Span]:
        """Cut the rows of scores for a function that passes over its scores many times.

        The scores of each block, of queries (..., l, D) and keys (..., s, D), stay in the cache;
        one block has all rows unless the arrays are eager.
        """
        whole = Span(0, query.shape[-2])
        if not self.is_eager(query):
            return [whole]
        batch = arrays.broadcast_shapes(query.shape[:-2], key.shape[:-2])
        per_row = max(1, math.prod(batch or ()) * key.shape[-2])
        return list(whole.split(max(1, self.block // per_row))) or [whole]

    def pullback(self, function: Callable[[Array], Array], array: Array, gradient: Array) -> Array:
        """Return the gradient of an array from that of what a function returns for it."""
        raise TypeError(
            "this library differentiates no function: give the derivative, as in"
            " scores.function(f, derivative=g)"
        )

    def in_turn(
        self, function: Callable[[Any], Any], starts: Sequence[int], *arrays: Array
    ) -> Iterable[Any]:
        """Return what a function of some arrays returns for each start, one after another."""
        return map(function, starts)

    def stack_rows(
        self, problem: Problem, like: Array, blocks: Iterable[tuple[Array, Array | None]]
    ) -> tuple[Array, Array | None]:
        """Join the output and logsumexp of blocks of rows, in order.

        `like` has the output's library, dtype and device.
        """
        empty = self.empty_result(problem, like)
        if empty is None:
            outputs, logsumexps = zip(*blocks, strict=True)
            if len(outputs) == 1:
                return outputs[0], logsumexps[0]
            logsumexp = None if logsumexps[0] is None else self.xp.concat(logsumexps, axis=-1)
            return self.xp.concat(outputs, axis=-2), logsumexp
        output, logsumexp = empty
        first = 0
        for part, part_logsumexp in blocks:
            stop = first + part.shape[-2]
            output[..., first:stop, :] = part
            if logsumexp is not None:
                logsumexp[..., first:stop] = part_logsumexp
            first = stop
        return output, logsumexp

    def empty_result(self, problem: Problem, like: Array) -> tuple[Array, Array | None] | None:
        """Allocate output and logsumexp, so that blocks of rows are written in place.

        `like` has the output's library, dtype and device. None if arrays cannot be written to here.
        """
        return None

    def is_eager(self, array: Array) -> bool:
        """Return whether values of an array can be read without waiting for a device.

        They cannot if it is traced, lazy or on an accelerator.
        """
        return arrays.library_of(array).name == "numpy"

    def is_plain(self, *arrays: Array) -> bool:
        """Return whether values of arrays can be read, and nothing records what is computed.

        Only then may results be written to in place.
        """
        return all(self.is_eager(array) for array in arrays)
