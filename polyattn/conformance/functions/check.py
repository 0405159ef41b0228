"""Check any function with the signature of torch's SDPA: where it differs, and by how much.

A result that differs is compared with the other meanings of `interpretations`.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from polyattn._base.arguments import did_you_mean
from polyattn._core.call.parts import arrays_in
from polyattn.conformance.cases.cache_cases import Arguments, of_item
from polyattn.conformance.cases.case import Case, bits, with_arrays
from polyattn.conformance.checks.target import Target
from polyattn.conformance.functions.interpretations import Options, interpret
from polyattn.conformance.functions.serving import Function, NoArgumentError
from polyattn.conformance.functions.signatures import in_our_words
from polyattn.conformance.reference.oracle import Array
from polyattn.conformance.reference.tolerance import Deviation, deviation, output_yardstick

__all__ = [
    "AGREES",
    "DIFFERS",
    "NO_ARGUMENT",
    "RAISES",
    "Finding",
    "NoArgumentError",
    "arguments_for",
    "check_callable",
    "load",
    "target_of",
]
__dir__ = __all__.copy

AGREES, DIFFERS, RAISES, NO_ARGUMENT = "agrees", "differs", "raises", "no argument"


class Finding(NamedTuple):
    """The result of a case.

    Attributes
    ----------
    status : str
        ``agrees``, ``differs``, ``raises`` or ``no argument``.
    deviation : Deviation or None
        The error of the output; None if there is no output.
    error : str
        The type and the first line of the error that was raised.
    missing : str
        The options that the function has no argument for.
    interpretation : str
        The other meaning that a differing result agrees with; empty if none was found.
    remark : str
        What else is to say of a result, such as that parts by themselves have other bits.
    """

    status: str
    deviation: Deviation | None = None
    error: str = ""
    missing: str = ""
    interpretation: str = ""
    remark: str = ""


def load(spec: str) -> Function:
    """Return a function by its name.

    Parameters
    ----------
    spec : str
        ``"module:function"``.

    Returns
    -------
    callable

    Raises
    ------
    ValueError
        If it has another form, or there is no such function.

    Examples
    --------
    >>> from polyattn.conformance.functions.check import load
    >>> load("polyattn.dialects:scaled_dot_product_attention").__name__
    'scaled_dot_product_attention'
    """
    example = "torch.nn.functional:scaled_dot_product_attention"
    refusal = f'a function is written "module:function", such as "{example}"; got {spec!r}'
    module, _, name = spec.partition(":")
    if not module or not name:
        raise ValueError(refusal)
    try:
        function: Any = importlib.import_module(module)
    except (ImportError, TypeError) as error:  # TypeError: a relative name
        hint = "; leave out the .py" if module.endswith(".py") else ""
        raise ValueError(f"the module {module!r} cannot be imported: {error}{hint}") from error
    try:
        function = functools.reduce(getattr, name.split("."), function)
    except AttributeError as error:
        near = did_you_mean(name, dir(function))
        raise ValueError(f"the module {module!r} has no {name!r}{near}") from error
    if not callable(function):
        raise ValueError(f"{spec!r} is not a function; it is {function!r:.80}")
    return function  # type: ignore[no-any-return]


def target_of(spec: str, library: str | None) -> Target:
    """Return the target that makes the arrays for a function.

    Parameters
    ----------
    spec : str
        The function, as for `load`.
    library : str or None
        The module that makes the arrays, or a backend and its device, such as ``"torch:cuda"``;
        None for the function's own library, or NumPy.

    Returns
    -------
    Target
        Converts NumPy arrays to the library and back.
    """
    root = spec.partition(":")[0].partition(".")[0]
    if library and ":" in library:
        return Target(library)
    known = {"jax": "jax.numpy"} | dict.fromkeys(_ON_TENSORS, "torch")
    return Target("array-api", library or known.get(root, "numpy"))


_ON_TENSORS = (
    *("flash_attn", "flash_attn_interface", "flashinfer"),
    *("torch", "transformers", "xformers"),
)
#: The parameters of torch's function, which has no signature to inspect.
_OF_TORCH = frozenset(["attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"])


def _parameters(function: Function) -> tuple[frozenset[str], bool]:
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
    options go to ``**kwargs``.

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
    names, others = _parameters(function)
    left = dict(options)
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


def _needed(function: Function, case: Case, options: Options) -> Options:
    """Return the options without those that change nothing and have no parameter."""
    names, others = _parameters(function)
    return {
        name: option
        for name, option in options.items()
        if others
        or name in names
        or name == "layout"
        or not case.features.isdisjoint(_FEATURES_OF.get(name, (name,)))
    }


def check_callable(
    function: Function, case: Case, to: Callable[[Any], Any], back: Callable[[Any], Any]
) -> Finding:
    """Check a function with a case.

    Parameters
    ----------
    function : callable
        A function of query, key and value, with options named as in torch's
        `scaled_dot_product_attention` or in `polyattn.attention`, see `arguments_for`; or one with
        a signature of another library: `jax.nn`'s or Keras' `dot_product_attention`, xformers'
        `memory_efficient_attention`, MLX's `scaled_dot_product_attention`, FlashAttention's
        `flash_attn_func`, `flash_attn_varlen_func` or `flash_attn_with_kvcache`, torch's
        `varlen_attn`, FlashInfer's `single_decode_with_kv_cache` or
        `BatchDecodeWithPagedKVCacheWrapper`, JAX's `paged_attention` of Pallas, transformers'
        `sdpa_attention_forward`, or the inputs and attributes of ONNX Runtime's
        GroupQueryAttention.
    case : Case
        The call.
    to : callable
        Converts a NumPy array to the library of the function.
    back : callable
        The inverse.

    Returns
    -------
    Finding

    Raises
    ------
    ValueError
        If the case has dropout.

    Examples
    --------
    >>> import numpy as np
    >>> from polyattn.conformance import CASES
    >>> from polyattn.conformance.functions.check import check_callable
    >>> from polyattn.dialects import scaled_dot_product_attention as sdpa
    >>> finding = check_callable(sdpa, CASES["causal x L < S"], np.asarray, np.asarray)
    >>> finding.status, finding.interpretation
    ('differs', 'rows count from the first key (query_offset=0)')
    """
    if "dropout" in case.features:
        raise ValueError(f"{case}: other functions draw different dropout masks")
    try:
        output, is_written = _run(in_our_words(function), case, case.arguments(), to, back)
    except Exception as error:
        return _failed(error)
    return _judge(case, output, is_written)


def check_parts(
    function: Function, case: Case, to: Callable[[Any], Any], back: Callable[[Any], Any],
    part: Callable[[Arguments, int], Arguments],
) -> Finding:  # fmt: skip
    """Check a function with the items or the rows of a case, each in a call by itself."""
    arguments, function = case.arguments(), in_our_words(function)
    count, axis = (case.batch[0], 0) if part is of_item else (case.L, -2)
    try:
        whole, _ = _run(function, case, arguments, to, back)
        parts = [_run(function, case, part(arguments, n), to, back)[0] for n in range(count)]
    except Exception as error:
        return _failed(error)
    joined = np.concatenate(parts, axis)
    remark = "" if bits(joined) == bits(whole) else "other bits than together"
    return _judge(case, joined, False)._replace(remark=remark)


def _run(
    function: Function, case: Case, arguments: Arguments, to: Callable[[Any], Any],
    back: Callable[[Any], Any],
) -> tuple[Array, bool]:  # fmt: skip
    """Return the output of a function, and whether it wrote to an argument."""
    arrays, options = arguments
    options = _needed(function, case, options)
    options = arguments_for(function, options, grouped="grouped_heads" in case.features)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        inputs = [to(x) for x in arrays]
        keywords = {name: with_arrays(option, to) for name, option in options.items()}
        held = inputs + [x for option in keywords.values() for x in arrays_in(option)]
        before = [bits(back(x)) for x in held]
        output = np.array(back(function(*inputs, **keywords)))
        return output, before != [bits(back(x)) for x in held]


def _failed(error: Exception) -> Finding:
    if isinstance(error, NoArgumentError):
        return Finding(NO_ARGUMENT, missing=str(error))
    line = next(iter(str(error).strip().splitlines()), "")
    return Finding(RAISES, error=f"{type(error).__name__}: {line}")


def _judge(case: Case, output: Array, written: bool) -> Finding:
    yard = output_yardstick(case)
    off = deviation(output, yard, f"{case}: output")
    wrong = ["an input is written to"] if written else []
    if output.dtype != case.dtype:
        wrong.append(f"the output is {output.dtype}")
    if yard.of(output).shape != yard.exact.shape:
        wrong.append("the output has another shape")
    elif off.fault is not None:
        wrong.append(interpret(case, output))
    if not wrong:
        return Finding(AGREES, off)
    return Finding(DIFFERS, off, interpretation="; ".join(filter(None, wrong)))
