"""Inputs with one batch axis, as cuBLAS and cuDNN need them, and the shapes of results."""

from __future__ import annotations

from typing import Any

import cupy

from polyattn.plugin import Array, Problem


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
