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
from polyattn._base.arrays import facts_of
from polyattn._core.call.parts import arrays_in
from polyattn.conformance.cases.cache_cases import Arguments, of_item
from polyattn.conformance.cases.case import ARRAYS, Case, bits, with_arrays
from polyattn.conformance.checks.autodiff import VJP, gradients_of
from polyattn.conformance.checks.target import Target
from polyattn.conformance.functions.interpretations import interpret
from polyattn.conformance.functions.signatures import (
    RETURNS_LOGSUMEXP,
    Function,
    NoArgumentError,
    arguments_for,
    in_our_words,
    parameters_of,
    without_idle,
)
from polyattn.conformance.reference.gradients import cotangent, gradient_yardsticks
from polyattn.conformance.reference.oracle import Array
from polyattn.conformance.reference.tolerance import (
    Deviation,
    Yardstick,
    deviation,
    logsumexp_yardstick,
    output_yardstick,
)

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
RETURNS = "it returns a tuple of"
Convert = Callable[[Any], Any]


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
        A remark about the result, such as that it is a tuple.
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
    except (Exception, SystemExit) as error:  # it may raise anything, and call sys.exit
        why = text_of(error) + "; leave out the .py" * module.endswith(".py")
        raise ValueError(f"the module {module!r} cannot be imported: {why}") from error
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
    of_tensors = "flash_attn flash_attn_interface torch transformers xformers"
    known = {"jax": "jax.numpy"} | dict.fromkeys(of_tensors.split(), "torch")
    return Target("array-api", library or known.get(root, "numpy"))


def check_callable(function: Function, case: Case, to: Convert, back: Convert) -> Finding:
    """Check a function with a case.

    Parameters
    ----------
    function : callable
        A function of query, key and value, with options named as in torch's
        `scaled_dot_product_attention` or in `polyattn.attention`, see `arguments_for`; or one with
        the signature of a dialect.
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
    ran = run_function(in_our_words(function), case, case.arguments(), to, back)
    if isinstance(ran, Finding):
        return ran
    return _judge(case, ran.output, output_yardstick, ran.wrong)._replace(remark=ran.remark)


def check_logsumexp(function: Function, case: Case, to: Convert, back: Convert) -> Finding:
    """Check the logsumexp of a function, the second of the tuple that it returns when asked."""
    function = in_our_words(function)
    asked = RETURNS_LOGSUMEXP & parameters_of(function)[0]
    ran = run_function(function, case, case.arguments(), to, back, dict.fromkeys(asked, True))
    if isinstance(ran, Finding) and (asked or ran.status != RAISES):
        return ran
    if isinstance(ran, Finding) or ran.logsumexp is None:
        return Finding(NO_ARGUMENT, missing="logsumexp")
    logsumexp = _with_heads_first(ran.logsumexp, case)
    readings = {
        "the logsumexp is in base 2": logsumexp * np.log(2.0),
        "the logsumexp of a row without keys is inf": np.where(
            logsumexp == np.inf, -np.inf, logsumexp
        ),
    }
    return _judge(case, logsumexp, logsumexp_yardstick, readings=readings)


def _with_heads_first(x: Array, case: Case) -> Array:
    """Return a logsumexp (B, H, L), of (B, L, H) or of packed sequences (H, B L)."""
    B, H, L = *case.batch, case.H, case.L  # noqa: N806
    if x.shape == (B, L, H):
        return np.swapaxes(x, 1, 2)
    return np.swapaxes(x.reshape(H, B, L), 0, 1) if x.shape == (H, B * L) else x


def has_gradients(to: Convert) -> bool:
    """Return whether the library that `to` converts an array to can differentiate."""
    return facts_of(to(np.ones((1, 1), "float32"))).library in VJP


def check_gradients(function: Function, case: Case, to: Convert, back: Convert) -> Finding:
    """Check the gradients of a function by query, key, value, bias and sinks."""
    function = in_our_words(function)
    try:
        arrays, keywords = given(function, case, case.arguments(), to)
        inputs = dict(zip(ARRAYS, arrays, strict=True))
        options = {"bias": "bias" if "bias" in keywords else "attn_mask", "sinks": "sinks"}
        yards = gradient_yardsticks(case)
        inputs |= {name: keywords.pop(options[name]) for name in options if name in yards}

        def call(query: Any, key: Any, value: Any, **named: Any) -> Any:
            others = {options[name]: x for name, x in named.items()}
            output = function(query, key, value, **keywords, **others)
            return output[0] if isinstance(output, (tuple, list)) else output

        gradients = gradients_of(call, inputs, to(cotangent(case)))
        results = {name: back(x) for name, x in gradients.items()}
    except NoArgumentError as error:
        return Finding(NO_ARGUMENT, missing=str(error))
    except (Exception, SystemExit) as error:
        return Finding(RAISES, error=text_of(error))
    off = {name: deviation(x, yards[name], f"{case}: {name}") for name, x in results.items()}
    wrong = [name for name, one in off.items() if one.fault is not None]
    worst = max(off.values(), key=lambda one: one.share)
    meaning = f"by {', '.join(wrong)}" if wrong else ""
    return Finding(DIFFERS if wrong else AGREES, worst, interpretation=meaning)


def check_parts(
    function: Function, case: Case, to: Convert, back: Convert,
    part: Callable[[Arguments, int], Arguments],
) -> Finding:  # fmt: skip
    """Check a function with the items or the rows of a case, each in a call by itself."""
    arguments, function = case.arguments(), in_our_words(function)
    count, axis = (case.batch[0], 0) if part is of_item else (case.L, -2)
    outputs = []
    for given in (arguments, *(part(arguments, n) for n in range(count))):
        ran = run_function(function, case, given, to, back)
        if isinstance(ran, Finding):
            return ran
        outputs.append(ran.output)
    try:
        joined = np.concatenate(outputs[1:], axis)
    except ValueError:
        return Finding(RAISES, error="ValueError: the outputs of the parts do not fit together")
    remark = "" if bits(joined) == bits(outputs[0]) else "other bits than together"
    return _judge(case, joined, output_yardstick)._replace(remark=remark)


class _Ran(NamedTuple):
    """The results of a function, as arrays of NumPy."""

    output: Array
    logsumexp: Array | None
    wrong: tuple[str, ...]  # faults other than the numbers
    remark: str


def run_function(
    function: Function, case: Case, arguments: Arguments, to: Convert, back: Convert,
    others: dict[str, Any] | None = None,
) -> _Ran | Finding:  # fmt: skip
    """Run a function, perhaps with other options; return a finding if there is no output."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            inputs, keywords = given(function, case, arguments, to)
            keywords |= others or {}
            held = inputs + [x for option in keywords.values() for x in arrays_in(option)]
            before = [bits(back(x)) for x in held]
            returned = function(*inputs, **keywords)
            many = isinstance(returned, (tuple, list)) and len(returned)
            first, second, *_ = (*returned, None) if many else (returned, None)
            output = _as_array(first, back)
            logsumexp = _as_array(second, back) if hasattr(second, "shape") else None
            wrong = ["an input is written to"] * (before != [bits(back(x)) for x in held])
    except NoArgumentError as error:
        return Finding(NO_ARGUMENT, missing=str(error))
    except (Exception, SystemExit) as error:
        return Finding(RAISES, error=text_of(error))
    wrong += [f"the output is {output.dtype}"] * (output.dtype != case.dtype)
    remark = f"{RETURNS} {many}" if many else ""
    return _Ran(output, logsumexp, tuple(wrong), remark)


def given(
    function: Function, case: Case, arguments: Arguments, to: Convert
) -> tuple[list[Any], dict[str, Any]]:
    """Return query, key and value and the keyword arguments of a function in its library."""
    arrays, options = arguments
    options = without_idle(function, case.features, options)
    options = arguments_for(function, options, grouped="grouped_heads" in case.features)
    inputs = [to(x) for x in arrays]
    return inputs, {name: with_arrays(option, to) for name, option in options.items()}


def _as_array(returned: Any, back: Convert) -> Array:
    """Return a result as an array of NumPy; raise if it is not an array."""
    if not hasattr(returned, "shape"):
        if inspect.iscoroutine(returned):
            returned.close()  # it would warn that nobody awaits it
        what = "None" if returned is None else f"a value of type {type(returned).__name__}"
        raise TypeError(f"it returns {what}, and not an array")
    array = np.array(back(returned))
    if array.dtype.kind in "OSU":
        raise TypeError(f"it returns an array of {array.dtype}")
    return array


def text_of(error: BaseException) -> str:
    """Return the type and first line of an error, or what sys.exit was called with."""
    if isinstance(error, SystemExit):
        return f"SystemExit: it calls sys.exit({error.code!r})"
    line = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {line}"


def _judge(
    case: Case, result: Array, yardstick: Callable[..., Yardstick], wrong: tuple[str, ...] = (),
    readings: dict[str, Array] | None = None,
) -> Finding:  # fmt: skip
    """Return the finding of a result; `readings` are the same in other words, by what they say."""
    yard, what = yardstick(case), "logsumexp" if readings else "output"
    off = deviation(result, yard, f"{case}: {what}")
    if yard.of(result).shape != yard.exact.shape:
        wrong = (*wrong, f"the {what} has another shape")
    elif off.fault is not None:
        read = (n for n, x in (readings or {}).items() if deviation(x, yard, "").fault is None)
        wrong = (*wrong, next(read, "") or interpret(case, result, yardstick))
    meaning = "; ".join(filter(None, wrong))
    return Finding(DIFFERS if wrong else AGREES, off, interpretation=meaning)
