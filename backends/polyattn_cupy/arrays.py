"""Arrays of results, and bits cleared in place."""

from __future__ import annotations

from typing import Any

import cupy
import numpy as np

from polyattn.plugin import Array, Problem, sum_to


def zeroed(array: Array, keep: Array) -> Array:
    """Return an array with 0 where `keep` is False, by the bits of its numbers.

    `cupy.where` on bfloat16 gives other numbers than it is given (CuPy 14.2).
    """
    result = cupy.broadcast_to(array, np.broadcast_shapes(array.shape, keep.shape)).copy()
    cupy.copyto(result.view(f"u{result.dtype.itemsize}"), 0, where=~keep)
    return result


def empty_result(problem: Problem, dtype: Any) -> tuple[Array, Array | None]:
    """Return an uninitialized output, and a logsumexp if the problem asks for it."""
    output = cupy.empty((*problem.scores[:-1], problem.value_size), dtype)
    if "logsumexp" not in problem.features:
        return output, None
    return output, cupy.empty(problem.scores[:-1], problem.accumulator)


def summed(problem: Problem, gradient: Array, shape: tuple[int, ...]) -> Array:
    """Return a gradient in the shape of its argument, which was broadcast."""
    items, *rest = gradient.shape
    batch = (1,) * len(problem.batch) if items == 1 else problem.batch
    return sum_to(cupy, gradient.reshape(*batch, *rest), shape)
