"""The product x · weight + bias, whose rows have the same bits however many there are."""

from __future__ import annotations

import ctypes
import math
from functools import lru_cache
from typing import Any

import numpy as np

from polyattn.plugin import Array, progress
from polyattn_native.arrays import address_of
from polyattn_native.call import run
from polyattn_native.library import library

#: The dtypes of products, as the library numbers them.
DTYPES = {np.dtype(np.float32): 0, np.dtype(np.float64): 1}
#: `PolyattnProduct` of `src/interface.h`: sizes, strides and the dtype.
NUMBERS = ctypes.c_int64 * 9
#: The multiply-adds that a thread must have: fewer take less time than to wake it.
THREAD_WORK = 2**19
#: Those of a product in which nobody waits for an interrupt.
SHORT_WORK = 2**24


def product(x: Array, weight: Array, bias: Array | None, threads: int) -> Array | None:
    """Return x · weight + bias of NumPy, shapes (..., inner), (inner, columns) and (columns,).

    None if they are of another library, or not all float32 or all float64.
    """
    dtype = x.dtype
    given = (x, weight) if bias is None else (x, weight, bias)
    is_one = all(isinstance(one, np.ndarray) and one.dtype == dtype for one in given)
    if not is_one or dtype not in DTYPES:
        return None
    x, weight = _aligned(x), _aligned(weight)
    step = 0
    if bias is not None:
        bias = _aligned(bias)
        (step,) = bias.strides
    shape = *x.shape[:-1], weight.shape[1]
    if x.ndim != 2:  # a view, if x is contiguous
        x = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    facts, work = _facts(x.shape, x.strides, weight.shape, weight.strides, step, dtype)
    output = np.empty(shape, dtype)
    threads = min(threads, work // THREAD_WORK) if work >= 2 * THREAD_WORK else 1
    addresses = address_of(x), address_of(weight), bias if bias is None else address_of(bias)
    arguments: Any = facts, threads, *addresses, address_of(output)
    if work < SHORT_WORK:
        library().polyattn_multiply(*arguments, None)
    else:
        with progress() as show:
            run(library().polyattn_multiply, *arguments, show=show)
    return output


def _aligned(array: Array) -> Array:
    return array if array.flags.aligned else array.copy()


@lru_cache(maxsize=1024)
def _facts(
    shape: tuple[int, int], strides: tuple[int, int], weight_shape: tuple[int, int],
    weight_strides: tuple[int, int], bias_stride: int, dtype: Any,
) -> tuple[Any, int]:  # fmt: skip
    """Return a product as an argument of the library, and the number of its multiply-adds."""
    sizes = *shape, weight_shape[1]
    steps = [step // dtype.itemsize for step in (*strides, *weight_strides, bias_stride)]
    return NUMBERS(*sizes, *steps, DTYPES[dtype]), math.prod(sizes)
