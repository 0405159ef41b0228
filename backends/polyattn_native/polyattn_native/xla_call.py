"""A call of the library in a program: a custom call of XLA, which `src/xla.cpp` handles.

A run of the program gives the handler the addresses of its arrays. All else is an attribute of the
custom call: ``call`` is a `PolyattnCall` without addresses, and ``places`` has the byte of it where
each address belongs::

    arrays    query   key   value   offsets of key   →   output   logsumexp
    places       64   112     160              120          208         256

Strides are those of a contiguous array. If the items of an array have no stride, their offsets are
one more array, a constant of the program.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from polyattn.plugin import Array, Problem, thread_count
from polyattn_native.arrays import lay_out
from polyattn_native.call import call_of
from polyattn_native.library import CArray, CCall, library

Arrays = dict[str, Array]
Shape = tuple[int, ...]
Results = tuple[tuple[str, Shape, str], ...]  # the name, shape and dtype of each
#: The functions of the library, and how many products of two arrays each computes.
PRODUCTS = {"attend": 2, "differentiate": 5}
#: With a table these are pages, without batch axes.
POOLS = ("key", "value")
#: Arguments of which the call has only the address, also without batch axes.
ADDRESSES = ("sinks", "seed")
#: Results that the library adds to what is there.
ADDED = ("by_distance_gradient", "bias_gradient")
# These functions of JAX have no types.
ffi: Any = jax.ffi
struct: Any = jax.ShapeDtypeStruct
# The most rows of a key head that read keys beside those of other heads: 16 took 0.24 of the time
# with copies, 512 the same, 1024 and more up to 1.2 (float32, 8 heads of 128).
FEW_ROWS = 256


def call_library(function: str, problem: Problem, arrays: Arrays, results: Results) -> Any:
    """Return the results of a function of the library on arrays by name."""
    _register()
    zeros = {name: jnp.zeros(shape, dtype) for name, shape, dtype in results if name in ADDED}
    given = arrays | zeros
    shapes = {name: array.shape for name, array in given.items()}
    shapes |= {name: shape for name, shape, _ in results}
    call = call_of(problem, PRODUCTS[function], thread_count())
    call.page = problem.page or 0
    call.ranges = shapes["stop"][-1] if "stop" in shapes else 1
    offsets, layouts = {}, {}
    for name, shape in shapes.items():
        layouts[name] = _order_of(problem, arrays, name, len(shape))
        found = None if name in ADDRESSES else _lay_out(call, name, shape, layouts[name], problem)
        if found is not None:  # numbers of 64 bits, which JAX may lack, as pairs of 32
            offsets[name] = jnp.asarray(found.view(np.int32))
    places = {name: getattr(CCall, name).offset for name in shapes}
    of_offsets = [places[name] + CArray.offsets.offset for name in offsets]
    names = [name for name, *_ in results]
    run = ffi.ffi_call(
        f"polyattn_{function}",
        [struct(shape, dtype) for _, shape, dtype in results],
        input_layouts=[*[layouts[name] for name in given], *[[0]] * len(offsets)],
        input_output_aliases={[*given].index(name): names.index(name) for name in zeros},
    )
    order = [*[places[name] for name in given], *of_offsets, *[places[name] for name in names]]
    attributes = {
        "call": np.frombuffer(bytes(call), np.int64),
        "places": np.asarray(order, np.int64),
    }
    return run(*given.values(), *offsets.values(), **attributes)


def _lay_out(call: CCall, name: str, shape: Shape, order: list[int], problem: Problem) -> Any:
    """Write the strides of an array into the call, and return the offsets of items without one."""
    array, strides, stride = getattr(call, name), [0] * len(shape), 1
    for axis in reversed(order):
        strides[axis], stride = stride, stride * shape[axis]
    batch = shape[:-3] if call.page and name in POOLS else problem.batch
    offsets = lay_out(array, shape, strides, batch)
    if not name.startswith("by_distance"):
        return offsets
    # Row i and key j read the number of j - i, and before that of row 0 and key 0 are rows - 1.
    array.row, array.column = -1, 1
    items = np.arange(call.items, dtype=np.int64) * array.item if offsets is None else offsets
    return items + (call.rows - 1)


def _order_of(problem: Problem, arrays: Arrays, name: str, rank: int) -> list[int]:
    """Return the axes of an array by their strides: the order of keys may be the caller's."""
    axes = list(range(rank))
    is_few = problem.query_length * problem.group_size <= FEW_ROWS or "table" in arrays
    if problem.layout == "...LHD" and name in POOLS and is_few:
        axes[-3:-1] = axes[-2], axes[-3]
    return axes


@functools.cache
def _register() -> None:
    """Tell XLA of the library."""
    for function in PRODUCTS:
        handler = ffi.pycapsule(getattr(library(), f"polyattn_xla_{function}"))
        ffi.register_ffi_target(f"polyattn_{function}", handler, platform="cpu")
