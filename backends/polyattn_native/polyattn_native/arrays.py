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
    to.data = address_of(array)
    size = array.itemsize
    offsets = lay_out(to, array.shape, [stride // size for stride in array.strides], batch)
    if offsets is not None:
        to.offsets = address_of(offsets)
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


def has_rows_first(strides: Sequence[int]) -> bool:
    """Return whether the axis of rows comes before that of heads in memory, as in "...LHD"."""
    return len(strides) > 2 and strides[-3] < strides[-2]


def empty_beside(array: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """Return an array (..., head, row, column) with these axes in memory as another has them."""
    if not has_rows_first(array.strides):
        return np.empty(shape, dtype)
    *lead, heads, rows, size = shape
    return np.empty((*lead, rows, heads, size), dtype).swapaxes(-3, -2)


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


# A call of (1, 1, 16, 16) takes 9.0 µs with addresses by `DATA`, 14.2 µs by `__array_interface__`,
# and 37 µs if it is not kept (medians of 9 rounds).
KNOWS_ADDRESSES = knows_addresses()


def address_of(array: Any) -> int | None:
    """Return the address of an array's data, in a third of the time of `ctypes.data`."""
    if not KNOWS_ADDRESSES:
        return int(array.ctypes.data)
    return ctypes.c_void_p.from_address(id(array) + DATA).value


def numbers(array: Any) -> Any:
    """Return an array as it is, or the numbers of one that holds the bits of bfloat16."""
    if array.dtype != np.int16:
        return array
    return (array.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def offsets_of(problem: Problem, x: Operands) -> Any:
    """Return the position of the first row of each item, (items) or (1), at most `FAR` away."""
    if problem.query_offset is not None:
        return np.asarray([max(-FAR, min(problem.query_offset, FAR))])
    numbers = np.asarray(x.query_offset)[..., 0, 0, 0]
    if numbers.dtype == np.uint64:
        numbers = np.minimum(numbers, np.uint64(FAR))
    numbers = np.minimum(np.maximum(numbers.astype(np.int64), -FAR), FAR)
    return (numbers + np.zeros(problem.batch, np.int64)).reshape(-1)
