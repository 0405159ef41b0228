"""Any function of the shape of torch's SDPA, held to the cases: where it departs, and how far.

A departure is read: another meaning of a case is a call that, by ours, gives what the function
gives. The oracle and the textbook formula evaluate that call, so that every meaning is held to a
yardstick of its own.
"""

# ruff: noqa: N806 -- the letters are those of the semantics

from __future__ import annotations

import functools
import importlib
import inspect
import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np

from polyattn.conformance.cases import TOPICS, Case
from polyattn.conformance.oracle import Array, heads_first, lift
from polyattn.conformance.tolerance import Deviation, deviation, output_yardstick
from polyattn.problem import DTYPES, FEATURES

__all__ = [
    "AGREES",
    "DIFFERS",
    "NO_ARGUMENT",
    "RAISES",
    "READINGS",
    "Finding",
    "NoArgumentError",
    "Reading",
    "Row",
    "arguments_for",
    "check_callable",
    "load",
    "summarise",
]

AGREES, DIFFERS, RAISES, NO_ARGUMENT = "agrees", "differs", "raises", "no argument"

Function = Callable[..., Any]
Options = dict[str, Any]
Arguments = tuple[tuple[Array, Array, Array], Options]


class NoArgumentError(Exception):
    """Raised by an adapter that its function has no argument for what it was given."""


class Finding(NamedTuple):
    """What became of a case.

    Attributes
    ----------
    status : str
        ``agrees``, ``differs``, ``raises`` or ``no argument``.
    deviation : Deviation or None
        How far the output is off; None if there is none.
    error : str
        The type and the first line of what was raised.
    missing : str
        What there is no argument for.
    reading : str
        The other meaning that a result which differs agrees with; empty if none was found.
    """

    status: str
    deviation: Deviation | None = None
    error: str = ""
    missing: str = ""
    reading: str = ""


class Row(NamedTuple):
    """What became of the cases that show one thing.

    Attributes
    ----------
    kind : str
        ``feature``, ``arrays``, ``dtype`` or ``topic``.
    name : str
        Which of them.
    findings : dict of str to Finding
        By the names of the cases.
    """

    kind: str
    name: str
    findings: dict[str, Finding]

    def count(self, status: str) -> int:
        """Return how many cases have a status."""
        return sum(finding.status == status for finding in self.findings.values())

    @property
    def worst(self) -> float | None:
        """The largest error of those that ran, in units; None if none did."""
        units = [f.deviation.units for f in self.findings.values() if f.deviation is not None]
        return max(units, default=None)

    @property
    def readings(self) -> dict[str, int]:
        """How many of the cases that differ each reading explains, the empty one none of them."""
        return dict(Counter(f.reading for f in self.findings.values() if f.status == DIFFERS))


# ---- a function --------------------------------------------------------------------------------


def load(spec: str) -> Function:
    """Return a function by its name.

    Parameters
    ----------
    spec : str
        ``"module:function"``.

    Returns
    -------
    callable
        The function.

    Raises
    ------
    ValueError
        If it is written otherwise, or there is no such function.

    Examples
    --------
    >>> from polyattn.conformance.callables import load
    >>> load("polyattn.dialects:scaled_dot_product_attention").__name__
    'scaled_dot_product_attention'
    """
    example = "torch.nn.functional:scaled_dot_product_attention"
    refusal = f'a function is written "module:function", such as "{example}"; got {spec!r}'
    module, _, name = spec.partition(":")
    if not module or not name:
        raise ValueError(refusal)
    try:
        found: Any = importlib.import_module(module)
    except (ImportError, TypeError) as error:  # TypeError: a relative name
        raise ValueError(f"{refusal}, and {module!r} cannot be imported: {error}") from error
    try:
        found = functools.reduce(getattr, name.split("."), found)
    except AttributeError as error:
        raise ValueError(f"{refusal}, and {module!r} has no {name!r}") from error
    if not callable(found):
        kind = type(found).__name__
        raise ValueError(f"{refusal}, and {name!r} of {module!r} is no function but a {kind}")
    return found  # type: ignore[no-any-return]


#: What torch's function takes, which has no signature to inspect.
_OF_TORCH = frozenset(["attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"])


def _parameters(function: Function) -> tuple[frozenset[str], bool]:
    """The names that a function takes, and whether it takes any other."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return _OF_TORCH, False
    by_name = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return frozenset(by_name), any(p.kind == p.VAR_KEYWORD for p in parameters)


def arguments_for(function: Function, options: Options, *, grouped: bool = False) -> Options:
    """Return the options of a call of `polyattn.attention` as a function takes them.

    An option goes to the parameter of its own name. A mask array and a bias without one go to
    `attn_mask`, together as the bias, -inf where the mask is False. What is left goes to
    ``**kwargs``.

    Parameters
    ----------
    function : callable
        The function.
    options : dict
        The options, arrays among them.
    grouped : bool
        Whether there are fewer key/value heads than query heads, which `enable_gqa` allows.

    Returns
    -------
    dict
        The keyword arguments.

    Raises
    ------
    NoArgumentError
        If an option is left over; it names all of them.
    """
    names, others = _parameters(function)
    left = dict(options)
    given = {name: left.pop(name) for name in options if name in names}
    if "attn_mask" in names:
        mask = None if callable(left.get("mask")) else left.pop("mask", None)
        bias = left.pop("bias", None)
        if mask is not None and bias is not None:
            given["attn_mask"] = np.where(mask, bias, np.asarray(-np.inf, bias.dtype))
        elif mask is not None or bias is not None:
            given["attn_mask"] = bias if mask is None else mask
    if left and not others:
        function_of = {"mask": "mask as a function"} if callable(left.get("mask")) else {}
        raise NoArgumentError(", ".join(function_of.get(name, name) for name in left))
    if grouped and "enable_gqa" in names:
        given["enable_gqa"] = True
    return given | left


#: The features that an option can make a call need, where they are not named as it is.
_FEATURES_OF = {
    "is_causal": ("causal",),
    "mask": ("mask", "mask_mod"),
    "query_offset": ("query_offset", "query_offset_array"),
}


def _asked(function: Function, case: Case, options: Options) -> Options:
    """The options, less those that ask for nothing and that the function has no parameter for."""
    names, others = _parameters(function)
    return {
        name: option
        for name, option in options.items()
        if others
        or name in names
        or name == "layout"
        or not case.features.isdisjoint(_FEATURES_OF.get(name, (name,)))
    }


# ---- a case ------------------------------------------------------------------------------------


def check_callable(
    function: Function, case: Case, to: Callable[[Any], Any], back: Callable[[Any], Any]
) -> Finding:
    """Hold a function to a case.

    Parameters
    ----------
    function : callable
        Takes query, key and value, and options by the names of torch's
        `scaled_dot_product_attention` or of `polyattn.attention`; see `arguments_for`.
    case : Case
        The call.
    to : callable
        Makes an array of the function's library of a NumPy array.
    back : callable
        The inverse.

    Returns
    -------
    Finding
        What became of it.

    Raises
    ------
    ValueError
        If the case is one of dropout.

    Examples
    --------
    >>> import numpy as np
    >>> from polyattn.conformance import CASES
    >>> from polyattn.conformance.callables import check_callable
    >>> from polyattn.dialects import scaled_dot_product_attention as sdpa
    >>> found = check_callable(sdpa, CASES["causal x L < S"], np.asarray, np.asarray)
    >>> found.status, found.reading
    ('differs', 'rows count from the first key (query_offset=0)')
    """
    if "dropout" in case.features:
        raise ValueError(f"{case}: what dropout draws is no function's to agree with")
    arrays, options = case.arguments()
    try:
        options = _asked(function, case, options)
        options = arguments_for(function, options, grouped="grouped_heads" in case.features)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            given = [to(x) for x in arrays]
            keywords = {n: to(x) if isinstance(x, np.ndarray) else x for n, x in options.items()}
            held = given + [keywords[n] for n, x in options.items() if isinstance(x, np.ndarray)]
            before = [_bits(back(x)) for x in held]
            output = np.array(back(function(*given, **keywords)))
            after = [_bits(back(x)) for x in held]
    except NoArgumentError as error:
        return Finding(NO_ARGUMENT, missing=str(error))
    except Exception as error:
        line = next(iter(str(error).strip().splitlines()), "")
        return Finding(RAISES, error=f"{type(error).__name__}: {line}")
    return _judge(case, output, after != before)


def _bits(x: Any) -> bytes:
    return np.ascontiguousarray(x).tobytes()


def _judge(case: Case, output: Array, written: bool) -> Finding:
    yard = output_yardstick(case, case.dtype)
    off = deviation(output, yard, f"{case}: output")
    wrong = ["an input is written to"] if written else []
    if output.dtype != case.dtype:
        wrong.append(f"the output is {output.dtype}")
    if output.shape != yard.exact.shape:
        wrong.append("the output has another shape")
    elif off.fault is not None:
        other = _read(case, output)
        if not other:
            return Finding(DIFFERS, off, reading="; ".join(wrong))
        wrong.append(other)
    return Finding(DIFFERS, off, reading="; ".join(wrong)) if wrong else Finding(AGREES, off)


# ---- other meanings ----------------------------------------------------------------------------


class Reading(NamedTuple):
    """Another meaning: the call that, by ours, gives what a call gives by it.

    Attributes
    ----------
    name : str
        The meaning, as a sentence.
    applies : callable
        Whether it makes anything else of a case than ours does.
    call : callable
        Takes the arguments of the case's call and returns those of the other one.
    dtype : str or None
        What it computes in; None for what the case is held to.
    """

    name: str
    applies: Callable[[Case], bool]
    call: Callable[[Arguments], Arguments] = lambda arguments: arguments
    dtype: str | None = None


@dataclass(frozen=True)
class _Reread(Case):
    """A case whose call is that of other meanings of it."""

    readings: tuple[Reading, ...] = ()

    def arguments(self, poisoned: bool = True) -> Arguments:
        arguments: Arguments = super().arguments(poisoned)
        for reading in self.readings:
            arguments = reading.call(arguments)
        return arguments


@np.errstate(all="ignore")
def _read(case: Case, output: Array) -> str:
    """The meanings, one or two of them, that a result agrees with."""
    those = [reading for reading in READINGS if reading.applies(case)]
    own = {field.name: getattr(case, field.name) for field in fields(case)}
    for readings in (*combinations(those, 1), *combinations(those, 2)):
        dtype = next((r.dtype for r in readings if r.dtype), case.dtype)
        yard = output_yardstick(_Reread(**own, readings=readings), dtype)
        if deviation(output, yard, "").fault is None:
            return " and ".join(reading.name for reading in readings)
    return ""


def _option(case: Case, name: str) -> Any:
    return dict(case.options).get(name)


def _changed(**options: Any) -> Callable[[Arguments], Arguments]:
    return lambda arguments: (arguments[0], arguments[1] | options)


def _lengths(arguments: Arguments) -> tuple[tuple[int, ...], int, int, int]:
    """The batch, H, L and S of a call."""
    (query, key, value), options = arguments
    layout = options.get("layout", "...HLD")
    q, k, v = (heads_first(x, layout).shape for x in (query, key, value))
    return np.broadcast_shapes(q[:-3], k[:-3], v[:-3]), q[-3], q[-2], k[-2]


def _spread(arguments: Arguments, x: Any) -> Array:
    """Broadcast to (batch, H, L, S), the batch flat, as functions of the indices see it."""
    batch, H, L, S = _lengths(arguments)
    return np.broadcast_to(x, (*batch, H, L, S)).reshape(math.prod(batch), H, L, S)


def _visible(arguments: Arguments) -> Array:
    """Which keys each row sees, (batch, H, L, S), by all but `score_mod`."""
    options = arguments[1]
    batch, H, L, S = _lengths(arguments)
    b, h, i, j = np.ogrid[: math.prod(batch), :H, :L, :S]
    offset = options.get("query_offset")
    position = i + np.broadcast_to(S - L if offset is None else offset, batch).reshape(-1, 1, 1, 1)
    left, right = options.get("window") or (None, None)
    seen: Array = np.ones((math.prod(batch), H, L, S), bool)
    if options.get("is_causal"):
        seen &= j <= position
    if left is not None:
        seen &= position - left <= j
    if right is not None:
        seen &= j <= position + right
    if (mask := options.get("mask")) is not None:
        seen &= mask(b, h, i, j) if callable(mask) else _spread(arguments, mask)
    if (bias := options.get("bias")) is not None:
        seen &= ~np.isneginf(lift(_spread(arguments, bias)))
    return seen


def _empty_rows(score: float) -> Callable[[Arguments], Arguments]:
    """Let rows without a key see all keys, but those of a bias of -inf if others are left."""

    def call(arguments: Arguments) -> Arguments:
        arrays, options = arguments
        seen, mod, bias = _visible(arguments), options.get("score_mod"), options.get("bias")
        empty: Array = ~np.any(seen, -1)
        left = seen if bias is None else ~np.isneginf(lift(_spread(arguments, bias)))
        seen |= empty[..., None] & (left | ~np.any(left, -1, keepdims=True))

        def score_mod(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
            s = s if mod is None else mod(s, b, h, i, j)
            return np.where(empty[b, h, i], np.asarray(score, s.dtype), s)

        changed: Options = {"mask": lambda *at: seen[at], "score_mod": score_mod}
        if bias is not None:
            batch, *ends = _lengths(arguments)
            bias = np.where(empty[..., None], np.asarray(0, bias.dtype), _spread(arguments, bias))
            changed["bias"] = bias.reshape(*batch, *ends)
        positions = {"is_causal": False, "window": None, "query_offset": None}
        return arrays, options | positions | changed

    return call


def _softcap_after_bias(arguments: Arguments) -> Arguments:
    arrays, options = arguments
    bias, c = _spread(arguments, options["bias"]), options["softcap"]

    def score_mod(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return c * np.tanh((s + bias[b, h, i, j].astype(s.dtype)) / c)

    return arrays, options | {"bias": None, "softcap": None, "score_mod": score_mod}


def _heads_in_turn(arguments: Arguments) -> Arguments:
    (query, key, value), options = arguments
    axis = -2 if options.get("layout") == "...LHD" else -3
    times = query.shape[axis] // key.shape[axis]
    key, value = (np.concatenate([x] * times, axis) for x in (key, value))
    return (query, key, value), options


def _mask_inverted(arguments: Arguments) -> Arguments:
    mask = arguments[1]["mask"]
    inverted = (lambda *at: np.logical_not(mask(*at))) if callable(mask) else ~mask
    return arguments[0], arguments[1] | {"mask": inverted}


def _mask_added(arguments: Arguments) -> Arguments:
    arrays, options = arguments
    bias, dtype = options.get("bias"), arrays[0].dtype
    bias = options["mask"].astype(dtype) + (np.asarray(0, dtype) if bias is None else bias)
    return arrays, options | {"mask": None, "bias": bias}


def _last_axis_padded(arguments: Arguments) -> Arguments:
    first = np.arange(_lengths(arguments)[-1]) == 0
    options: Options = {name: arguments[1].get(name) for name in ("mask", "bias")}
    if _is_one_key_wide(options["bias"]):
        hidden = np.asarray(-np.inf, options["bias"].dtype)
        options["bias"] = np.where(first, options["bias"], hidden)
    if _is_one_key_wide(options["mask"]):
        options["mask"] = options["mask"] & first
    return arguments[0], arguments[1] | options


def _is_one_key_wide(x: Any) -> bool:
    return isinstance(x, np.ndarray) and x.shape[-1] == 1


def _all_nan(arguments: Arguments) -> Arguments:
    return arguments[0], arguments[1] | {"score_mod": lambda s, *_: s * np.asarray(np.nan, s.dtype)}


def _float32_scale(root: bool) -> Callable[[Arguments], Arguments]:
    def call(arguments: Arguments) -> Arguments:
        arrays, options = arguments
        scale = options.get("scale")
        scale = 1 / np.sqrt(np.float32(arrays[0].shape[-1])) if scale is None else np.float32(scale)
        scale = float(np.sqrt(scale)) ** 2 if root else float(scale)
        return arrays, options | {"scale": scale}

    return call


def _windows() -> Iterable[Reading]:
    """The window, wider or narrower by one key."""
    ends = {"to the left": (1, 0), "to the right": (0, 1), "to either side": (1, 1)}
    for by, how in ((-1, "less"), (1, "more")):
        for where, (left, right) in ends.items():

            def applies(case: Case, left: int = left, right: int = right) -> bool:
                low, high = _option(case, "window") or (None, None)
                return not (left and low is None) and not (right and high is None)

            def call(arguments: Arguments, left: int = by * left, right: int = by * right) -> Any:
                low, high = arguments[1]["window"]
                low = None if low is None else low + left
                high = None if high is None else high + right
                return arguments[0], arguments[1] | {"window": (low, high)}

            yield Reading(f"a window reaches one key {how} {where}", applies, call)


def _ignored() -> Iterable[Reading]:
    """An option has no effect."""
    nothing = {"is_causal": False}
    names = ("is_causal", "window", "query_offset", "mask", "bias", "scale", "softcap")
    for name in (*names, "score_mod", "sinks"):

        def applies(case: Case, name: str = name) -> bool:
            return _option(case, name) is not None

        yield Reading(f"{name} is ignored", applies, _changed(**{name: nothing.get(name)}))


_HIDING = frozenset(["causal", "window", "mask", "mask_mod", "bias"])

#: Other meanings. Two of them are applied in this order.
READINGS = (
    Reading(
        "rows count from the first key (query_offset=0)",
        lambda case: bool(
            case.L != case.S
            and _option(case, "query_offset") is None
            and (_option(case, "is_causal") or _option(case, "window"))
        ),
        _changed(query_offset=0),
    ),
    Reading(
        "a hidden NaN or infinity reaches the row",
        lambda case: case.poison is not None,
        _all_nan,
    ),
    *_windows(),
    Reading(
        "query head h reads key/value head h % G",
        lambda case: 1 < (case.G or case.H) < case.H,
        _heads_in_turn,
    ),
    Reading(
        "True in a mask leaves a key out",
        lambda case: _option(case, "mask") is not None,
        _mask_inverted,
    ),
    Reading("a mask is added as 0 and 1", lambda case: "mask" in case.features, _mask_added),
    Reading(
        "softcap comes after the bias",
        lambda case: {"softcap", "bias"} <= case.features and "score_mod" not in case.features,
        _softcap_after_bias,
    ),
    *_ignored(),
    *(
        Reading(
            f"a row without keys is {what}",
            lambda case: (
                case.S > 0 and "sinks" not in case.features and bool(_HIDING & case.features)
            ),
            _empty_rows(score),
        )
        for what, score in (("the mean of the values", 0.0), ("NaN", math.nan))
    ),
    Reading(
        "the last axis of a mask is padded rather than broadcast",
        lambda case: (
            case.S > 1
            and any(_is_one_key_wide(case.arguments()[1].get(name)) for name in ("mask", "bias"))
        ),
        _last_axis_padded,
    ),
    *(
        Reading(
            f"the {what} is rounded to float32",
            lambda case: case.dtype == "float64" and (_option(case, "scale") or 0) >= 0,
            _float32_scale(root),
        )
        for what, root in (("scale", False), ("root of the scale", True))
    ),
    Reading("every row is NaN", lambda case: True, _all_nan),
    Reading("computed in float32", lambda case: case.dtype == "float64", dtype="float32"),
)


# ---- all cases ---------------------------------------------------------------------------------

#: What a row can be about.
_ROWS = (
    *(("feature", name) for name in FEATURES if name not in ("logsumexp", "dropout")),
    ("arrays", "rank"),
    ("arrays", "layout"),
    *(("dtype", name) for name in DTYPES),
    *(("topic", name) for name in TOPICS if name != "formula"),
)


def _row_of(case: Case) -> tuple[str, str] | None:
    """What a case shows: a corner, or the one thing that sets it apart from a plain call."""
    if case.topic != "formula":
        return ("topic", case.topic) if case.dtype == "float32" else None
    apart = [("feature", name) for name in case.features]
    if len(apart) == 2 and ("feature", "causal") in apart:
        # An offset shows where positions matter and nowhere else.
        apart = [x for x in apart if x[1].startswith("query_offset")] or apart
    if (case.one_head or len(case.batch) != 1) and "batch_broadcast" not in case.features:
        apart.append(("arrays", "rank"))
    if case.layout != "...HLD":
        apart.append(("arrays", "layout"))
    if case.dtype != "float32" or not apart:
        apart.append(("dtype", case.dtype))
    return apart[0] if len(apart) == 1 and apart[0] in _ROWS else None


def summarise(
    function: Function,
    cases: Iterable[Case],
    to: Callable[[Any], Any],
    back: Callable[[Any], Any],
    progress: Callable[[Iterable[Case]], Iterable[Case]] | None = None,
) -> list[Row]:
    """Hold a function to the cases that show one thing each, and sort what was found by it.

    Parameters
    ----------
    function : callable
        As for `check_callable`.
    cases : iterable of Case
        Where to choose from.
    to, back : callable
        As for `check_callable`.
    progress : callable, optional
        Wraps the cases as they are gone through, as `tqdm` does.

    Returns
    -------
    list of Row
        One for each feature, each property of arrays, each dtype and each topic that a case shows.
    """
    chosen = [(case, row) for case in cases if (row := _row_of(case)) is not None]
    rows = {row: Row(*row, {}) for row in _ROWS}
    through: Iterable[Case] = [case for case, _ in chosen]
    for case, (_, row) in zip(progress(through) if progress else through, chosen, strict=True):
        rows[row].findings[case.name] = check_callable(function, case, to, back)
    return [row for row in rows.values() if row.findings]
