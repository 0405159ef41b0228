"""NumPy's primitives: in place wherever the memory is the kernel's own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import array_api_compat.numpy as xp
import numpy as np

from polyattn.plugin import Array, Backend, Kernel, Operands, Problem, thread_count
from polyattn_numpy import threads
from polyattn_numpy.tiled import Tiled

__all__ = ["NumpyBackend"]


class NumpyBackend(Backend):
    """NumPy arrays on the CPU."""

    kernels = (Tiled(),)

    def __init__(self) -> None:
        super().__init__(xp)

    def devices(self) -> list[str]:
        """Return the one device there is."""
        return ["cpu"]

    def place(self, array: Array, device: str | None) -> Array:
        """Return `array` as a NumPy array, on the same memory where it is the host's."""
        return array if isinstance(array, np.ndarray) else super().place(array, device)

    def run(
        self, kernel: Kernel, problem: Problem, operands: Operands
    ) -> tuple[Array, Array | None]:
        """Run a kernel; a wrong number of threads is refused for a call of any size."""
        thread_count()
        return super().run(kernel, problem, operands)

    def each(self, work: Callable[[Any], None], items: Sequence[Any]) -> None:
        """Do some work on every item, on the threads that attention takes too."""
        threads.each(work, items, thread_count(threads.default), threads.Shared())

    def matmul(self, a: Array, b: Array) -> Array:
        """Return the matrix product of two stacks of matrices."""
        return np.matmul(a, b)

    def softmax(self, scores: Array) -> tuple[Array, Array, Array]:
        """Return the undivided softmax, with one array as large as the scores."""
        maximum = scores.max(axis=-1, keepdims=True)
        weights = np.subtract(scores, np.where(maximum == -np.inf, 0, maximum))
        np.exp(weights, out=weights)
        return weights, maximum, weights.sum(axis=-1, keepdims=True)

    def stack_rows(
        self, problem: Problem, like: Array, blocks: Iterable[tuple[Array, Array | None]]
    ) -> tuple[Array, Array | None]:
        """Write each block of rows where it belongs, so that none is held twice."""
        output = np.empty((*problem.scores[:-1], problem.value_size), like.dtype)
        logsumexp = None
        if "logsumexp" in problem.features:
            logsumexp = np.empty(problem.scores[:-1], problem.accumulator)
        return self.write_rows(output, logsumexp, blocks)
