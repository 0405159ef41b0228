"""NumPy arrays as the compiled library reads them: an address and strides by item, head and row."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from polyattn.plugin import Operands, Problem
from polyattn_native.library import CArray

#: Bounds of positions and of numbers that are added to them: their sums fit into 64 bits.
FAR = 2**61
#: Numbers may be of any size, also those of torch, which does not warn.
QUIETLY = np.errstate(all="ignore")


def describe(to: CArray, array: Any, batch: tuple[int, ...], made: list[Any]) -> None:
    """Write an array (..., head, row, column) whose batch axes broadcast to those of the call.

    Axes of length 1 are repeated. An array that is made, of where items begin, is added to `made`:
    it must live as long as the call, as `array` must.
    """
    to.data = array.ctypes.data
    size = array.itemsize
    offsets = lay_out(to, array.shape, [stride // size for stride in array.strides], batch)
    if offsets is not None:
        to.offsets = offsets.ctypes.data
        made.append(offsets)


def lay_out(
    to: CArray, shape: tuple[int, ...], strides: Sequence[int], batch: tuple[int, ...]
) -> Any:
    """Write the strides of an array, and return the offsets of its items if they have no stride."""
    missing = 3 - len(shape)
    *lead, heads, rows, columns = (1,) * missing + tuple(shape)
    *steps, head, row, column = (0,) * missing + tuple(strides)
    to.head = 0 if heads == 1 else head
    to.row = 0 if rows == 1 else row
    to.column = 0 if columns == 1 else column
    steps = [0 if n == 1 else step for n, step in zip(lead, steps, strict=True)]
    steps = [0] * (len(batch) - len(steps)) + steps
    to.offsets, to.item = None, 0
    if not any(steps):
        return None
    long = [(n, step) for n, step in zip(batch, steps, strict=True) if n > 1]
    if all(outer == inner * n for (_, outer), (n, inner) in pairwise(long)):
        to.item = long[-1][1]
        return None
    offsets = np.zeros((), np.int64)
    for n, step in zip(batch, steps, strict=True):
        offsets = np.add.outer(offsets, np.arange(n, dtype=np.int64) * step)
    return np.ascontiguousarray(offsets.reshape(-1))


def converted(array: Any, dtype: Any) -> Any:
    """Return an array in a dtype, without a warning of numbers that it does not hold."""
    if array.dtype == dtype:
        return array
    with np.errstate(all="ignore"):
        return np.asarray(array, dtype)


def readable(array: Any, dtype: Any = None) -> Any:
    """Return an array whose last axis is contiguous, and whose numbers are aligned."""
    array = np.asarray(array, dtype)
    return array if is_readable(array) else _copied(array)


def readable_view(array: Any) -> Any:
    """Return an array with any strides whose numbers are aligned."""
    return array if _is_aligned(array) else _copied(array)


def is_readable(array: Any) -> bool:
    """Return whether the last axis is contiguous, and numbers are aligned."""
    is_contiguous = array.shape[-1] == 1 or array.strides[-1] == array.itemsize
    return is_contiguous and _is_aligned(array)


def _is_aligned(array: Any) -> bool:
    """Return whether addresses are multiples of the numbers' size, and bytes in order."""
    aligned: bool = array.flags.aligned and array.dtype.isnative
    return aligned


def _copied(array: Any) -> Any:
    return np.array(array, array.dtype.newbyteorder("="), order="C")


#: Where the address of an array's data lies in it: first after the head of a Python object, as
#: NumPy's own C interface fixes.
DATA = object.__basicsize__


def knows_addresses() -> bool:
    """Return whether the address of an array's data lies at `DATA`."""
    array = np.empty(1)
    at: int | None = ctypes.c_void_p.from_address(id(array) + DATA).value
    return at == array.ctypes.data


def numbers(array: Any) -> Any:
    """Return an array as it is, or the numbers of one that holds the bits of bfloat16."""
    if array.dtype != np.int16:
        return array
    return (array.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def offsets_of(problem: Problem, x: Operands) -> Any:
    """Return the position of the first row of each item, (items) or (1), at most `FAR` away."""
    numbers: list[Any] = [problem.query_offset]
    if problem.query_offset is None:
        of_items = np.asarray(x.query_offset)[..., 0, 0, 0]
        numbers = np.broadcast_to(of_items, problem.batch).reshape(-1).tolist()
    return np.asarray([max(-FAR, min(number, FAR)) for number in numbers])
