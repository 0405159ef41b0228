"""Call functions by the names of `polyattn.attention`: their own, torch's or a dialect's."""

from __future__ import annotations

import functools
import inspect
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from polyattn._base.arrays import Array, library_of, numbers_like
from polyattn.dialects._names import NAMES, Names

Function = Callable[..., Any]
Options = dict[str, Any]
#: The parameters by which functions are asked for the logsumexp, beside the output.
RETURNS_LOGSUMEXP = frozenset(
    ("return_attn_probs", "return_softmax_lse", "return_lse", "return_residual")
)
#: The parameters of torch's function, which has no signature to inspect.
_OF_TORCH = frozenset(["attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"])


class NoArgumentError(Exception):
    """Raised for an option that a function has no argument for."""


def parameters_of(function: Function) -> tuple[frozenset[str], bool]:
    """Return the parameters of a function, and whether it has ``**kwargs``."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return _OF_TORCH, False
    by_name = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return frozenset(by_name), any(p.kind == p.VAR_KEYWORD for p in parameters)


def arguments_for(function: Function, options: Options, *, grouped: bool = False) -> Options:
    """Return options of `polyattn.attention` as the keyword arguments of a function.

    An option goes to the parameter with its name. A mask array and a bias without such a parameter
    go to `attn_mask`; both together become the bias, -inf where the mask is False. The other
    options go to ``**kwargs``. A mask that is a function goes to `mask` only beside a `score_mod`:
    elsewhere that is an array.

    Parameters
    ----------
    function : callable
        The function.
    options : dict
        The options.
    grouped : bool
        Whether `enable_gqa` is needed: there are fewer key/value heads than query heads.

    Returns
    -------
    dict

    Raises
    ------
    NoArgumentError
        If there is no parameter for an option; the message names all such options.
    """
    names, others = parameters_of(function)
    left = dict(options)
    if callable(left.get("mask")) and "mask" in names and "score_mod" not in names:
        names, others = names - {"mask"}, False
    keywords = {name: left.pop(name) for name in options if name in names}
    if "attn_mask" in names:
        mask = None if callable(left.get("mask")) else left.pop("mask", None)
        bias = left.pop("bias", None)
        if mask is not None and bias is not None:
            keywords["attn_mask"] = np.where(mask, bias, np.asarray(-np.inf, bias.dtype))
        elif mask is not None or bias is not None:
            keywords["attn_mask"] = bias if mask is None else mask
    if left and not others:
        function_of = {"mask": "mask as a function"} if callable(left.get("mask")) else {}
        raise NoArgumentError(", ".join(function_of.get(name, name) for name in left))
    if grouped and "enable_gqa" in names:
        keywords["enable_gqa"] = True
    return keywords | left


#: The features that an option can require, where their names differ.
_FEATURES_OF = {
    "is_causal": ("causal",),
    "mask": ("mask", "mask_mod", "mask_expression"),
    "query_offset": ("query_offset", "query_offset_array"),
    "key_lengths": ("mask_expression",),
    "scale": ("scale", "score_norm"),
    "score_mod": ("score_mod", "score_expression"),
}


def without_idle(function: Function, features: frozenset[str], options: Options) -> Options:
    """Return the options without those that change nothing and have no parameter."""
    names, others = parameters_of(function)
    return {
        name: option
        for name, option in options.items()
        if others
        or name in names
        or name == "layout"
        or not features.isdisjoint(_FEATURES_OF.get(name, (name,)))
    }


def in_our_words(function: Function) -> Function:
    """Return a function that takes our names, if this one has a signature of another library."""
    try:
        given = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return function
    names = next((n for n in NAMES.values() if n.marks <= given.keys()), None)
    if names is None:
        return function
    options = {ours: theirs for ours, theirs in names.options.items() if theirs in given}
    options |= {name: name for name in RETURNS_LOGSUMEXP & given.keys()}
    names = names._replace(options=options)
    call = functools.partial(_call, function, names, frozenset(given))
    ours = ["query", "key", "value", "layout", *options]
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(name, kind) for name in ours]
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return call


def _call(
    function: Function, names: Names, known: frozenset[str], *arrays: Array,
    layout: str = "...HLD", **options: Any,
) -> Any:  # fmt: skip
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
        output = _call_packed(function, inputs, lengths, given, known)
    else:
        output = function(*inputs, **given)
    output, *others = output if isinstance(output, tuple) else (output,)
    if names.packed:
        output = xp.reshape(output, (*inputs[0].shape[:2], *output.shape[1:]))
    return (turned(output), *others) if others else turned(output)


def _call_packed(
    function: Function, arrays: Sequence[Array], lengths: Any, given: Options, known: frozenset[str]
) -> Any:
    """Call a function of packed sequences with a batch, (B, L, H, D)."""
    q, k, v = arrays
    xp, (B, L) = library_of(q).xp, q.shape[:2]  # noqa: N806 -- the letters of the semantics
    ends = k.shape[1] if lengths is None else lengths
    numbers = [ends] * B if isinstance(ends, int) else [int(ends[n]) for n in range(B)]

    def integers(numbers: Sequence[int]) -> Array:
        return numbers_like(xp, list(numbers), xp.int32, q)

    if given.get("block_table") is not None:
        if "seqused_k" in known:
            given["seqused_k"] = integers(numbers)
    elif B:
        k, v = (xp.concat([x[n, :end, ...] for n, end in enumerate(numbers)]) for x in (k, v))
    else:
        k, v = (xp.reshape(x, (0, *x.shape[2:])) for x in (k, v))
    starts = (integers(list(itertools.accumulate(x, initial=0))) for x in ([L] * B, numbers))
    flat = xp.reshape(q, (B * L, *q.shape[2:]))
    return function(flat, k, v, *starts, L, max(numbers, default=0), **given)


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
