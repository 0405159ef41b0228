"""Describe a call: its options checked one by one, then its facts (`Call`) and its `Operands`.

Three steps, here for a call with::

    mask=masks.causal() & masks.padding([3, 5]),
    score_mod=scores.softcap(30.0) >> rule,  dropout=(0.1, 7)

1. `_checked` checks each option by itself and places numbers of the host beside the query. The
   result is a dict of values by name, without the options that have their defaults.
2. A part of an expression that another option expresses becomes that option, so every kernel that
   supports the option supports it; and `key_lengths` become a mask. The dict is then::

    mask=masks.padding(array), is_causal=True, score_mod=rule, softcap=30.0, dropout=(0.1, 7, start)

3. Each value becomes facts, without the contents of arrays and functions, for the `Call`; the
   arrays and functions themselves go into the `Operands`::

    Call(mask=masks.padding(<(2,) int64>), is_causal=True, score_mod="function", softcap=30.0,
         dropout=0.1, dropout_start=(0, 0, 0, 0), query=…)
    Operands(mask=masks.padding(array), score_mod=rule, seed=7, query=…)

`polyattn._core.call.problem` checks the options together.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable
from typing import Any

from polyattn._base.arguments import got
from polyattn._base.arrays import Array, ArrayFacts, are_one_length, facts_of, is_array
from polyattn._base.host import Destination, as_array, destination_of, is_host
from polyattn._base.tracing import as_constant, torch_transforms
from polyattn._core.call.facts import Call, axes_of
from polyattn._core.call.lengths import lengths_to_mask
from polyattn._core.call.operands import Operands
from polyattn._core.call.options import OPTIONS
from polyattn._core.expressions.expression import FUNCTION, Expression
from polyattn._core.expressions.masks import And, DenseMask, Mask, RuleMask
from polyattn._core.expressions.patterns import Band
from polyattn._core.expressions.scores import Chain, Function, Score, Softcap

_OPERANDS = frozenset(Operands._fields)
# What is checked in each call, also in one whose facts are known.
_NUMBERS_AND_NAMES = frozenset((bool, int, float, str, tuple))


def describe(
    query: Array,
    key: Array,
    value: Array | None,
    *,
    for_weights: bool = False,
    layout: Any = "...HLD",
    logsumexp: bool = False,
    facts: Callable[[Any, str], ArrayFacts] = facts_of,
    shares: tuple[int, int] = (1, 1),
    **options: Any,
) -> tuple[Call, Operands]:
    """Return the facts of a call, its options checked one by one, and its operands.

    Query and keys may be parts of a longer call, which has `shares` times as many rows and keys.
    """
    if not isinstance(layout, str) or layout not in ("...HLD", "...LHD"):
        raise ValueError(f'layout must be "...HLD" or "...LHD"; got {layout!r}')
    values, operands = _simplified(query, key, value, layout, options, shares)
    # By keyword to `__new__`: to the class itself it takes twice as long.
    call = Call.__new__(
        Call,
        query=facts(query, "query"),
        key=facts(key, "key"),
        value=None if for_weights else facts(value, "value"),
        layout=layout,
        logsumexp=logsumexp,
        transforms=torch_transforms(),
        **{name: _facts_of(name, option, facts) for name, option in values.items()},
    )
    if call.query.traced and "query_offset" not in values:
        call = call._replace(query_offset=_offset_of_equal_lengths(query, key, layout))
    return call, operands


def operands_of(
    query: Array, key: Array, value: Array, options: dict[str, Any], layout: str
) -> Operands:
    """Return the operands of a call, as `describe` does, where its facts are known."""
    return _simplified(query, key, value, layout, options, (1, 1), reads=False)[1]


def _simplified(
    query: Array,
    key: Array,
    value: Array | None,
    layout: str,
    options: dict[str, Any],
    shares: tuple[int, int],
    *,
    reads: bool = True,
) -> tuple[dict[str, Any], Operands]:
    """Return the options that are not their defaults, after the first two steps, and operands."""
    values = _checked(options, query, reads=reads)
    if isinstance(values.get("score_mod"), Score):
        _softcap_to_option(values)
    if "key_lengths" in values or "block_table" in values:
        lengths_to_mask(values, options, (query, key), layout, shares)
    if isinstance(values.get("mask"), Mask):
        _band_to_options(values)
    arrays = {name: values[name] for name in values if name in _OPERANDS}
    if "dropout" in values:
        arrays |= _split_dropout(values)
    return values, Operands.__new__(Operands, query=query, key=key, value=value, **arrays)


def _checked(options: dict[str, Any], query: Array, *, reads: bool) -> dict[str, Any]:
    """Return the options that differ from their defaults, checked one by one and placed.

    Unless `reads`, expressions are not checked again, nor arrays of the query's class looked at.
    """
    values: dict[str, Any] = {}
    destination: Destination | None = destination_of(query) if reads else None
    for name, given in options.items():
        option = OPTIONS[name]
        if given is option.default:
            continue
        if not (reads or type(given) in _NUMBERS_AND_NAMES):
            if _is_in_place(given, type(query)):
                values[name] = given
                continue
            destination = destination_of(query)
        if option.gradient == "array" and isinstance(given, numbers.Real):
            axes = ", ".join(option.axes or "").strip(" .,")
            raise TypeError(f"{name} must be an array along {axes} of the scores; {got(given)}")
        if option.axes is not None or isinstance(given, Expression):
            given = placed(name, given, destination)
        values[name] = option.read(given) if reads or not isinstance(given, Expression) else given
    return values


def _facts_of(name: str, value: Any, facts: Callable[[Any, str], ArrayFacts]) -> Any:
    """Return a value without the contents of arrays, functions and tables."""
    if name not in OPTIONS:  # of dropout
        name = f"dropout's {name.removeprefix('dropout_')}"
        return facts(value, name) if is_array(value) else value
    option = OPTIONS[name]
    if option.kind is not None:
        if isinstance(value, option.kind):
            return value.spec(facts)
        if callable(value):
            return FUNCTION
    is_number = option.axes is None or (option.host_integer and isinstance(value, int))
    return value if is_number else facts(value, name)


def _split_dropout(values: dict[str, Any]) -> dict[str, Any]:
    """Split dropout into its rate, its seed and where its hash begins, and return the operands.

    A seed is an operand, so that calls with other seeds have the same facts.
    """
    values["dropout"], seed, start = values["dropout"]
    if values["dropout"] == 0:
        return {}
    arrays = {n: x for n, x in (("seed", seed), ("dropout_start", start)) if is_array(x)}
    values |= {"dropout_start": start} | arrays
    return {"seed": seed} | arrays


def _offset_of_equal_lengths(query: Array, key: Array, layout: str) -> int | None:
    """Return the offset S − L, 0, if an export leaves both lengths open as the same symbol."""
    if min(len(query.shape), len(key.shape)) < 2:
        return None
    one, other = (axes_of(array.shape, layout)[2] for array in (query, key))
    is_open = one is not None and not isinstance(one, int)
    return 0 if is_open and are_one_length(one, other) else None


def placed(name: str, given: Any, destination: Destination | None) -> Any:
    """Return numbers of the host as an array beside the query; anything else as it is."""
    if given is None or isinstance(given, int):
        return given
    given = as_array(name, given)
    if destination is None:
        return given
    if isinstance(given, Expression):
        return given.placed(destination)
    if name in OPTIONS and OPTIONS[name].host_integer and isinstance(given, numbers.Integral):
        return given
    return destination.put(name, given) if is_host(given) else given


def _band_to_options(values: dict[str, Any]) -> None:
    """Make options of causal and window in a mask, and simplify the rest."""
    mask = values.pop("mask")
    rest: list[Mask] = []
    for part in mask.parts if isinstance(mask, And) else (mask,):
        if not isinstance(part, Band):
            rest.append(part)
        elif (part.left, part.right) == (None, 0):
            values["is_causal"] = True
        else:
            left, right = values.get("window", (None, None))
            values["window"] = _least(left, part.left), _least(right, part.right)
    if len(rest) > 1:
        values["mask"] = And(tuple(rest))
    elif rest:
        only: Any = rest[0]
        only = only.array if isinstance(only, DenseMask) else only
        values["mask"] = only.function if isinstance(only, RuleMask) else only


def _least(one: int | None, other: int | None) -> int | None:
    """Return the smaller of two bounds, of which None is no bound."""
    return other if one is None else one if other is None else min(one, other)


def _softcap_to_option(values: dict[str, Any]) -> None:
    """Make an option of a leading softcap, and take a single function out of its expression.

    A function with a derivative stays: only the expression has both.
    """
    score_mod: Any = values.pop("score_mod")
    parts = score_mod.parts if isinstance(score_mod, Chain) else (score_mod,)
    first = parts[0]
    if "softcap" not in values and isinstance(first, Softcap):
        parts, values["softcap"] = parts[1:], as_constant(first.cap)
    if len(parts) > 1:
        values["score_mod"] = Chain(parts)
    elif parts:
        only: Any = parts[0]
        is_bare = isinstance(only, Function) and only.derivative is None
        values["score_mod"] = only.rule if is_bare else only


def _is_in_place(given: Any, kind: Any) -> bool:
    """Return whether an array, or all arrays of an expression, are as they get to a kernel."""
    if isinstance(given, Expression):
        return given.form is not None and all(type(one) is kind for one in given.form[1])
    return type(given) is kind and bool(getattr(given.dtype, "isnative", True))
