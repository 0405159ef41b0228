"""Check the integers that a model is called with: ids of tokens and segments, and positions."""

from __future__ import annotations

from typing import Any

import numpy as np

from polyattn._base.arrays import Array, facts_of, library_of
from polyattn._base.host import as_array, destination_of, is_host
from polyattn._base.tracing import is_recording, is_transformed
from polyattn.nn.shapes import rows_of


def look_up(table: Array, ids: Array, name: str, offset: int = 0) -> Array:
    """Return the rows ids + offset of a table; `name` is what messages call an id."""
    library, expected = library_of(ids, "ids"), library_of(table)
    if library.name == "ndonnx" != expected.name:
        raise TypeError(
            f"the model's parameters are of {expected.name}, and a graph of ONNX is made: pass the"
            " model itself to polyattn.export.onnx; what a function does around it goes in a Module"
            " of your own, whose parameters are inputs of the graph too"
        )
    if library.name != expected.name or not expected.xp.isdtype(ids.dtype, "integral"):
        raise TypeError(
            f"{name}s must be an integer array of {expected.name}; got {facts_of(ids)} of"
            f" {library.name}"
        )
    check_range(name, ids, range(-offset, table.shape[0] - offset))
    xp = library.xp
    # torch refuses small integers as rows, and they may not hold the sum with the offset.
    if ids.dtype not in (xp.int32, xp.int64):
        ids = xp.astype(ids, xp.int32)
    return rows_of(table, ids + offset if offset else ids)


def check_range(name: str, ids: Array, allowed: range, *, may_wait: bool = False) -> None:
    """Raise if an integer is not allowed, where the host can read it without a long wait."""
    if not _is_readable(ids, may_wait):
        return
    numbers = np.asarray(ids)
    if not numbers.size or (allowed.start <= numbers.min() and numbers.max() < allowed.stop):
        return
    place = np.argwhere((numbers < allowed.start) | (numbers >= allowed.stop))[0]
    index = tuple(place.tolist())
    raise ValueError(
        f"the {name} {numbers[index]} at {index} is out of range: there are {len(allowed)}, from"
        f" {allowed.start} to {allowed.stop - 1}"
    )


def are_known_below(bound: int, numbers: Array) -> bool:
    """Return whether the host sees, without a wait, that all integers are less than `bound`."""
    # Nothing but time may depend on it: an array of JAX is seen once it is computed.
    library = library_of(numbers)
    is_jax = library.name == "jax" and not library.traced
    if not _is_readable(numbers, may_wait=is_jax and bool(numbers.is_ready())):
        return False
    # Not by NumPy for all libraries: a change between two takes longer than this step.
    numbers = np.asarray(numbers) if is_jax else numbers
    return 0 in numbers.shape or int(numbers.max()) < bound


def _is_readable(array: Array, may_wait: bool) -> bool:
    """Return whether the numbers are in the host's memory, now or after a wait."""
    if is_transformed() or is_recording():
        return False
    library = library_of(array)
    if library.traced:
        return False
    if library.name == "jax":  # which computes an array while the caller goes on
        if not may_wait:
            return False
        platforms = {device.platform for device in array.devices()}
        return platforms == {"cpu"} and bool(array.is_fully_addressable)
    return str(getattr(array, "device", "")) == "cpu"


def for_each_token(name: str, value: Any, tokens: Array, each: str = "token") -> Array:
    """Return an integer for each token, on the tokens' device, or raise if it does not fit them."""
    # `tokens` is (..., L, size); the integers are a sequence or array (L,) or (..., L), and for
    # each item an integer or (...).
    if type(value) is not type(tokens) or is_host(value):
        value = np.asarray(value) if isinstance(value, int) else as_array(name, value)
        destination = destination_of(tokens)
        if is_host(value) and destination is not None:
            value = destination.put(name, value)
    facts, whole = facts_of(value, name), facts_of(tokens)
    if facts.library != whole.library and not is_host(value):
        raise TypeError(f"{name} must be an array of {whole.library}, as the tokens are; got"
                        f" {facts} of {facts.library}")  # fmt: skip
    length, shape = ((), "(L,) or (..., L)") if each == "token" else (whole.shape[-2:-1], "(...)")
    if not _fits((*facts.shape, *length), whole.shape[:-1]):
        raise ValueError(
            f"{name} must have an integer for each {each}, so the shape {shape} of"
            f" {whole.shape[: -1 - len(length)]}; got {facts.shape}"
        )
    return value


def _fits(shape: tuple[int | None, ...], whole: tuple[int | None, ...]) -> bool:
    """Return whether a shape has the last length of another, and broadcasts to it."""
    if not shape or len(shape) > len(whole):
        return False
    pairs = list(zip(reversed(shape), reversed(whole), strict=False))
    return all(
        n is None or m is None or n == m or (axis > 0 and n == 1)
        for axis, (n, m) in enumerate(pairs)
    )
