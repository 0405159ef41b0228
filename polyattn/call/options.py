"""Checks of the options of a call, each by itself."""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Callable
from typing import Any

from polyattn.arguments import check_int, got
from polyattn.arrays import ArrayFacts, is_array, library_of

__all__ = ["FROM_ZERO", "Start"]

#: The flat batch item, query head, query row and key that a part of a call begins with.
Start = tuple[int, int, int, int]
FROM_ZERO: Start = (0, 0, 0, 0)


def check_bool(name: str, value: Any) -> bool:
    if isinstance(value, bool) or type(value).__name__ in ("bool_", "bool"):
        return bool(value)
    raise TypeError(f"{name} must be True or False; {got(value)}")


def check_finite(name: str, value: Any) -> float:
    if not isinstance(value, (int, float, numbers.Real)) or isinstance(value, bool):
        rules = ", or a rule such as scores.long_sequence()" if name == "scale" else ""
        raise TypeError(f"{name} must be a number{rules}; {got(value)}{_advice(name, value)}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not -math.inf < number < math.inf:
        raise ValueError(f"{name} must be finite; {got(value)}")
    return number


def _advice(name: str, value: Any) -> str:
    """Return what to do with what is no number."""
    if name == "scale":
        return ". An array can scale query itself"
    if name != "softcap" or not is_array(value):
        return ""
    rule = "score_mod=lambda s, b, h, i, j: softcap * tanh(s / softcap)"
    if library_of(value).traced:
        return f". It has no number while it is traced: make it a static argument, or pass {rule}"
    if tuple(value.shape) == ():
        return f". Pass float(softcap), or to differentiate it {rule}"
    return f". For one of each head pass {rule.replace('softcap', 'softcap[h]')}"


def check_softcap(value: Any) -> float:
    number = check_finite("softcap", value)
    if number <= 0:
        raise ValueError(f"softcap must be above 0; {got(value)}. None means no cap")
    return number


def check_offset(value: Any, facts: Callable[[Any, str], ArrayFacts]) -> ArrayFacts | int:
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        return operator.index(value)
    if not hasattr(value, "shape"):
        raise TypeError(
            f"query_offset must be an integer or an integer array of the batch; {got(value)}"
        )
    return facts(value, "query_offset")


def check_dropout(value: Any) -> tuple[float, Any, Any]:
    if not isinstance(value, (tuple, list)) or len(value) not in (2, 3):
        raise TypeError(
            "dropout must be a pair (rate, seed), since nothing is random without a seed, or"
            f" (rate, seed, start); {got(value)}"
        )
    start = _check_start(value[2]) if len(value) == 3 else FROM_ZERO
    rate, seed = check_finite("dropout rate", value[0]), value[1]
    if not 0 <= rate < 1:
        raise ValueError(f"a dropout rate must be in [0, 1); {got(value)}")
    # What NumPy holds can be read, and then goes with arrays of any library.
    if is_array(seed) and type(seed).__module__ != "numpy":
        if tuple(seed.shape) != () or "int" not in str(seed.dtype):
            raise TypeError(f"a dropout seed must be one integer; {got(value)}")
        return rate, seed, start
    try:
        number = operator.index(seed)
    except TypeError:
        raise TypeError(f"a dropout seed must be one integer; {got(value)}") from None
    if not 0 <= number < 2**64:
        raise ValueError(f"a dropout seed must be in [0, 2**64); {got(value)}")
    return rate, number, start


_WRONG_START = (
    "the start of dropout must be four integers of at least 0, the first batch item, head, row and"
    " key of this part of a call, or an array of them; "
)


def _check_start(value: Any) -> Any:
    if is_array(value):
        if tuple(value.shape) != (4,) or "int" not in str(value.dtype):
            raise TypeError(_WRONG_START + got(value))
        if type(value).__module__ != "numpy":
            return value
        value = value.tolist()
    if not isinstance(value, (tuple, list)) or len(value) != 4:
        raise TypeError(_WRONG_START + got(value))
    item, head, row, key = (check_int("the start of dropout", number) for number in value)
    if min(item, head, row, key) < 0:
        raise ValueError(_WRONG_START + got(value))
    return item, head, row, key
