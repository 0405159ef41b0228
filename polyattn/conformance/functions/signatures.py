"""Call functions with the signatures of the dialects by the names of `polyattn.attention`."""

from __future__ import annotations

import functools
import inspect
import math
from typing import Any

from polyattn._base.arrays import Array, library_of
from polyattn.conformance.functions.serving import ADAPTERS, Function, NoArgumentError, packed
from polyattn.dialects._names import NAMES, Names


def in_our_words(function: Function) -> Function:
    """Return a function that takes our names, if this one has a signature of another library.

    Of a class with `plan` and `run`, the first has the signature.
    """
    try:
        given = inspect.signature(getattr(function, "plan", function)).parameters
    except (TypeError, ValueError):
        return function
    for marks, adapter in ADAPTERS.items():
        if marks <= given.keys():
            return functools.partial(adapter, function)
    names = next((n for n in NAMES.values() if n.marks <= given.keys()), None)
    if names is None:
        return function
    names = names._replace(options={o: n for o, n in names.options.items() if n in given})
    call = functools.partial(_call, function, names, frozenset(given))
    ours = ["query", "key", "value", "layout", *names.options]
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(name, kind) for name in ours]
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return call


def _call(
    function: Function, names: Names, known: frozenset[str], *arrays: Array,
    layout: str = "...HLD", **options: Any,
) -> Array:  # fmt: skip
    if any(len(x.shape) != 4 for x in arrays):
        raise NoArgumentError("arrays of another rank than 4")
    if callable(options.get("mask")):
        raise NoArgumentError("mask as a function")
    if options.pop("is_causal", False):
        options |= _causal(names, options)
    xp = library_of(arrays[0]).xp
    is_first = layout == "...LHD"

    def turned(x: Array) -> Array:
        return x if is_first == names.length_first else xp.permute_dims(x, (0, 2, 1, 3))

    lengths = options.pop("key_lengths", None) if names.packed else None
    given = {names.options[name]: option for name, option in options.items()}
    if "window" in options:
        ends = [names.no_bound if end is None else end for end in options["window"]]
        given[names.options["window"]] = tuple(ends)
    if "force_fused" in names.marks:
        given.setdefault("scale", 1 / math.sqrt(arrays[0].shape[-1]))
    inputs = [turned(x) for x in arrays]
    if given.get("attn_bias") is not None:
        given["attn_bias"] = _as_bias(given["attn_bias"], *inputs[:2])
    if "enable_gqa" in known:
        given["enable_gqa"] = inputs[0].shape[-2] != inputs[1].shape[-2]
    if names.packed:
        return turned(packed(function, inputs, lengths, given, known))
    output = function(*inputs, **given)
    return turned(output[0] if isinstance(output, tuple) else output)


def _causal(names: Names, options: dict[str, Any]) -> dict[str, Any]:
    """Return the option that makes a call causal."""
    name = names.options["is_causal"]
    if name == names.options.get("window"):
        left, right = options.get("window") or (None, None)
        return {"window": (left, 0 if right is None else min(right, 0))}
    if name in (names.options[other] for other in options):
        raise NoArgumentError("is_causal beside a mask")
    return {"is_causal": names.causal}


def _as_bias(bias: Array, q: Array, k: Array) -> Array:
    """Return a mask or bias as numbers with all axes, (B, H, L, S), of arrays (B, L, H, D)."""
    xp = library_of(q).xp
    if bias.dtype == xp.bool:
        zero = xp.zeros_like(q[..., :1, :1, :1])[0, 0, 0, 0]
        bias = xp.where(bias, zero, zero - math.inf)
    return xp.broadcast_to(bias, (q.shape[0], q.shape[2], q.shape[1], k.shape[1]))
