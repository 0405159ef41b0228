"""Inputs with one batch axis, as cuBLAS and cuDNN need them, and the shapes of results."""

from __future__ import annotations

import math
from typing import Any

import cupy

from polyattn.plugin import Array, Problem

__all__ = ["empty_result", "summed", "with_score_axes"]


def empty_result(problem: Problem, dtype: Any) -> tuple[Array, Array | None]:
    """Return an uninitialized output, and a logsumexp if the problem asks for it."""
    output = cupy.empty((*problem.scores[:-1], problem.value_size), dtype)
    if "logsumexp" not in problem.features:
        return output, None
    return output, cupy.empty(problem.scores[:-1], problem.accumulator)


def with_score_axes(problem: Problem, array: Array) -> Array:
    """Return a mask or bias with the axes (batch item, head, row, key), whole or of length 1."""
    rank = len(problem.batch) + 3
    array = array.reshape((1,) * (rank - array.ndim) + array.shape)
    last = array.shape[-3:]
    if math.prod(array.shape[:-3]) > 1:
        array = cupy.broadcast_to(array, (*problem.batch, *last))
    return array.reshape(-1, *last)


def summed(problem: Problem, gradient: Array, shape: tuple[int, ...]) -> Array:
    """Return a gradient in the shape of its argument, which was broadcast."""
    items, *rest = gradient.shape
    batch = (1,) * len(problem.batch) if items == 1 else problem.batch
    gradient = gradient.reshape(*batch, *rest)
    extra = gradient.ndim - len(shape)
    axes = [
        axis
        for axis, length in enumerate(gradient.shape)
        if length != 1 and (axis < extra or shape[axis - extra] == 1)
    ]
    if axes:
        gradient = gradient.sum(axis=tuple(axes), keepdims=True)
    return gradient.reshape(shape)
