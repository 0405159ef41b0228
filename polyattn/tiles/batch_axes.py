"""Merge batch axes, for kernels that take one."""

from __future__ import annotations

import math
from typing import Any

from polyattn.arrays import Array
from polyattn.call.problem import Problem

__all__ = ["one_batch_axis"]


def one_batch_axis(problem: Problem, array: Array, xp: Any) -> Array:
    """Return query, key, value or a mask with its batch axes broadcast and merged into one.

    Parameters
    ----------
    problem : Problem
        The facts of the call.
    array : Array
        Shape (..., H, L, D), or the like; its batch axes broadcast to those of the call.
    xp : module
        The standard's namespace of the library.

    Returns
    -------
    Array
        Shape (B, H, L, D): the array itself if it has that shape, a copy if it is broadcast.
    """
    batch, shape = problem.batch, tuple(array.shape)
    if len(batch) == 1 and shape[:-3] == batch:
        return array
    if not batch:
        return array[None, ...]
    return xp.reshape(
        xp.broadcast_to(array, (*batch, *shape[-3:])), (math.prod(batch), *shape[-3:])
    )
