"""Call: what the caller gave, less the arrays' values, each option checked by itself.

Options are checked here one by one; what must hold among the arrays is for `problem` to check.
"""

from __future__ import annotations

import inspect
import math
import numbers
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

from polyattn.arrays import Array, ArrayFacts, facts_of, is_compiling, torch_transforms

__all__ = ["Call", "Operands", "Shape", "Window", "describe", "lengths"]

Shape = tuple[int, ...]
Window = tuple[int | None, int | None]


class Operands(NamedTuple):
    """The arrays and functions of one call, heads before length, query, key and value of rank 3 up.

    Attributes
    ----------
    query, key, value : Array
        Shapes (..., H, L, D), (..., G, S, D) and (..., G, S, E).
    mask : Array of bool, callable or None
        Broadcasts to (..., H, L, S), or a function of (b, h, i, j).
    bias : Array or None
        Broadcasts to (..., H, L, S).
    query_offset : int, Array or None
        An array has the shape (..., 1, 1, 1); otherwise the problem has the number.
    score_mod : callable or None
        A function of (score, b, h, i, j).
    sinks : Array or None
        Shape (H,).
    """

    query: Array
    key: Array
    value: Array
    mask: Array | Callable[..., Array] | None
    bias: Array | None
    query_offset: int | Array | None
    score_mod: Callable[..., Array] | None
    sinks: Array | None


class Call(NamedTuple):
    """What the caller gave, less the arrays' values: the key that a decision is remembered by."""

    query: ArrayFacts
    key: ArrayFacts
    value: ArrayFacts
    mask: ArrayFacts | str | None
    bias: ArrayFacts | None
    is_causal: bool
    window: Window | None
    query_offset: ArrayFacts | int | None
    scale: float | None
    softcap: float | None
    score_mod: bool
    sinks: ArrayFacts | None
    dropout: float
    layout: str
    logsumexp: bool
    transforms: frozenset[str]

    def arrays(self) -> list[tuple[str, ArrayFacts]]:
        """Return the name and facts of each array that was given."""
        pairs = zip(self._fields, self, strict=True)
        return [(name, facts) for name, facts in pairs if isinstance(facts, ArrayFacts)]


def describe(
    query: Array,
    key: Array,
    value: Array,
    *,
    mask: Any = None,
    bias: Any = None,
    is_causal: Any = False,
    window: Any = None,
    query_offset: Any = None,
    scale: Any = None,
    softcap: Any = None,
    score_mod: Any = None,
    sinks: Any = None,
    dropout: Any = None,
    layout: Any = "...HLD",
    logsumexp: bool = False,
    facts: Callable[[Any, str], ArrayFacts] = facts_of,
) -> Call:
    """Return the facts of a call, its options checked one by one; `examine` checks the whole."""
    if not isinstance(layout, str) or layout not in ("...HLD", "...LHD"):
        raise ValueError(f'layout must be "...HLD" or "...LHD"; got {layout!r}')
    mask_facts: ArrayFacts | str | None = None
    if callable(mask):
        _check_takes("the mask function", mask, "b, h, i, j")
        mask_facts = "function"
    elif mask is not None:
        mask_facts = facts(mask, "mask")
    if score_mod is not None:
        if not callable(score_mod):
            raise TypeError(
                f"score_mod must be a function (score, b, h, i, j) -> score; {_got(score_mod)}"
            )
        _check_takes("score_mod", score_mod, "score, b, h, i, j")
    return Call(
        facts(query, "query"),
        facts(key, "key"),
        facts(value, "value"),
        mask_facts,
        None if bias is None else facts(bias, "bias"),
        is_causal if is_causal is False else _flag("is_causal", is_causal),
        None if window is None else _window(window),
        None if query_offset is None else _offset(query_offset, facts),
        None if scale is None else _finite("scale", scale),
        None if softcap is None else _softcap(softcap),
        score_mod is not None,
        None if sinks is None else facts(sinks, "sinks"),
        0.0 if dropout is None else _dropout(dropout),
        layout,
        logsumexp,
        torch_transforms(),
    )


def _check_takes(name: str, function: Callable[..., Any], parameters: str) -> None:
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


def lengths(shape: Any) -> Shape:
    """Return a shape given by itself as a tuple of Python numbers, checked."""
    try:
        checked = tuple(operator.index(length) for length in shape)
    except TypeError:
        checked = (-1,)
    if any(length < 0 for length in checked):
        raise ValueError(f"a shape must hold integers of at least 0; {_got(shape)}")
    return checked


def _got(value: Any) -> str:
    return f"got {value!r}"


def _flag(name: str, value: Any) -> bool:
    if isinstance(value, bool) or type(value).__name__ in ("bool_", "bool"):
        return bool(value)
    raise TypeError(f"{name} must be True or False; {_got(value)}")


def _finite(name: str, value: Any) -> float:
    if not isinstance(value, (int, float, numbers.Real)) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number; {_got(value)}. An array can scale query itself")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not -math.inf < number < math.inf:
        raise ValueError(f"{name} must be finite; {_got(value)}")
    return number


def _softcap(value: Any) -> float:
    number = _finite("softcap", value)
    if number <= 0:
        raise ValueError(f"softcap must be above 0; {_got(value)}. None means no cap")
    return number


def _window(value: Any) -> Window:
    hint = (
        "window must be a pair (left, right): how many keys before and after a row's own position"
        " it sees, the own not counted, None for no bound. A window of 256 tokens that ends at the"
        " own is (255, 0)"
    )
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise TypeError(f"{hint}; {_got(value)}")
    ends = []
    for end in value:
        try:
            ends.append(None if end is None else operator.index(end))
        except TypeError:
            raise TypeError(f"{hint}; {_got(value)}") from None
        if ends[-1] is not None and ends[-1] < 0:
            raise ValueError(f"a window's ends must be at least 0, or None; {_got(value)}")
    return ends[0], ends[1]


def _offset(value: Any, facts: Callable[[Any, str], ArrayFacts]) -> ArrayFacts | int:
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        return operator.index(value)
    if not hasattr(value, "shape"):
        raise TypeError(
            f"query_offset must be an integer or an integer array of the batch; {_got(value)}"
        )
    return facts(value, "query_offset")


def _dropout(value: Any) -> float:
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise TypeError(
            f"dropout must be a pair (rate, seed): nothing is random without a seed; {_got(value)}"
        )
    rate = _finite("dropout rate", value[0])
    if not 0 <= rate < 1:
        raise ValueError(f"a dropout rate must be in [0, 1); {_got(value)}")
    try:
        operator.index(value[1])
    except TypeError:
        raise TypeError(f"a dropout seed must be an integer; {_got(value)}") from None
    return rate
