"""Describe a call: the facts of its arrays and its options, each option checked by itself.

`polyattn.call.problem` checks them together.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable
from typing import Any

from polyattn.arguments import WindowSize, check_signature, check_window, got
from polyattn.arrays import Array, ArrayFacts, are_one_length, facts_of, is_array
from polyattn.call.axes import axes_of
from polyattn.call.facts import Call
from polyattn.call.operands import Operands
from polyattn.call.options import (
    FROM_ZERO,
    check_bool,
    check_dropout,
    check_finite,
    check_offset,
    check_softcap,
)
from polyattn.expressions.expression import Expression
from polyattn.expressions.masks import And, Dense, Mask, Rule
from polyattn.expressions.patterns import Band
from polyattn.expressions.replacements import Normalizer, ScaleRule, Similarity
from polyattn.expressions.scores import Chain, Function, Score, Softcap
from polyattn.host import Home, as_array, home_of, is_host
from polyattn.tracing import torch_transforms

__all__ = ["at_home", "describe"]


def describe(
    query: Array,
    key: Array,
    value: Array | None,
    *,
    for_weights: bool = False,
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
    similarity: Any = None,
    normalizer: Any = None,
    layout: Any = "...HLD",
    logsumexp: bool = False,
    facts: Callable[[Any, str], ArrayFacts] = facts_of,
) -> tuple[Call, Operands]:
    """Return the facts of a call, its options checked one by one, and its operands.

    A part of an expression that has an option of its own is moved to the option, so that every
    kernel that supports the option supports it. `examine` checks the whole.
    """
    if not isinstance(layout, str) or layout not in ("...HLD", "...LHD"):
        raise ValueError(f'layout must be "...HLD" or "...LHD"; got {layout!r}')
    home = home_of(query)
    mask = at_home("mask", mask, home)
    bias = at_home("bias", bias, home)
    query_offset = at_home("query_offset", query_offset, home)
    sinks = at_home("sinks", sinks, home)
    if home is not None:
        score_mod = at_home("score_mod", score_mod, home)
        similarity = at_home("similarity", similarity, home)
    is_causal = is_causal if is_causal is False else check_bool("is_causal", is_causal)
    window = None if window is None else check_window(window)
    if isinstance(mask, Mask):
        mask, is_causal, window = _without_band(mask, is_causal, window)
    scale = scale if scale is None or isinstance(scale, ScaleRule) else check_finite("scale", scale)
    softcap = None if softcap is None else check_softcap(softcap)
    if isinstance(score_mod, Score):
        score_mod, softcap = _without_softcap(score_mod, softcap)
    _check_kind("similarity", similarity, Similarity, "scores.cosine()")
    _check_kind("normalizer", normalizer, Normalizer, "scores.sparsemax()")
    rate, seed, start = (0.0, None, FROM_ZERO) if dropout is None else check_dropout(dropout)
    if rate == 0:
        seed, start = None, FROM_ZERO
    starts_in_array = start is not FROM_ZERO and is_array(start)
    # By keyword to `__new__`: to the class itself it takes twice as long.
    call = Call.__new__(
        Call,
        query=facts(query, "query"),
        key=facts(key, "key"),
        value=None if for_weights else facts(value, "value"),
        mask=None if mask is None else _mask_facts(mask, facts),
        bias=None if bias is None else facts(bias, "bias"),
        is_causal=is_causal,
        window=window,
        query_offset=None if query_offset is None else check_offset(query_offset, facts),
        scale=scale,
        softcap=softcap,
        score_mod=None if score_mod is None else _score_facts(score_mod, facts),
        sinks=None if sinks is None else facts(sinks, "sinks"),
        dropout=rate,
        seed=facts(seed, "dropout's seed") if is_array(seed) else None,
        dropout_start=facts(start, "dropout's start") if starts_in_array else start,
        similarity=None if similarity is None else similarity.spec(facts),
        normalizer=normalizer,
        layout=layout,
        logsumexp=logsumexp,
        transforms=torch_transforms(),
    )
    operands = Operands.__new__(
        Operands,
        query=query,
        key=key,
        value=value,
        mask=mask,
        bias=bias,
        query_offset=query_offset,
        score_mod=score_mod,
        sinks=sinks,
        similarity=similarity,
        seed=seed,
        dropout_start=start if starts_in_array else None,
    )
    if call.query.traced and query_offset is None:
        call = call._replace(query_offset=_known_offset(query, key, layout))
    return call, operands


def _known_offset(query: Array, key: Array, layout: str) -> int | None:
    """Return the offset S − L, 0, of lengths that an export leaves open as the same symbol."""
    if min(len(query.shape), len(key.shape)) < 2:
        return None
    one, other = (axes_of(array.shape, layout)[2] for array in (query, key))
    is_open = one is not None and not isinstance(one, int)
    return 0 if is_open and are_one_length(one, other) else None


def at_home(name: str, given: Any, home: Home | None) -> Any:
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


def _mask_facts(mask: Any, facts: Callable[[Any, str], ArrayFacts]) -> Any:
    if isinstance(mask, Mask):
        for _, thing in mask.carried():
            if not is_array(thing):
                check_signature("the mask function", thing, "b, h, i, j")
        return mask.spec(facts)
    _check_place("mask", mask)
    if isinstance(mask, str):
        raise TypeError(
            f"mask must be an array, a function, or an expression of polyattn.masks; {got(mask)}"
        )
    if not callable(mask):
        return facts(mask, "mask")
    check_signature("the mask function", mask, "b, h, i, j")
    return "function"


def _score_facts(score_mod: Any, facts: Callable[[Any, str], ArrayFacts]) -> Any:
    if not isinstance(score_mod, Score):
        _check_place("score_mod", score_mod)
    if not callable(score_mod):
        raise TypeError(
            "score_mod must be a function (score, b, h, i, j) -> score, or an expression of"
            f" polyattn.scores; {got(score_mod)}"
        )
    if not isinstance(score_mod, Score):
        check_signature("score_mod", score_mod, "score, b, h, i, j")
        return "function"
    for name, thing in score_mod.carried():
        if not is_array(thing):
            of = "the derivative of score_mod" if name == "derivative" else "score_mod"
            check_signature(of, thing, "score, b, h, i, j")
    return score_mod.spec(facts)


def _check_place(name: str, given: Any) -> None:
    """Raise if an expression belongs in another argument."""
    if isinstance(given, Expression):
        place = next(place for kind, place in _PLACES.items() if isinstance(given, kind))
        raise TypeError(f"{given!r} goes in {place}=, not in {name}=")


_PLACES = {
    Mask: "mask",
    Score: "score_mod",
    Similarity: "similarity",
    ScaleRule: "scale",
    Normalizer: "normalizer",
}


def _check_kind(name: str, given: Any, kind: type, example: str) -> None:
    if given is not None and not isinstance(given, kind):
        raise TypeError(
            f"{name} must be an expression of polyattn.scores such as {example}; {got(given)}"
        )


def _without_band(
    mask: Mask, is_causal: bool, window: WindowSize | None
) -> tuple[Any, bool, WindowSize | None]:
    """Move causal and window out of a mask to their options, and simplify the rest."""
    rest: list[Mask] = []
    for part in mask.parts if isinstance(mask, And) else (mask,):
        if not isinstance(part, Band):
            rest.append(part)
        elif part == Band(None, 0):
            is_causal = True
        else:
            band = part if window is None else part.intersection(Band(*window))
            window = band.left, band.right
    if len(rest) > 1:
        return And(tuple(rest)), is_causal, window
    only = rest[0] if rest else None
    if isinstance(only, Dense):
        return only.array, is_causal, window
    return only.function if isinstance(only, Rule) else only, is_causal, window


def _without_softcap(score: Score, softcap: float | None) -> tuple[Any, float | None]:
    """Move a leading softcap to its option, and take a single function out of its expression.

    A function with a derivative stays: only the expression has both.
    """
    parts = score.parts if isinstance(score, Chain) else (score,)
    first = parts[0]
    if softcap is None and isinstance(first, Softcap):
        parts, softcap = parts[1:], first.cap
    if not parts:
        return None, softcap
    if len(parts) > 1:
        return Chain(parts), softcap
    only = parts[0]
    if isinstance(only, Function) and only.derivative is None:
        return only.rule, softcap
    return only, softcap
