"""Call functions with the signatures of the dialects by the names of `polyattn.attention`."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

from polyattn._base.arrays import Array, library_of
from polyattn.dialects._names import NAMES, Names

Function = Callable[..., Any]


class NoArgumentError(Exception):
    """Raised by an adapter whose function has no argument for an option."""


def in_our_words(function: Function) -> Function:
    """Return a function that takes our names, if this one has a signature of another library."""
    try:
        given = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return function
    names = next((n for n in NAMES.values() if n.marks <= given.keys()), None)
    if names is None or "cu_seqlens_q" in given or "k_cache" in given:
        return function
    call = functools.partial(_call, function, names)
    ours = ["query", "key", "value", "layout", *names.options]
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(name, kind) for name in ours]
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return call


def _call(
    function: Function, names: Names, *arrays: Array, layout: str = "...HLD", **options: Any
) -> Array:
    if any(len(x.shape) != 4 for x in arrays):
        raise NoArgumentError("arrays of another rank than 4")
    if callable(options.get("mask")):
        raise NoArgumentError("mask as a function")
    if options.pop("is_causal", False):
        if names.options["is_causal"] in (names.options[name] for name in options):
            raise NoArgumentError("is_causal beside a mask")
        options["is_causal"] = names.causal
    xp = library_of(arrays[0]).xp
    is_first = layout == "...LHD"

    def turned(x: Array) -> Array:
        return x if is_first == names.length_first else xp.permute_dims(x, (0, 2, 1, 3))

    given = {names.options[name]: option for name, option in options.items()}
    if "window" in options:
        ends = [names.no_bound if end is None else end for end in options["window"]]
        given[names.options["window"]] = tuple(ends)
    if names is NAMES["mlx"]:
        given.setdefault("scale", 1 / math.sqrt(arrays[0].shape[-1]))
    bias = given.get("attn_bias")
    if bias is not None:
        q, k = (turned(x) for x in arrays[:2])
        shape = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
        if bias.dtype == xp.bool:
            zero = xp.zeros_like(arrays[0][..., :1, :1, :1])[0, 0, 0, 0]
            bias = xp.where(bias, zero, zero - math.inf)
        given["attn_bias"] = xp.broadcast_to(bias, shape)
    output = function(*(turned(x) for x in arrays), **given)
    return turned(output[0] if isinstance(output, tuple) else output)
