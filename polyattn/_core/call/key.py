"""The cache key of a call, so that a repeated call need not be described again.

A key has the facts of plain arrays, and other arguments with their types: from arguments with
equal keys `describe` makes equal calls. An expression is its form and the facts of its arrays. So
the key of ``mask=masks.segments(ids)`` is::

    ndarray, (float32, (1, 8, 64, 64)), …,                        the facts of query, key, value
    "mask", (Segments, is_array, ()), ndarray, (int64, (1, 64))
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from operator import attrgetter
from typing import Any

from polyattn._base.arrays import Array
from polyattn._base.autocast import casts
from polyattn._base.quantized import Quantized
from polyattn._base.tracing import (
    constant_when_traced,
    is_autocast_on,
    is_recording,
    is_transformed,
    torch_is_imported,
)
from polyattn._core.call.options import AUTOCAST
from polyattn._core.expressions.expression import PLAIN, Expression

CallKey = tuple[Any, ...]  # hashable


def call_key(operands: Sequence[Any], options: Mapping[str, Any]) -> CallKey | None:
    """Return a cache key, or None if the call cannot be cached.

    A call can be cached if its arrays are plain ones, query, key and value of one class, and all
    else is a number, a string or an expression without functions; not while torch compiles or
    transforms the caller, or casts the arrays.
    """
    if len(operands) != 3:
        return None
    query, key, value = operands
    kind = type(query)
    read = _reader_of(kind)
    if read is None or is_transformed():
        return None
    more: Sequence[Array] = ()
    if type(key) is not kind or type(value) is not kind:
        arrays = _integers(kind, key, value)
        if not arrays:
            return None
        key, value, *more = arrays
    try:
        if is_autocast_on() and casts(
            {"query": query, "key": key, "value": value, **options}, AUTOCAST
        ):
            return None
        parts: CallKey = (kind, read(query), read(key), read(value))
        if more:
            parts += tuple(map(read, more))
        for name, option in options.items():
            of_option = _part_of(name, option)
            if of_option is None:
                return None
            parts += of_option
    except RuntimeError:  # a nested tensor has no shape
        return None
    return parts


def _integers(kind: type, key: Any, value: Any) -> tuple[Array, ...]:
    """Return the arrays of quantized keys and values, none if they are others, or are recorded."""
    if not (type(key) is type(value) is Quantized) or is_recording():
        return ()
    arrays = *key, *value
    return arrays if all(type(one) is kind for one in arrays) else ()


def _part_of(name: str, option: Any) -> CallKey | None:
    """Return what an option adds to the key, None if it cannot be in one."""
    kind = type(option)
    if kind in PLAIN:  # with its type, because True equals 1 and is not allowed where 1 is
        return name, kind, option
    read = _reader_of(kind)
    if read is not None:
        return name, kind, read(option)
    arrays: tuple[Array, ...] = ()
    form: Hashable = None
    if isinstance(option, Expression):
        if option.form is None:
            return None
        form, arrays = option.form
    elif kind is tuple and name in ("window", "dropout"):
        if name == "dropout" and len(option) > 1:  # whose seed is an operand
            arrays = option[1:2] if type(option[1]) not in PLAIN else ()
            option = (*option[:1], *option[2:])
        if not PLAIN.issuperset(map(type, option)):
            return None
        form = (option, *map(type, option))
    else:
        return None
    facts: CallKey = ()
    for array in arrays:
        read = _reader_of(type(array))
        if read is None:
            return None
        facts += type(array), read(array)
    return (name, form, *facts)


_Reader = Callable[[Array], tuple[Hashable, ...]]
# By exact class, because a subclass may be anything.
_KNOWN: dict[tuple[str, str], _Reader] = {
    ("numpy", "ndarray"): attrgetter("dtype", "shape"),
    ("cupy", "ndarray"): attrgetter("dtype", "device.id", "shape"),
    ("torch", "Tensor"): attrgetter("dtype", "device", "shape", "layout", "requires_grad"),
}
_readers: dict[type, _Reader | None] = {}


@constant_when_traced
def _reader_of(kind: type) -> _Reader | None:
    """Return the function that reads the facts of arrays of a class, None for other classes."""
    if kind not in _readers:
        torch_is_imported()
        _readers[kind] = _KNOWN.get((kind.__module__, kind.__qualname__))
    return _readers[kind]
