"""A call as attributes of a custom call of XLA, which the handlers in `src/xla.cpp` read.

XLA gives the addresses of its arrays when a program runs, so the attributes say where in the call
they belong. Its arrays have no strides: they follow from the shapes.
"""

from __future__ import annotations

import ctypes
import itertools
from typing import Any

import numpy as np

from polyattn.plugin import Problem, thread_count
from polyattn_native.arrays import lay_out
from polyattn_native.call import call_of
from polyattn_native.library import CArray, CCall

#: The functions of the library, and how many products of two arrays each computes.
PRODUCTS = {"attend": 2, "push_forward": 4, "differentiate": 5}
# Arguments of which the call has the numbers, with their bytes.
NUMBERS = {"seed_low": 4, "seed_high": 4, "start": 16}
# Arguments of which it has only the address.
ADDRESSES = ("sinks", "sinks_tangent")


def words(
    function: str, problem: Problem, names: tuple[str, ...], shapes: list[tuple[int, ...]]
) -> dict[str, Any]:
    """Return the attributes of a call with arrays of these names, arguments and then results."""
    call = call_of(problem, PRODUCTS[function], thread_count())
    places, tables, pieces = [], [], []
    end = ctypes.sizeof(CCall) // 8
    for name, shape in zip(names, shapes, strict=True):
        field = getattr(CCall, name)
        if name in NUMBERS:
            places.append(field.offset | NUMBERS[name] << 32)
            continue
        places.append(field.offset)
        if name in ADDRESSES:
            continue
        array = getattr(call, name)
        if name in ("bias", "bias_gradient"):
            array = array[0]
        offsets = lay_out(array, shape, contiguous(shape), problem.batch)
        if offsets is not None:
            tables += [field.offset + CArray.offsets.offset, end]
            pieces.append(offsets)
            end += len(offsets)
    return {
        "call": np.concatenate([np.frombuffer(bytes(call), np.int64), *pieces]),
        "places": np.asarray(places, np.int64),
        "tables": np.asarray(tables or [-1], np.int64),
    }


def contiguous(shape: tuple[int, ...]) -> list[int]:
    """Return the strides of an array in the order of its axes."""
    after = itertools.accumulate(reversed(shape[1:]), lambda a, b: a * b, initial=1)
    return list(after)[::-1]


def result_shapes(function: str, problem: Problem) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return the shapes and dtypes of the results of a function, by name."""
    dtype, rows = problem.accumulator, (*problem.scores[:-1], 1)
    output = (*problem.scores[:-1], problem.value_size)
    if function == "attend":
        return {"output": (output, problem.dtype), "logsumexp": (rows, dtype)}
    if function == "push_forward":
        return {"output_tangent": (output, dtype), "logsumexp_tangent": (rows, dtype)}
    keys = (*problem.batch, problem.key_heads, problem.key_length)
    found = {
        "query_gradient": (*problem.scores[:-1], problem.head_size),
        "key_gradient": (*keys, problem.head_size),
        "value_gradient": (*keys, problem.value_size),
        "delta": rows,
    }
    if problem.softcap is not None:
        found["softcap_gradient"] = rows
    if problem.bias is not None:  # the gradient's shape
        found["bias_gradient"] = problem.bias
    return {name: (shape, dtype) for name, shape in found.items()}
