"""NumPy's backend, whose primitives write in place where they can."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from polyattn.plugin import Array, Backend, Operands, Problem, thread_count
from polyattn_numpy import thread_pool
from polyattn_numpy.faults import faults_of
from polyattn_numpy.scratch import xp
from polyattn_numpy.small import Small
from polyattn_numpy.tiled_kernel import NumpyTiled, empty_result


class NumpyBackend(Backend):
    """NumPy arrays on the CPU."""

    kernels = (Small(), NumpyTiled())

    def __init__(self) -> None:
        super().__init__(xp)

    def devices(self) -> list[str]:
        return ["cpu"]

    def faults(self) -> tuple[str, ...]:
        return tuple(map(str, faults_of()))

    def place(self, array: Array, device: str | None) -> Array:
        """Return `array` as a NumPy array, without a copy if it is in the host's memory."""
        return array if isinstance(array, np.ndarray) else super().place(array, device)

    def shield(self, problem: Problem, operands: Operands) -> AbstractContextManager[Any]:
        """Return a context without warnings, after a check of the number of threads."""
        # Small calls do not use that number.
        thread_count()
        return np.errstate(all="ignore")

    def each(self, work: Callable[[Any], None], items: Sequence[Any]) -> None:
        thread_pool.each(work, items, thread_count(thread_pool.default), thread_pool.Shared())

    def matmul(self, a: Array, b: Array) -> Array:
        return np.matmul(a, b)

    def softmax(self, scores: Array) -> tuple[Array, Array, Array]:
        """Return the softmax before its division, in one array as large as the scores."""
        maximum = scores.max(axis=-1, keepdims=True)
        weights = np.subtract(scores, np.where(maximum == -np.inf, 0, maximum))
        np.exp(weights, out=weights)
        return weights, maximum, weights.sum(axis=-1, keepdims=True)

    def sigmoid(self, scores: Array) -> Array:
        """Return the sigmoid of each score, in one array as large as the scores."""
        weights = np.negative(scores)
        np.exp(weights, out=weights)  # an exponential that overflows gives the weight 0
        weights += 1
        return np.reciprocal(weights, out=weights)

    def largest(self, numbers: Array, count: int) -> Array:
        """Return the places of the largest numbers of each row, without sorting them."""
        last = numbers.shape[-1] - count
        least = np.partition(numbers, last, axis=-1)[..., last, None]
        chosen, equal = numbers > least, numbers == least
        left = count - chosen.sum(axis=-1, keepdims=True)
        chosen |= equal & (np.cumsum(equal, axis=-1, dtype=np.int32) <= left)
        return chosen.nonzero()[-1].reshape(*numbers.shape[:-1], count)

    def empty_result(self, problem: Problem, like: Array) -> tuple[Array, Array | None]:
        return empty_result(problem, like.dtype)
