"""Check the numbers and integer arrays that masks are made of."""

from __future__ import annotations

import numbers
from typing import Any

from polyattn._base.arguments import check_int, got
from polyattn._base.arrays import facts_of, is_array
from polyattn._base.host import as_array, check_held, is_host, is_unreadable


def check_lengths(name: str, value: Any) -> Any:
    """Return a number of at least 0, or an array of a number for each batch item, or raise."""
    value = as_array(name, value)
    # NumPy's integers are arrays too, which other libraries cannot use.
    if is_array(value) and not isinstance(value, numbers.Integral):
        return _integers(name, value, "an integer or an integer array")
    return check_int(name, value, "an integer, or an array of one for each batch item", least=0)


def check_ids(name: str, value: Any) -> Any:
    """Return an integer array, or raise."""
    return _integers(name, as_array(name, value), "an integer array")


def check_positions(name: str, value: Any) -> Any:
    """Return an integer array whose numbers are below 2**63, where they can be read, or raise."""
    positions = check_ids(name, value)
    if is_host(positions) and not is_unreadable(positions):
        check_held(name, positions, "int64")
    return positions


def check_parents(name: str, value: Any) -> Any:
    """Return an integer array (..., n) or a bool array (..., n, n), or raise."""
    parents = as_array(name, value)
    if _is_square(parents):
        return parents
    parents = _integers(name, parents, "an integer array (..., L) or a bool array (..., L, L)")
    if not is_unreadable(parents) and not parents.shape:
        raise ValueError(f"{name} must have shape (..., L); {got(parents)}")
    return parents


def _is_square(value: Any) -> bool:
    """Return whether this is a bool array (..., n, n)."""
    if not is_array(value) or is_unreadable(value) or facts_of(value).dtype != "bool":
        return False
    return len(value.shape) > 1 and value.shape[-1] == value.shape[-2]


def _integers(name: str, value: Any, what: str) -> Any:
    if is_unreadable(value):  # the call checks it, as a tensor
        return value
    if not is_array(value):
        raise TypeError(f"{name} must be {what}; {got(value)}")
    facts = facts_of(value, name)
    if "int" not in facts.dtype:
        hint = ""
        if name.endswith("key_lengths") and facts.dtype == "bool":
            hint = ". A bool array of the real tokens, (batch, S), is mask=valid[:, None, None, :]"
        raise TypeError(f"{name} must be {what}; got {facts}{hint}")
    return value
