"""NumPy arrays as the compiled library reads them: an address and strides by item, head and row."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from polyattn_native.library import CArray

#: A bound of positions and windows whose sums fit into 64 bits.
FAR = 2**61


def describe(to: CArray, array: Any, batch: tuple[int, ...], keep: list[Any]) -> None:
    """Write an array (..., head, row, column) whose batch axes broadcast to those of the call.

    Axes of length 1 are repeated. What the address belongs to is added to `keep`.
    """
    size = array.itemsize
    *lead, heads, rows, columns = (1,) * (3 - array.ndim) + array.shape
    *strides, head, row, column = (0,) * (3 - array.ndim) + array.strides
    to.data = array.ctypes.data
    to.head = 0 if heads == 1 else head // size
    to.row = 0 if rows == 1 else row // size
    to.column = 0 if columns == 1 else column // size
    steps = [0 if n == 1 else stride // size for n, stride in zip(lead, strides, strict=True)]
    steps = [0] * (len(batch) - len(steps)) + steps
    to.offsets, to.item = None, 0
    if any(steps):
        item = steps[-1]
        whole = all(
            steps[i] == steps[i + 1] * batch[i + 1] for i in range(len(batch) - 1) if batch[i] > 1
        )
        if whole:
            to.item = item
        else:
            offsets = np.zeros((), np.int64)
            for n, step in zip(batch, steps, strict=True):
                offsets = np.add.outer(offsets, np.arange(n, dtype=np.int64) * step)
            offsets = np.ascontiguousarray(offsets.reshape(-1))
            to.offsets = offsets.ctypes.data
            keep.append(offsets)
    keep.append(array)


def readable(array: Any, dtype: Any = None) -> Any:
    """Return an array whose last axis is contiguous and whose strides are whole numbers."""
    if dtype is not None and array.dtype != dtype:
        return np.asarray(array, dtype)
    if is_readable(array):
        return array
    return np.array(array, array.dtype.newbyteorder("="), order="C")


def is_readable(array: Any) -> bool:
    """Return whether the last axis is contiguous, strides are whole numbers, bytes in order."""
    size = array.itemsize
    whole = not any(stride % size for stride in array.strides) and array.dtype.isnative
    return whole and (array.shape[-1] == 1 or array.strides[-1] == size)


def numbers(array: Any) -> Any:
    """Return an array as it is, or the numbers of one that holds the bits of bfloat16."""
    if array.dtype != np.int16:
        return array
    return (array.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def by_item(array: Any, batch: tuple[int, ...]) -> Any:
    """Return one number for each flat batch item, from an array of the batch axes."""
    return np.broadcast_to(array, batch).reshape(math.prod(batch))
