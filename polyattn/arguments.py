"""Checks of single arguments: each returns the value in its plain form or raises."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from typing import Any

from polyattn.arrays import is_compiling

__all__ = ["Shape", "WindowSize", "check_int", "check_shape", "check_signature", "check_window"]

Shape = tuple[int, ...]


WindowSize = tuple[int | None, int | None]


def check_signature(name: str, function: Callable[..., Any], parameters: str) -> None:
    """Refuse a function that cannot be called with so many arguments."""
    if is_compiling():
        return
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of some built-in functions nothing is known
        return
    try:
        signature.bind(*parameters.split(", "))
    except TypeError:
        raise TypeError(f"{name} must take ({parameters}); it takes {signature}") from None


def check_shape(shape: Any) -> Shape:
    """Return a shape given by itself as a tuple of Python numbers, checked."""
    try:
        variant = tuple(operator.index(length) for length in shape)
    except TypeError:
        variant = (-1,)
    if any(length < 0 for length in variant):
        raise ValueError(f"a shape must hold integers of at least 0; {got(shape)}")
    return variant


def got(value: Any) -> str:
    return f"got {value!r}"


def check_int(name: str, value: Any, kinds: str = "an integer") -> int:
    """Return an integer, of whatever kind it is."""
    if not isinstance(value, bool):
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise TypeError(f"{name} must be {kinds}; {got(value)}")


def check_window(value: Any) -> WindowSize:
    """Return the ends of a window, checked."""
    hint = (
        "window must be a pair (left, right): how many keys before and after a row's own position"
        " it sees, the own not counted, None for no bound. A window of 256 tokens that ends at the"
        " own is (255, 0)"
    )
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise TypeError(f"{hint}; {got(value)}")
    ends = []
    for end in value:
        if isinstance(end, bool):
            raise TypeError(f"{hint}; {got(value)}")
        try:
            ends.append(None if end is None else operator.index(end))
        except TypeError:
            raise TypeError(f"{hint}; {got(value)}") from None
        if ends[-1] is not None and ends[-1] < 0:
            raise ValueError(f"a window's ends must be at least 0, or None; {got(value)}")
    return ends[0], ends[1]
