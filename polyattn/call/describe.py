"""Describe a call: the facts of its arrays and its options, each option checked by itself.

`polyattn.call.problem` checks them together.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable
from typing import Any, NamedTuple

from polyattn.arguments import WindowSize
from polyattn.arrays import Array, ArrayFacts, are_one_length, facts_of, is_array
from polyattn.call.axes import axes_of
from polyattn.call.options import FROM_ZERO, OPTIONS, Start
from polyattn.expressions.expression import FUNCTION, Expression, named
from polyattn.expressions.masks import And, Dense, Mask, Rule
from polyattn.expressions.patterns import Band
from polyattn.expressions.replacements import Normalizer, ScaleRule, Similarity
from polyattn.expressions.scores import Chain, Function, Score, Softcap
from polyattn.host import Home, as_array, home_of, is_host
from polyattn.tracing import torch_transforms

__all__ = ["Call", "Operands", "describe"]


class Operands(NamedTuple):
    """The arrays and functions of one call, heads before length, query, key and value of rank >= 3.

    Attributes
    ----------
    query, key, value : Array
        Shapes (..., H, L, D), (..., G, S, D) and (..., G, S, E).
    mask : Array of bool, Mask, callable or None
        An array broadcasts to (..., H, L, S); a function takes (b, h, i, j).
    bias : Array or None
        Broadcasts to (..., H, L, S).
    query_offset : int, Array or None
        An array has the shape (..., 1, 1, 1); otherwise the problem has the number.
    score_mod : Score, callable or None
        A function takes (score, b, h, i, j).
    sinks : Array or None
        Shape (H,).
    similarity : Similarity or None
        The replacement for q·k.
    seed : int, Array or None
        The seed of dropout.
    dropout_start : Array or None
        Where the hash of dropout begins, shape (4,), if the problem has no numbers for it.
    known_logsumexp : Array or None
        In a call for weights or gradients, the logsumexp to divide by, shape (..., H, L).
    output, output_gradient : Array or None
        In a call for gradients, the output and its gradient, shape (..., H, L, E).
    logsumexp_gradient : Array or None
        In a call for gradients, that of the logsumexp, shape (..., H, L).
    query_tangent, key_tangent, value_tangent, bias_tangent, sinks_tangent : Array or None
        In a call for a directional derivative, the tangents of these arguments; None for 0.
    """

    query: Array
    key: Array
    value: Array  # None in a call for weights
    mask: Array | Callable[..., Array] | None = None
    bias: Array | None = None
    query_offset: int | Array | None = None
    score_mod: Callable[..., Array] | None = None
    sinks: Array | None = None
    similarity: Similarity | None = None
    seed: int | Array | None = None
    known_logsumexp: Array | None = None
    output: Array | None = None
    output_gradient: Array | None = None
    logsumexp_gradient: Array | None = None
    query_tangent: Array | None = None
    key_tangent: Array | None = None
    value_tangent: Array | None = None
    bias_tangent: Array | None = None
    sinks_tangent: Array | None = None
    dropout_start: Array | None = None


_OPERANDS = frozenset(Operands._fields)


class Call(NamedTuple):
    """The facts of a call, without the contents of its arrays; plans are cached by them."""

    query: ArrayFacts
    key: ArrayFacts
    value: ArrayFacts | None  # a call for weights has none
    mask: ArrayFacts | Mask | str | None = None
    bias: ArrayFacts | None = None
    is_causal: bool = False
    window: WindowSize | None = None
    query_offset: ArrayFacts | int | None = None
    scale: float | ScaleRule | None = None
    softcap: float | None = None
    score_mod: Score | str | None = None
    sinks: ArrayFacts | None = None
    dropout: float = 0.0
    seed: ArrayFacts | None = None
    dropout_start: ArrayFacts | Start = FROM_ZERO
    similarity: Similarity | None = None
    normalizer: Normalizer | None = None
    known_logsumexp: ArrayFacts | None = None
    output: ArrayFacts | None = None
    output_gradient: ArrayFacts | None = None
    logsumexp_gradient: ArrayFacts | None = None
    layout: str = "...HLD"
    logsumexp: bool = False
    transforms: frozenset[str] = frozenset()
    tangents: tuple[tuple[str, ArrayFacts], ...] = ()

    def operands(self) -> list[tuple[str, ArrayFacts]]:
        """Return the names and facts of query, key and value."""
        given = [("query", self.query), ("key", self.key)]
        return given if self.value is None else [*given, ("value", self.value)]

    def arrays(self) -> list[tuple[str, ArrayFacts]]:
        """Return the name and facts of each array; an array in a mask is named ``mask.key_ids``."""
        found: list[tuple[str, ArrayFacts]] = []
        for name, given in zip(self._fields, self, strict=True):
            if isinstance(given, ArrayFacts):
                found.append((name, given))
            elif isinstance(given, (Mask, Score, Similarity)):
                found += named(given, name)
        return [*found, *self.tangents]


def describe(
    query: Array,
    key: Array,
    value: Array | None,
    *,
    for_weights: bool = False,
    known_logsumexp: Any = None,
    output: Any = None,
    output_gradient: Any = None,
    logsumexp_gradient: Any = None,
    tangents: dict[str, Any] | None = None,
    layout: Any = "...HLD",
    logsumexp: bool = False,
    facts: Callable[[Any, str], ArrayFacts] = facts_of,
    **options: Any,
) -> tuple[Call, Operands]:
    """Return the facts of a call, its options checked one by one, and its operands.

    A part of an expression that has an option of its own is moved to the option, so that every
    kernel that supports the option supports it. `examine` checks the whole.
    """
    if not isinstance(layout, str) or layout not in ("...HLD", "...LHD"):
        raise ValueError(f'layout must be "...HLD" or "...LHD"; got {layout!r}')
    home = home_of(query)
    values = _checked(options, home)
    described = {name: _described(name, value, facts) for name, value in values.items()}
    if "dropout" in values:
        _take_dropout_apart(described, values, facts)
    if tangents and home is not None:
        tangents = {n: _at_home(n, given, home) for n, given in tangents.items()}
    call = Call(
        facts(query, "query"),
        facts(key, "key"),
        None if for_weights else facts(value, "value"),
        known_logsumexp=None if known_logsumexp is None else facts(known_logsumexp, "logsumexp"),
        output=None if output is None else facts(output, "output"),
        output_gradient=(
            None if output_gradient is None else facts(output_gradient, "output_gradient")
        ),
        logsumexp_gradient=(
            None if logsumexp_gradient is None else facts(logsumexp_gradient, "logsumexp_gradient")
        ),
        layout=layout,
        logsumexp=logsumexp,
        transforms=torch_transforms(),
        **described,
    )
    operands = Operands(
        query, key, value,
        known_logsumexp=known_logsumexp, output=output, output_gradient=output_gradient,
        logsumexp_gradient=logsumexp_gradient,
        **{name: values[name] for name in values if name in _OPERANDS},
    )  # fmt: skip
    if call.query.traced and "query_offset" not in values:
        call = call._replace(query_offset=_known_offset(query, key, layout))
    if tangents is not None:
        found = tuple((name, facts(array, name)) for name, array in tangents.items())
        return call._replace(tangents=found), operands._replace(**tangents)
    return call, operands


def _checked(options: dict[str, Any], home: Home | None) -> dict[str, Any]:
    """Return the options that are given, each checked by itself and moved to where it belongs."""
    values: dict[str, Any] = {}
    for name, given in options.items():
        option = OPTIONS[name]
        if given is option.default:
            continue
        if isinstance(given, Expression):
            given = given if home is None else given.placed(home)
        elif option.axes is not None:
            given = _at_home(name, given, home)
        values[name] = option.read(given)
    if isinstance(values.get("mask"), Mask):
        _move_band(values)
    if isinstance(values.get("score_mod"), Score):
        _move_softcap(values)
    return values


def _described(name: str, value: Any, facts: Callable[[Any, str], ArrayFacts]) -> Any:
    """Return an option without the contents of arrays, functions and tables."""
    if isinstance(value, (int, float, tuple)):
        return value
    if isinstance(value, Expression):
        return value.spec(facts)
    if callable(value):
        return FUNCTION
    return value if OPTIONS[name].axes is None else facts(value, name)


def _take_dropout_apart(
    described: dict[str, Any], values: dict[str, Any], facts: Callable[[Any, str], ArrayFacts]
) -> None:
    """Take dropout apart: its rate, its seed, and where its hash begins."""
    described["dropout"], seed, start = values.pop("dropout")
    if described["dropout"] == 0:
        return
    values["seed"] = seed
    if is_array(seed):
        described["seed"] = facts(seed, "dropout's seed")
    if is_array(start):
        values["dropout_start"], start = start, facts(start, "dropout's start")
    described["dropout_start"] = start


def _known_offset(query: Array, key: Array, layout: str) -> int | None:
    """Return the offset S − L, 0, of lengths that an export leaves open as the same symbol."""
    if min(len(query.shape), len(key.shape)) < 2:
        return None
    one, other = (axes_of(array.shape, layout)[2] for array in (query, key))
    is_open = one is not None and not isinstance(one, int)
    return 0 if is_open and are_one_length(one, other) else None


def _at_home(name: str, given: Any, home: Home | None) -> Any:
    """Return numbers of the host as an array beside the query; anything else as it is."""
    if given is None or isinstance(given, int):
        return given
    given = as_array(name, given)
    if home is None:
        return given
    if isinstance(given, Expression):
        return given.placed(home)
    is_integer = name == "query_offset" and isinstance(given, numbers.Integral)
    return home.put(name, given) if is_host(given) and not is_integer else given


def _move_band(values: dict[str, Any]) -> None:
    """Move causal and window out of a mask to their options, and simplify the rest."""
    mask = values.pop("mask")
    rest: list[Mask] = []
    for part in mask.parts if isinstance(mask, And) else (mask,):
        if not isinstance(part, Band):
            rest.append(part)
        elif part == Band(None, 0):
            values["is_causal"] = True
        else:
            window = values.get("window")
            band = part if window is None else part.intersection(Band(*window))
            values["window"] = band.left, band.right
    if len(rest) > 1:
        values["mask"] = And(tuple(rest))
    elif rest:
        only: Any = rest[0]
        only = only.array if isinstance(only, Dense) else only
        values["mask"] = only.function if isinstance(only, Rule) else only


def _move_softcap(values: dict[str, Any]) -> None:
    """Move a leading softcap to its option, and take a single function out of its expression.

    A function with a derivative stays: only the expression has both.
    """
    score_mod: Any = values.pop("score_mod")
    parts = score_mod.parts if isinstance(score_mod, Chain) else (score_mod,)
    first = parts[0]
    if "softcap" not in values and isinstance(first, Softcap):
        parts, values["softcap"] = parts[1:], first.cap
    if len(parts) > 1:
        values["score_mod"] = Chain(parts)
    elif parts:
        only: Any = parts[0]
        is_bare = isinstance(only, Function) and only.derivative is None
        values["score_mod"] = only.rule if is_bare else only
