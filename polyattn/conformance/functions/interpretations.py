"""Find the other meaning of a call that a differing result agrees with.

An interpretation is a call whose result, by our semantics, is that of the function. The oracle and
the textbook formula evaluate that call, so that every interpretation has its own error limits.
"""

# ruff: noqa: N806 -- the letters are those of the semantics

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from functools import partial
from itertools import chain, combinations
from typing import Any, NamedTuple

import numpy as np

from polyattn._core.call.options import OPTIONS
from polyattn.conformance.cases.case import Case
from polyattn.conformance.reference.expressions import Rows, in_one_piece, plainly
from polyattn.conformance.reference.oracle import Array, heads_first, lift
from polyattn.conformance.reference.textbook import hidden_keys
from polyattn.conformance.reference.tolerance import deviation, output_yardstick

Options = dict[str, Any]
Arguments = tuple[tuple[Array, Array, Array], Options]


class Interpretation(NamedTuple):
    """Another meaning of a call, as the call that has its result by our semantics."""

    name: str  # a sentence
    applies: Callable[[Case], bool]  # whether it can change the result of a case
    call: Callable[[Arguments], Arguments] = lambda arguments: arguments
    dtype: str | None = None  # to compute in; None for that of the semantics


@dataclass(frozen=True)
class _Interpreted(Case):
    """A case with its arguments changed by interpretations."""

    interpretations: tuple[Interpretation, ...] = ()

    def arguments(self, poisoned: bool = True) -> Arguments:
        arguments = _in_plain_terms(super().arguments(poisoned))
        for interpretation in self.interpretations:
            arguments = interpretation.call(arguments)
        return arguments


@np.errstate(all="ignore")
def interpret(case: Case, output: Array, most: int = 2) -> str:
    """Return the interpretations, at most `most` together, that a result agrees with, or ""."""
    applicable = [other for other in INTERPRETATIONS if other.applies(case)]
    own = {field.name: getattr(case, field.name) for field in fields(case)}
    together = (combinations(applicable, n) for n in range(1, most + 1))
    for interpretations in chain.from_iterable(together):
        dtype = next((r.dtype for r in interpretations if r.dtype), None)
        yard = output_yardstick(_Interpreted(**own, interpretations=interpretations), dtype)
        if deviation(output, yard, "").fault is None:
            return " and ".join(interpretation.name for interpretation in interpretations)
    return ""


def _has_dtype(dtype: str, case: Case) -> bool:
    return case.dtype == dtype


def _option(case: Case, name: str) -> Any:
    return dict(case.options).get(name)


def _changed(**options: Any) -> Callable[[Arguments], Arguments]:
    return lambda arguments: (arguments[0], arguments[1] | options)


def _lengths(arguments: Arguments) -> tuple[tuple[int, ...], int, int, int]:
    """Return the batch, H, L and S of a call."""
    (query, key, value), options = arguments
    layout = options.get("layout", "...HLD")
    q, k, v = (heads_first(x, layout) for x in (query, key, value))
    k, v = (in_one_piece(x, options.get("block_table")) for x in (k, v))
    q, k, v = (x.shape for x in (q, k, v))
    return np.broadcast_shapes(q[:-3], k[:-3], v[:-3]), q[-3], q[-2], k[-2]


def _offset(arguments: Arguments) -> Any:
    """Return the position of the first row of a call."""
    offset, L = arguments[1].get("query_offset"), _lengths(arguments)[2]
    return _ends(arguments) - L if offset is None else offset


def _ends(arguments: Arguments) -> Any:
    """Return the number of keys of each item."""
    lengths = arguments[1].get("key_lengths")
    return np.asarray(_lengths(arguments)[3] if lengths is None else lengths)


def _in_plain_terms(arguments: Arguments) -> Arguments:
    """Return the same call without mask and score expressions."""
    arrays, options = arguments
    batch, H, L, S = _lengths(arguments)
    rows = Rows(batch, (H, L, S), _offset(arguments))
    mask, score_mod = plainly(options.get("mask"), options.get("score_mod"), rows)
    return arrays, options | {"mask": mask, "score_mod": score_mod}


def _spread(arguments: Arguments, x: Any) -> Array:
    """Broadcast to (batch, H, L, S) with a flat batch, as index functions expect."""
    batch, H, L, S = _lengths(arguments)
    return np.broadcast_to(x, (*batch, H, L, S)).reshape(math.prod(batch), H, L, S)


def _visible(arguments: Arguments) -> Array:
    """Return which keys each row sees, (batch, H, L, S), without `score_mod`."""
    options = arguments[1]
    batch, H, L, S = _lengths(arguments)
    b, h, i, j = np.ogrid[: math.prod(batch), :H, :L, :S]
    offset, ends = (np.broadcast_to(f(arguments), batch).ravel() for f in (_offset, _ends))
    mask = options.get("mask")
    if mask is not None and not callable(mask):
        mask = _spread(arguments, mask)
    band = options.get("is_causal"), options.get("window")
    seen: Array = np.ones((math.prod(batch), H, L, S), bool)
    seen &= ~hidden_keys(mask, *band, offset, ends, (b, h, i, j))
    if (bias := options.get("bias")) is not None:
        seen &= ~np.isneginf(lift(_spread(arguments, bias)))
    return seen


def _empty_rows(score: float) -> Callable[[Arguments], Arguments]:
    """Let rows without a key see all keys, except those with a bias of -inf if others remain."""

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


def _all_poisoned(arguments: Arguments) -> Arguments:
    """Let every row see the infinities of the values, or NaN without infinities."""
    (query, key, value), options = arguments
    spoilt = value[~np.isfinite(lift(value))]
    poison = spoilt[0] if spoilt.size else np.asarray(np.nan, value.dtype)
    hiding = ("mask", "bias", "window", "score_mod", "sinks")
    options = options | dict.fromkeys(hiding) | {"is_causal": False}
    return (query * 0, np.zeros_like(key), np.full_like(value, poison)), options


def _nan_queries_hidden(arguments: Arguments) -> Arguments:
    query, seen = arguments[0][0], _visible(arguments)
    rows = np.isfinite(lift(heads_first(query, arguments[1].get("layout", "...HLD"))[..., :1]))
    seen &= _spread(arguments, rows)
    return arguments[0], arguments[1] | {"mask": lambda *at: seen[at]}


def _float32_scale(root: bool) -> Callable[[Arguments], Arguments]:
    def call(arguments: Arguments) -> Arguments:
        arrays, options = arguments
        scale = options.get("scale")
        scale = 1 / np.sqrt(np.float32(arrays[0].shape[-1])) if scale is None else np.float32(scale)
        scale = float(np.sqrt(scale)) ** 2 if root else float(scale)
        return arrays, options | {"scale": scale}

    return call


def _windows() -> Iterable[Interpretation]:
    """Yield windows that are wider or narrower by one key."""
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

            yield Interpretation(f"a window reaches one key {how} {where}", applies, call)


def _one_key(more: int) -> Callable[[Arguments], Arguments]:
    """Let items have one key more or less."""

    def call(arguments: Arguments) -> Arguments:
        ends = np.clip(_ends(arguments) + more, 0, _lengths(arguments)[3])
        return arguments[0], arguments[1] | {"key_lengths": ends}

    return call


def _pages_in_order(arguments: Arguments) -> Arguments:
    table = arguments[1]["block_table"]
    return arguments[0], arguments[1] | {"block_table": np.arange(table.size).reshape(table.shape)}


def _ignored() -> Iterable[Interpretation]:
    """Yield the interpretations that ignore an option."""
    for name, option in OPTIONS.items():
        if name == "block_table":  # without it there are no keys
            continue

        def applies(case: Case, name: str = name) -> bool:
            return _option(case, name) is not None

        yield Interpretation(f"{name} is ignored", applies, _changed(**{name: option.default}))


_DTYPES = ("float64", "float16", "bfloat16")
_HIDING = frozenset(["causal", "window", "mask", "mask_mod", "mask_expression", "bias"])

#: The other meanings; two together are applied in this order.
INTERPRETATIONS = (
    Interpretation(
        "rows count from the first key (query_offset=0)",
        lambda case: bool(
            case.L != case.S
            and _option(case, "query_offset") is None
            and (_option(case, "is_causal") or _option(case, "window"))
        ),
        _changed(query_offset=0),
    ),
    Interpretation(
        "a hidden NaN or infinity reaches the row",
        lambda case: case.poison is not None and "query" not in case.poison_in,
        _all_poisoned,
    ),
    Interpretation(
        "a row whose query is NaN is 0",
        lambda case: case.poison is not None and "query" in case.poison_in,
        _nan_queries_hidden,
    ),
    *_windows(),
    *(
        Interpretation(
            f"items have one key {how}",
            lambda case: _option(case, "key_lengths") is not None,
            _one_key(more),
        )
        for more, how in ((1, "more"), (-1, "less"))
    ),
    Interpretation(
        "pages are read in the order of the pool",
        lambda case: case.page is not None,
        _pages_in_order,
    ),
    Interpretation(
        "query head h reads key/value head h % G",
        lambda case: "grouped_heads" in case.features and case.G != 1,
        _heads_in_turn,
    ),
    Interpretation(
        "True in a mask leaves a key out",
        lambda case: _option(case, "mask") is not None,
        _mask_inverted,
    ),
    Interpretation("a mask is added as 0 and 1", lambda case: "mask" in case.features, _mask_added),
    Interpretation(
        "softcap comes after the bias",
        lambda case: {"softcap", "bias"} <= case.features and "score_mod" not in case.features,
        _softcap_after_bias,
    ),
    *_ignored(),
    *(
        Interpretation(
            f"a row without keys is {what}",
            lambda case: (
                case.S > 0 and "sinks" not in case.features and bool(_HIDING & case.features)
            ),
            _empty_rows(score),
        )
        for what, score in (("the mean of the values", 0.0), ("NaN", math.nan))
    ),
    Interpretation(
        "the last axis of a mask is padded rather than broadcast",
        lambda case: (
            case.S > 1
            and any(_is_one_key_wide(case.arguments()[1].get(name)) for name in ("mask", "bias"))
        ),
        _last_axis_padded,
    ),
    *(
        Interpretation(
            f"the {what} is rounded to float32",
            lambda case: case.dtype == "float64" and (_option(case, "scale") or 0) >= 0,
            _float32_scale(root),
        )
        for what, root in (("scale", False), ("root of the scale", True))
    ),
    Interpretation("every row is NaN", lambda case: True, _all_nan),
    *(
        Interpretation(f"computed in {narrow}", partial(_has_dtype, dtype), dtype=narrow)
        for dtype, narrow in zip(_DTYPES, ("float32", "float16", "bfloat16"), strict=True)
    ),
)
