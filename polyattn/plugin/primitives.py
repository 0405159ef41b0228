"""The operations of a library that the array-API kernels call."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from polyattn import arrays
from polyattn.arrays import Array
from polyattn.call.problem import Problem

__all__ = ["BackendPrimitives"]


class BackendPrimitives:
    """The part of a backend that the array-API kernels compute with.

    Parameters
    ----------
    xp : module
        The standard's namespace of the library.
    """

    def __init__(self, xp: Any) -> None:
        self.xp = xp

    def matmul(self, a: Array, b: Array) -> Array:
        """Multiply two stacks of matrices of one dtype.

        Parameters
        ----------
        a : Array
            Shape (..., M, K), float32 or float64.
        b : Array
            Shape (..., K, N), the dtype of `a`.

        Returns
        -------
        Array
            Shape (..., M, N), the dtype of `a`.
        """
        return self.xp.matmul(a, b)

    def softmax(self, scores: Array) -> tuple[Array, Array, Array]:
        """Return the softmax over the last axis, before its division.

        Parameters
        ----------
        scores : Array
            Scores, −inf where a key is absent. Do not write to them: they are needed again.

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

    def pullback(self, function: Callable[[Array], Array], array: Array, gradient: Array) -> Array:
        """Return the gradient of an array from that of a function of it.

        Parameters
        ----------
        function : callable
            Takes an array of this library and returns one.
        array : Array
            Where it is differentiated.
        gradient : Array
            The gradient of what the function returns.

        Returns
        -------
        Array
            The gradient of the array.
        """
        raise TypeError(
            "this library differentiates no function: give the derivative, as in"
            " scores.function(f, derivative=g)"
        )

    def stack_rows(
        self, problem: Problem, like: Array, blocks: Iterable[tuple[Array, Array | None]]
    ) -> tuple[Array, Array | None]:
        """Put blocks of rows together.

        Parameters
        ----------
        problem : Problem
            The facts of the call.
        like : Array
            An array of the output's library, dtype and device.
        blocks : iterable of (Array, Array or None)
            Output and logsumexp of some rows each, in order.

        Returns
        -------
        output : Array
            The whole output, (..., H, L, E).
        logsumexp : Array or None
            The whole logsumexp, (..., H, L).
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
        """Allocate the result of a call, so that blocks of rows are written in place.

        Parameters
        ----------
        problem : Problem
            The facts of the call.
        like : Array
            An array of the output's library, dtype and device.

        Returns
        -------
        tuple of (Array, Array or None), or None
            Output and logsumexp, without values; None if arrays cannot be written to here.
        """
        return None

    def is_eager(self, array: Array) -> bool:
        """Return whether values of an array can be read without waiting for a device.

        Parameters
        ----------
        array : Array
            An array of this library.

        Returns
        -------
        bool
            False if it is traced, lazy or on an accelerator.
        """
        return arrays.library_of(array).name == "numpy"
