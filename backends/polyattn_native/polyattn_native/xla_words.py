"""A call as attributes of a custom call of XLA, which the handlers in `src/xla.cpp` read.

XLA gives the addresses of its arrays when a program runs, so the attributes say where in the call
they belong. Its arrays have no strides: they follow from the shapes and the order of the axes.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from polyattn.plugin import Problem, thread_count
from polyattn_native.arrays import lay_out
from polyattn_native.call import call_of
from polyattn_native.library import CArray, CCall
from polyattn_native.xla_operands import POOLS
from polyattn_native.xla_scores import trained

#: The functions of the library, and how many products of two arrays each computes.
PRODUCTS = {"attend": 2, "push_forward": 4, "differentiate": 5}
# Arguments of which the call has the numbers, with their bytes.
NUMBERS = {"seed_low": 4, "seed_high": 4, "start": 16}
# Arguments of which it has only the address.
ADDRESSES = ("sinks", "sinks_tangent")
# Arguments that are one of two arrays of the call, in the order in which they are added.
PAIRS = {
    "by_distance": ("bias", 0),
    "bias": ("bias", 1),
    "by_distance_gradient": ("bias_gradient", 0),
    "bias_gradient": ("bias_gradient", 1),
}

# The most rows of a key head that read keys beside those of other heads: 16 took 0.24 of the time
# with copies, 512 the same, 1024 and more up to 1.2 (float32, 8 heads of 128).
FEW_ROWS = 256


def words(
    function: str, problem: Problem, names: tuple[str, ...], shapes: list[tuple[int, ...]]
) -> dict[str, Any]:
    """Return the attributes of a call with arrays of these names, arguments and then results."""
    call = call_of(problem, PRODUCTS[function], thread_count())
    call.page = problem.page or 0
    places, tables, pieces = [], [], []
    end = ctypes.sizeof(CCall) // 8
    for name, shape in zip(names, shapes, strict=True):
        field, index = PAIRS.get(name, (name, None))
        place = getattr(CCall, field).offset + (index or 0) * ctypes.sizeof(CArray)
        if name in NUMBERS:
            places.append(place | NUMBERS[name] << 32)
            continue
        places.append(place)
        if name in ADDRESSES:
            continue
        array = getattr(call, field)
        array = array if index is None else array[index]
        batch = shape[:-3] if "table" in names and name in POOLS else problem.batch
        order = order_of(problem, names, name, len(shape))
        strides = contiguous([shape[axis] for axis in order])
        offsets = lay_out(array, shape, [strides[axis] for axis in order], batch)
        if name.startswith("by_distance"):
            offsets = _lay_out_by_distance(array, offsets, call)
        if offsets is not None:
            tables += [place + CArray.offsets.offset, end]
            pieces.append(offsets)
            end += len(offsets)
    return {
        "call": np.concatenate([np.frombuffer(bytes(call), np.int64), *pieces]),
        "places": np.asarray(places, np.int64),
        "tables": np.asarray(tables or [-1], np.int64),
    }


def _lay_out_by_distance(array: CArray, offsets: Any, call: CCall) -> Any:
    """Let row i and key j of an item read one number of j - i, and return where the items begin."""
    if offsets is None:
        offsets = np.arange(call.items, dtype=np.int64) * array.item
    array.row, array.column = -1, 1
    return offsets + (call.rows - 1)


def order_of(problem: Problem, names: tuple[str, ...], name: str, rank: int) -> list[int]:
    """Return the axes of an array from the outermost in memory: keys may lie as the caller's."""
    axes = list(range(rank))
    is_few = problem.query_length * problem.group_size <= FEW_ROWS or "table" in names
    if problem.layout == "...LHD" and name in POOLS and is_few:
        axes[-3:-1] = axes[-2], axes[-3]
    return axes


def contiguous(shape: Sequence[int]) -> list[int]:
    """Return the strides of an array in the order of its axes."""
    after = itertools.accumulate(reversed(shape[1:]), lambda a, b: a * b, initial=1)
    return list(after)[::-1]


def result_shapes(
    function: str, problem: Problem, arguments: tuple[str, ...]
) -> dict[str, tuple[tuple[int, ...], str]]:
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
    if "by_distance_gradient" in arguments:
        distances = problem.query_length + problem.key_length - 1
        found["by_distance_gradient"] = (*problem.batch, problem.heads, 1, distances)
    found |= {f"{name}_gradient": shape for name, shape in trained(problem).items()}
    return {name: (shape, dtype) for name, shape in found.items()}
