"""The arrays of a call as cuDNN reads them, aligned and with one batch axis; and of results."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import cupy
import numpy as np

from polyattn.plugin import Array, Backend, Operands, Problem, one_batch_axis, sum_to, visible_keys
from polyattn.plugin.internal import finite_bias, score_axes
from polyattn_cupy.problem_graphs import aligned, bias_shape

# The bias of a hidden key, and the least bias. It is float32 for all inputs, because float16 has no
# number that is far below all scores. It is finite and far from the ends of float32, because cuDNN
# subtracts the greatest score of a row from each score, and the difference must not overflow.
UNSEEN = -(2.0**40)
# cuDNN reads 16 bytes at a time and checks neither address nor strides (cudnn-frontend#1571).
ALIGNMENT = 16


def ready(problem: Problem, array: Array) -> Array:
    """Return a 16-bit array with one batch axis, copied if cuDNN cannot read its memory."""
    array = one_batch_axis(problem, array, cupy)
    if array.data.ptr % ALIGNMENT or not _is_readable(array.shape, array.strides):
        return array.copy(order="C")
    return array


@lru_cache(maxsize=1024)
def _is_readable(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Return whether cuDNN reads an array of 16-bit numbers with these strides in bytes."""
    *outer, last = strides
    return last == 2 and all(
        length == 1 or (stride > 0 and stride % ALIGNMENT == 0)
        for length, stride in zip(shape, outer, strict=False)
    )


def packed(array: Array) -> Array:
    """Return an array as it is or, if cuDNN cannot read its memory, as a contiguous copy."""
    if array.flags.c_contiguous and array.data.ptr % ALIGNMENT == 0:
        return array
    return array.copy(order="C")


def made_bias(problem: Problem, x: Operands, backend: Backend) -> tuple[Array, Array]:
    """Return bias, masks and band as one bias, and which keys are seen."""
    given = None if x.bias is None else x.bias.astype(np.float32)
    visible = visible_keys(problem, x, backend.xp)
    made = finite_bias(visible, given, UNSEEN, np.float32, backend.xp)
    scores, seen = (score_axes(problem, array, backend.xp) for array in made)
    *outer, keys = bias_shape(problem)
    bias = cupy.empty((*outer, aligned(keys)), np.float32)[..., :keys]
    bias[...] = scores
    return bias, seen


def key_counts(problem: Problem, x: Operands) -> tuple[Array, Array]:
    """Return how many queries and how many keys each item has, as cuDNN takes them."""
    given: Any = x.mask
    shape = (math.prod(problem.batch), 1, 1, 1)
    keys = cupy.asarray(given.first_keys).astype(np.int64)
    keys = cupy.clip(keys, 0, problem.key_length)
    keys = cupy.broadcast_to(keys, problem.batch).reshape(shape).astype(np.int32)
    return cupy.full(shape, problem.query_length, np.int32), keys


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
