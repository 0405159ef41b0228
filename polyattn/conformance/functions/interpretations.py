"""Find the other meaning of a call that a differing result agrees with.

An interpretation is a call whose result, by our semantics, is that of the function. The oracle and
the textbook formula evaluate that call, so that every interpretation has its own error limits.
"""

# ruff: noqa: N806 -- the letters are those of the semantics

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import numpy as np

from polyattn._core.call.options import OPTIONS
from polyattn._core.expressions.replacements import ScaleRule
from polyattn.conformance.cases.case import ARRAYS, MOST_SCORES, Case
from polyattn.conformance.reference.expressions import Rows, in_one_piece, plainly
from polyattn.conformance.reference.oracle import Array, factor_of, heads_first, lift
from polyattn.conformance.reference.textbook import hidden_keys
from polyattn.conformance.reference.tolerance import Yardstick, deviation, output_yardstick

#: The arguments of a call by name: query, key, value and options; "computed in" is a dtype.
Call = dict[str, Any]
#: Returns the arguments that another meaning gives instead; None where it changes no result.
Change = Callable[[Call], Call | None]


@dataclass(frozen=True)
class _Interpreted(Case):
    """A case with its arguments changed by interpretations, which are named."""

    interpretations: tuple[str, ...] = ()

    def arguments(self, poisoned: bool = True) -> tuple[tuple[Array, Array, Array], Call]:
        call = _in_plain_terms(*super().arguments(poisoned))
        for name in self.interpretations:
            call |= INTERPRETATIONS[name](call) or {}
        call.pop("computed in", None)
        query, key, value = (call.pop(name) for name in ARRAYS)
        return (query, key, value), call


@np.errstate(all="ignore")
def interpret(
    case: Case, result: Array, yardstick: Callable[..., Yardstick] = output_yardstick, most: int = 2
) -> str:
    """Return the interpretations, at most `most` together, that a result agrees with, or ""."""
    own = {field.name: getattr(case, field.name) for field in fields(case)}
    for names, call in interpretations_of(_in_plain_terms(*case.arguments()), most):
        yard = yardstick(_Interpreted(**own, interpretations=names), call.get("computed in"))
        if deviation(result, yard, "").fault is None:
            return " and ".join(names)
    return ""


def interpretations_of(call: Call, most: int = 2) -> Iterator[tuple[tuple[str, ...], Call]]:
    """Yield other meanings of a call: names, and what is called, first one and then two together.

    The second is a meaning of what is called by the first.
    """
    names = list(INTERPRETATIONS)
    level: list[tuple[tuple[str, ...], Call]] = [((), call)]
    for _ in range(most):
        level = [
            ((*before, name), changed | other)
            for before, changed in level
            for name in (names[names.index(before[-1]) + 1 :] if before else names)
            if (other := INTERPRETATIONS[name](changed)) is not None
        ]
        yield from level


def _in_plain_terms(arrays: tuple[Array, Array, Array], options: Call) -> Call:
    """Return the arguments of a call by name, without mask and score expressions."""
    call = dict(zip(ARRAYS, arrays, strict=True)) | options
    batch, H, L, S = _lengths(call)
    rows = Rows(batch, (H, L, S), _offset(call))
    mask, score_mod = plainly(call.get("mask"), call.get("score_mod"), rows)
    return call | {"mask": mask, "score_mod": score_mod}


def _lengths(call: Call) -> tuple[tuple[int, ...], int, int, int]:
    """Return the batch, H, L and S of a call."""
    q, k, v = (heads_first(call[name], call.get("layout", "...HLD")) for name in ARRAYS)
    k, v = (in_one_piece(x, call.get("block_table")) for x in (k, v))
    q, k, v = (x.shape for x in (q, k, v))
    return np.broadcast_shapes(q[:-3], k[:-3], v[:-3]), q[-3], q[-2], k[-2]


def _offset(call: Call) -> Any:
    """Return the position of the first row of a call."""
    offset, L = call.get("query_offset"), _lengths(call)[2]
    return _ends(call) - L if offset is None else offset


def _ends(call: Call) -> Any:
    """Return the number of keys of each item."""
    lengths = call.get("key_lengths")
    return np.asarray(_lengths(call)[3] if lengths is None else lengths)


def _spread(call: Call, x: Any) -> Array:
    """Broadcast to (batch, H, L, S) with a flat batch, as index functions expect."""
    batch, H, L, S = _lengths(call)
    return np.broadcast_to(x, (*batch, H, L, S)).reshape(math.prod(batch), H, L, S)


def _bias(call: Call) -> Array:
    """Return the bias, or zeros, (batch, H, L, S)."""
    return _spread(call, np.zeros(()) if call.get("bias") is None else call["bias"])


def _visible(call: Call) -> Array:
    """Return which keys each row sees, (batch, H, L, S), without `score_mod`."""
    batch, H, L, S = _lengths(call)
    b, h, i, j = np.ogrid[: math.prod(batch), :H, :L, :S]
    offset, ends = (np.broadcast_to(f(call), batch).ravel() for f in (_offset, _ends))
    mask = call.get("mask")
    if mask is not None and not callable(mask):
        mask = _spread(call, mask)
    band = call.get("is_causal"), call.get("window")
    seen: Array = ~np.isneginf(lift(_bias(call)))
    seen &= ~hidden_keys(mask, *band, offset, ends, (b, h, i, j))
    return seen


#: A call in which no key is hidden from a row by its place.
_ANYWHERE: Call = {"is_causal": False, "window": None, "query_offset": None}


def _of(name: str, give: Callable[[Call], Call]) -> Change:
    """Return a change that applies to calls with an option."""
    return lambda call: None if call.get(name) is None else give(call)


def _without(name: str, default: Any, call: Call) -> Call | None:
    return None if call.get(name) is None else {name: default}


def _hides(call: Call) -> bool:
    """Return whether a key may be hidden from a row."""
    given = (call.get(name) is not None for name in ("mask", "bias", "window"))
    return bool(call.get("is_causal")) or any(given)


def _factor(call: Call) -> float:
    """Return the factor of the products of a query and a key; -1 where it is no plain scale."""
    scale, D = call.get("scale"), call["query"].shape[-1]
    is_rule = isinstance(scale, ScaleRule) or call.get("similarity") is not None
    return -1.0 if is_rule else float(factor_of(scale, None, D, 0))


def _empty_rows(score: float, call: Call) -> Call | None:
    """Let rows without a key see all keys, except those with a bias of -inf if others remain."""
    if not _hides(call) or call.get("sinks") is not None or not _lengths(call)[3]:
        return None
    seen, mod, bias = _visible(call), call.get("score_mod"), _bias(call)
    empty: Array = ~np.any(seen, -1)
    left = ~np.isneginf(lift(bias))
    seen |= empty[..., None] & (left | ~np.any(left, -1, keepdims=True))

    def score_mod(s: Any, *at: Any) -> Any:
        s = (s if mod is None else mod(s, *at)) + bias[at].astype(s.dtype)
        return np.where(empty[at[:3]], np.asarray(score, s.dtype), s)

    return _ANYWHERE | {"mask": lambda *at: seen[at], "score_mod": score_mod, "bias": None}


def _softcap_later(than_mask: bool, call: Call) -> Call | None:
    """Cap scores with their bias; later than the mask, hidden ones have the least that is left."""
    c, bias = call.get("softcap"), _bias(call)
    applies = _hides(call) if than_mask else call.get("bias") is not None
    if c is None or call.get("score_mod") is not None or not applies:
        return None
    seen = _visible(call) if than_mask else _spread(call, True)

    def score_mod(s: Any, *at: Any) -> Any:
        capped = c * np.tanh((s + bias[at].astype(s.dtype)) / c)
        return np.where(seen[at], capped, np.asarray(-c, s.dtype))

    shown = _ANYWHERE | {"mask": None, "key_lengths": None} if than_mask else {}
    return shown | {"bias": None, "softcap": None, "score_mod": score_mod}


def _heads_in_turn(call: Call) -> Call | None:
    axis = -2 if call.get("layout") == "...LHD" else -3
    H, G = (call[name].shape[axis] if call[name].ndim > 2 else 1 for name in ("query", "key"))
    if not 1 < G < H:
        return None
    return {name: np.concatenate([call[name]] * (H // G), axis) for name in ("key", "value")}


def _heads_after_length(call: Call) -> Call | None:
    """Take heads for rows where the options fit such a call, and all rows are checked."""
    fitting = ("is_causal", "window", "scale", "softcap", *ARRAYS)
    others = [name for name, x in call.items() if x is not None and name not in fitting]
    batch, H, L, S = _lengths(call)
    few = 0 < math.prod((*batch, H, L, S)) <= MOST_SCORES
    fits = call["query"].ndim > 2 and few and L % S == 0 and not others
    return {"layout": "...LHD"} if fits else None


def _mask_of_false(call: Call) -> Call | None:
    """Show all keys where an ignored mask and an inverted one give the same result."""
    mask = call.get("mask")
    return {"mask": None} if isinstance(mask, np.ndarray) and not mask.any() else None


def _mask_inverted(call: Call) -> Call:
    mask = call["mask"]
    return {"mask": (lambda *at: np.logical_not(mask(*at))) if callable(mask) else ~mask}


def _mask_added(call: Call) -> Call | None:
    mask, bias, dtype = call.get("mask"), call.get("bias"), call["query"].dtype
    if mask is None or callable(mask):
        return None
    added = mask.astype(dtype)
    return {"mask": None, "bias": added if bias is None else added + bias}


def _last_axis_padded(call: Call) -> Call | None:
    S = _lengths(call)[3]
    changed: Call = {}
    for name, hidden in (("mask", False), ("bias", -np.inf)):
        x = call.get(name)
        if S > 1 and isinstance(x, np.ndarray) and x.shape[-1] == 1:
            changed[name] = np.where(np.arange(S) == 0, x, np.asarray(hidden, x.dtype))
    return changed or None


def _all_poisoned(call: Call) -> Call | None:
    """Let every row see the infinities of the values, or NaN without infinities."""
    query, key, value = (lift(call[name]) for name in ARRAYS)
    spoilt = value[~np.isfinite(value)]
    if not np.isfinite(query).all() or (not spoilt.size and np.isfinite(key).all()):
        return None
    value = np.full_like(call["value"], spoilt[0] if spoilt.size else np.nan)
    changed = {"query": call["query"] * 0, "key": np.zeros_like(call["key"]), "value": value}
    hiding = ("mask", "bias", "window", "score_mod", "sinks")
    return dict.fromkeys(hiding) | {"is_causal": False} | changed


def _nan_queries_hidden(call: Call) -> Call | None:
    query = np.isfinite(lift(heads_first(call["query"], call.get("layout", "...HLD"))))
    if query.all():
        return None
    seen = _visible(call) & _spread(call, query[..., :1])
    return {"mask": lambda *at: seen[at]}


def _rescaled(power: int, call: Call) -> Call | None:
    scale = _factor(call)
    return {"scale": scale**power} if scale > 0 else None


def _float32_scale(root: bool, call: Call) -> Call | None:
    scale, D = call.get("scale"), call["query"].shape[-1]
    if call["query"].dtype != np.float64 or _factor(call) < 0:
        return None
    scale = 1 / np.sqrt(np.float32(D)) if scale is None else np.float32(scale)
    return {"scale": float(np.sqrt(scale)) ** 2 if root else float(scale)}


def _window_by(left: int, right: int, call: Call) -> Call | None:
    """Move the ends of a window, which is_causal also is."""
    low, high = call.get("window") or (None, None)
    if call.get("is_causal"):
        high = 0 if high is None else min(high, 0)
    if (left and low is None) or (right and high is None):
        return None
    window = low if low is None else low + left, high if high is None else high + right
    return {"window": window, "is_causal": False}


def _lengths_by(more: int, call: Call) -> Call:
    return {"key_lengths": np.clip(_ends(call) + more, 0, _lengths(call)[3])}


def _pages_in_order(call: Call) -> Call:
    table = call["block_table"]
    return {"block_table": np.arange(table.size).reshape(table.shape)}


def _from_the_first(call: Call) -> Call | None:
    placed = call.get("is_causal") or call.get("window")
    L, S = _lengths(call)[2:]
    return {"query_offset": 0} if placed and L != S and call.get("query_offset") is None else None


def _computed_in(narrow: str, call: Call) -> Call | None:
    """Compute float64 in float32, and 16 bits in themselves."""
    wide = {"float32": "float64"}.get(narrow, narrow)
    return {"computed in": narrow} if call["query"].dtype == wide else None


_SIDES = {"to the left": (1, 0), "to the right": (0, 1), "to either side": (1, 1)}
_MORE = {"less": -1, "more": 1}

#: The other meanings; two together are applied in this order.
INTERPRETATIONS: dict[str, Change] = {
    "rows count from the first key (query_offset=0)": _from_the_first,
    "a hidden NaN or infinity reaches the row": _all_poisoned,
    "a row whose query is NaN is 0": _nan_queries_hidden,
    "heads come after length": _heads_after_length,
    **{
        f"rows see one key {how} {where}": partial(_window_by, left * by, right * by)
        for how, by in _MORE.items()
        for where, (left, right) in _SIDES.items()
    },
    **{
        f"items have one key {how}": _of("key_lengths", partial(_lengths_by, by))
        for how, by in _MORE.items()
    },
    "pages are read in the order of the pool": _of("block_table", _pages_in_order),
    "query head h reads key/value head h % G": _heads_in_turn,
    "a mask of False hides no key": _mask_of_false,
    "True in a mask leaves a key out": _of("mask", _mask_inverted),
    "a mask is added as 0 and 1": _mask_added,
    "softcap comes after the bias": partial(_softcap_later, False),
    "softcap comes after the mask": partial(_softcap_later, True),
    "the scale multiplies the bias too": _of(
        "bias", lambda call: {"bias": lift(call["bias"]) * abs(_factor(call))}
    ),
    "scores are not scaled": partial(_rescaled, 0),
    "the scale is squared (1 / D)": partial(_rescaled, 2),
    **{
        f"{name} is ignored": partial(_without, name, option.default)
        for name, option in OPTIONS.items()
        if name != "block_table"  # without it there are no keys
    },
    "a row without keys is the mean of the values": partial(_empty_rows, 0.0),
    "a row without keys is NaN": partial(_empty_rows, math.nan),
    "the last axis of a mask is padded rather than broadcast": _last_axis_padded,
    "the scale is rounded to float32": partial(_float32_scale, False),
    "the root of the scale is rounded to float32": partial(_float32_scale, True),
    "every row is NaN": lambda call: {"score_mod": lambda s, *_: s * np.asarray(np.nan, s.dtype)},
    **{
        f"computed in {narrow}": partial(_computed_in, narrow)
        for narrow in ("float32", "float16", "bfloat16")
    },
}
