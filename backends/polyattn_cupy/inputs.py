"""The arrays of a call as cuDNN reads them: with one batch axis, aligned, and one bias."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import cupy
import numpy as np

from polyattn.plugin import Array, Backend, Indices, Operands, Problem, Span, band, one_batch_axis
from polyattn_cupy.problem_graphs import aligned, bias_shape
from polyattn_cupy.shapes import with_score_axes

__all__ = ["ALIGNMENT", "UNSEEN", "bias_memory", "made_bias", "packed", "ready"]

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


def bias_memory(shape: tuple[int, ...]) -> Array:
    """Return an uninitialized bias, or gradient of a bias, whose rows begin on the alignment."""
    *outer, keys = shape
    return cupy.empty((*outer, aligned(keys)), np.float32)[..., :keys]


def made_bias(problem: Problem, x: Operands, backend: Backend) -> tuple[Array, Array]:
    """Return bias, masks and band as one bias, and which keys are seen."""
    rows, columns = Span(0, problem.query_length), Span(0, problem.key_length)
    indices = Indices(problem, backend.xp, x, rows, columns)
    seen: Any = None
    for part in indices.visible(banded=band(problem) != (None, None)):
        seen = part if seen is None else seen & part
    shift: Any = np.float32(0)
    if x.bias is not None:
        shift = x.bias.astype(np.float32)
        finite = shift != -math.inf
        seen = finite if seen is None else seen & finite
        shift = with_score_axes(problem, cupy.maximum(shift, np.float32(UNSEEN)))
    seen = with_score_axes(problem, seen)
    bias = bias_memory(bias_shape(problem))
    bias[...] = cupy.where(seen, shift, np.float32(UNSEEN))
    return bias, seen
