"""Check single arguments: each function returns the value in a plain form or raises."""

from __future__ import annotations

import difflib
import inspect
import operator
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

from polyattn._base.arrays import as_facts, is_array, library_of
from polyattn._base.tracing import as_index, as_number, is_compiling, is_of_numpy, traced_tensor

#: How many of many things a message lists.
FEW = 20

Shape = tuple[int, ...]
WindowSize = tuple[int | None, int | None]


def check_signature(name: str, function: Callable[..., Any], parameters: str) -> None:
    """Raise if a function cannot be called with these parameters, such as "i, j"."""
    if is_compiling():
        return
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some built-in functions have no signature
        return
    try:
        signature.bind(*parameters.split(", "))
    except TypeError:
        raise TypeError(f"{name} must take ({parameters}); it takes {signature}") from None


def check_shape(shape: Any) -> Shape:
    """Return a shape as a tuple of Python integers, or raise."""
    try:
        lengths = tuple(operator.index(length) for length in shape)
    except TypeError:
        lengths = (-1,)
    if any(length < 0 for length in lengths):
        raise ValueError(f"a shape must hold integers of at least 0; {got(shape)}")
    return lengths


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return the part of a message that asks for the nearest of some names; "" if none is near."""
    near = difflib.get_close_matches(name, list(names), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def got(value: Any) -> str:
    """Return the end of a message, which quotes the caller's value."""
    return f"got {_traced(value) if is_compiling() else repr(value)}"


def _traced(value: Any) -> str:
    """Return a value as text while torch.compile traces it: then a tensor has no repr."""
    if isinstance(value, (tuple, list)):
        return f"({', '.join([_traced(one) for one in value])})"
    value = traced_tensor(value) if is_of_numpy(type(value)) else value
    return str(as_facts(value)) if is_array(value) else repr(value)


def short(text: Any, most: int = 80) -> str:
    """Return a text from elsewhere for a message: cut, and quoted unless it is printable."""
    text = str(text)
    if len(text) > most:
        return f"{text[: most // 2]!r} … {text[-most // 4 :]!r} ({len(text):,} characters)"
    return text if text.isprintable() else repr(text)


def few(texts: Iterable[str], number: int, separator: str = ", ") -> str:
    """Return the first texts of this number, and how many more there are."""
    first = list(islice(texts, FEW))
    return separator.join([*first, f"and {number - FEW:,} more"] if number > FEW else first)


def check_int(name: str, value: Any, kinds: str = "an integer", *, least: int | None = None) -> int:
    """Return an integer of any type, at least `least`, as a Python integer, or raise."""
    value = as_number(name, value)
    try:
        number = None if isinstance(value, bool) else as_index(value)
    except TypeError:
        number = None
    if number is None:
        raise TypeError(f"{name} must be {kinds}; {got(value)}")
    if least is not None and number < least:
        raise ValueError(f"{name} must be at least {least}; got {number}")
    return number


def check_window(value: Any) -> WindowSize:
    """Return a window as a pair of Python integers or None, or raise."""
    hint = (
        "window must be a pair (left, right): how many keys before and after its own position a row"
        " sees, None for no bound. A window of 256 tokens that ends at the row's own position is"
        " (255, 0)"
    )
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise TypeError(f"{hint}; {got(value)}")
    ends = []
    for end in value:
        end = as_number("an end of window", end)
        try:
            ends.append(None if end is None else check_int("an end", end))
        except TypeError:
            if is_array(end) and library_of(end).traced:
                hint = (
                    "the end of a window is not known while it is traced: make it a static"
                    " argument, or pass mask=lambda b, h, i, j: (i + offset - left <= j) & (j <= i"
                    " + offset + right), with offset = S - L"
                )
            raise TypeError(f"{hint}; {got(value)}") from None
        if ends[-1] is not None and ends[-1] < 0:
            raise ValueError(f"a window's ends must be at least 0, or None; {got(value)}")
    return ends[0], ends[1]
