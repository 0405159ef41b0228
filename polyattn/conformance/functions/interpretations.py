"""Name the other meaning of a call that a differing result agrees with.

A result that differs from ours is often right by another convention, such as a mask whose True
hides a key. Each is a row of `INTERPRETATIONS`: its name, and a change of the arguments by which
*our* semantics give its result, such as ``{"mask": ~mask}``. `interpret` evaluates the changed
calls by the oracle and the textbook formula, so that each has an exact result and limits of its
own. A change is None where both conventions give the same.

To add a convention, write a function of a `GivenCall`, a row of the table, and a row of ``FAULTS``
in ``tests/conformance/test_interpretations.py``.
"""

# ruff: noqa: N806 -- the letters are those of the semantics

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import cached_property, partial
from typing import Any

import numpy as np

from polyattn._core.call.options import OPTIONS
from polyattn._core.expressions.replacements import ScaleRule
from polyattn.conformance.cases.case import ARRAYS, MOST_SCORES, Case
from polyattn.conformance.reference.expressions import CallRows, gathered, plainly
from polyattn.conformance.reference.oracle import Array, factor_of, heads_first, lift
from polyattn.conformance.reference.textbook import hidden_keys
from polyattn.conformance.reference.tolerance import Yardstick, deviation, output_yardstick

#: Arguments by name: query, key, value and options; "computed in" is a dtype.
Arguments = dict[str, Any]


class GivenCall:
    """The arguments of a call, and what follows from them.

    A mask or score expression is replaced by an array or a function of the indices.
    """

    def __init__(self, arrays: tuple[Array, Array, Array], options: Arguments) -> None:
        self.arguments = dict(zip(ARRAYS, arrays, strict=True)) | options
        q, k, v = (heads_first(x, self.get("layout", "...HLD")) for x in arrays)
        k, v = (gathered(x, self.get("block_table")) for x in (k, v))
        self.batch = np.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])
        (self.H, self.L, D), self.S = q.shape[-3:], k.shape[-2]
        self.dtype = self.get("query").dtype
        lengths, offset, scale = map(self.get, ("key_lengths", "query_offset", "scale"))
        self.ends = np.asarray(self.S if lengths is None else lengths)  # of the keys of each item
        self.offset = self.ends - self.L if offset is None else offset
        # The factor of the products of a query and a key, or None for another rule.
        is_number = not isinstance(scale, ScaleRule) and self.get("similarity") is None
        self.scale = float(factor_of(scale, None, D, 0)) if is_number else None
        hiding = (self.get(name) is not None for name in ("mask", "bias", "window"))
        self.hides_keys = bool(self.get("is_causal")) or any(hiding)
        self.bias = self.spread(0.0 if self.get("bias") is None else self.get("bias"))
        rows = CallRows(self.batch, (self.H, self.L, self.S), self.offset)
        mask, score_mod = plainly(self.get("mask"), self.get("score_mod"), rows)
        self.arguments |= {"mask": mask, "score_mod": score_mod}

    def get(self, name: str, default: Any = None) -> Any:
        """Return an argument, or a default where it is not given."""
        return self.arguments.get(name, default)

    def spread(self, x: Any) -> Array:
        """Broadcast to (items, H, L, S), with a flat batch, as index functions expect."""
        own = self.H, self.L, self.S
        whole: Array = np.broadcast_to(x, (*self.batch, *own)).reshape(math.prod(self.batch), *own)
        return whole

    @cached_property
    def visible(self) -> Array:
        """The keys that each row sees, (items, H, L, S), without `score_mod`."""
        indices = tuple(np.ogrid[: math.prod(self.batch), : self.H, : self.L, : self.S])
        offset, ends = (np.broadcast_to(x, self.batch).ravel() for x in (self.offset, self.ends))
        mask = self.get("mask")
        if mask is not None and not callable(mask):
            mask = self.spread(mask)
        band = self.get("is_causal"), self.get("window")
        hidden = hidden_keys(mask, *band, offset, ends, indices)
        seen: Array = ~(hidden | np.isneginf(lift(self.bias)))
        return seen


#: Returns the arguments that another meaning gives instead; None where it changes no result.
Change = Callable[[GivenCall], Arguments | None]


@dataclass(frozen=True)
class _Interpreted(Case):
    """A case with its arguments changed to another meaning."""

    meaning: str = ""

    def arguments(self, poisoned: bool = True) -> tuple[tuple[Array, Array, Array], Arguments]:
        call = GivenCall(*super().arguments(poisoned))
        changed = call.arguments | (INTERPRETATIONS[self.meaning](call) or {})
        changed.pop("computed in", None)
        query, key, value = (changed.pop(name) for name in ARRAYS)
        return (query, key, value), changed


@np.errstate(all="ignore")
def interpret(
    case: Case, result: Array, yardstick: Callable[..., Yardstick] = output_yardstick
) -> str:
    """Return the other meaning that a result agrees with, or ""."""
    own = {field.name: getattr(case, field.name) for field in fields(case)}
    for name, changed in changes_of(GivenCall(*case.arguments())):
        yard = yardstick(_Interpreted(**own, meaning=name), changed.get("computed in"))
        if deviation(result, yard, "").fault is None:
            return name
    return ""


def changes_of(call: GivenCall) -> Iterator[tuple[str, Arguments]]:
    """Yield the meanings that may give another result, each with the arguments it changes."""
    for name, change in INTERPRETATIONS.items():
        changed = change(call)
        if changed is not None:
            yield name, changed


# ---- the changes -------------------------------------------------------------------------------

#: A call in which no key is hidden from a row by its position.
_ANYWHERE: Arguments = {"is_causal": False, "window": None, "query_offset": None}


def _from_the_first(call: GivenCall) -> Arguments | None:
    counts = call.get("is_causal") or call.get("window")
    differs = call.L != call.S and call.get("query_offset") is None
    return {"query_offset": 0} if counts and differs else None


def _all_poisoned(call: GivenCall) -> Arguments | None:
    """Let every row see the infinities of the values, or NaN without infinities."""
    query, key, value = (lift(call.get(name)) for name in ARRAYS)
    spoilt = value[~np.isfinite(value)]
    if not np.isfinite(query).all() or (not spoilt.size and np.isfinite(key).all()):
        return None
    filled = np.full_like(call.get("value"), spoilt[0] if spoilt.size else np.nan)
    zeros = {name: np.zeros_like(call.get(name)) for name in ("query", "key")}
    hiding = dict.fromkeys(("mask", "bias", "window", "score_mod", "sinks"))
    return hiding | {"is_causal": False, "value": filled} | zeros


def _nan_queries_hidden(call: GivenCall) -> Arguments | None:
    query = np.isfinite(lift(heads_first(call.get("query"), call.get("layout", "...HLD"))))
    if query.all():
        return None
    seen = call.visible & call.spread(query[..., :1])
    return {"mask": lambda *at: seen[at]}


def _heads_after_length(call: GivenCall) -> Arguments | None:
    """Swap heads and rows where the options fit such a call and all rows are checked."""
    fitting = ("is_causal", "window", "scale", "softcap", *ARRAYS)
    others = [name for name, x in call.arguments.items() if x is not None and name not in fitting]
    few = 0 < math.prod((*call.batch, call.H, call.L, call.S)) <= MOST_SCORES
    fits = call.get("query").ndim > 2 and few and call.L % call.S == 0 and not others
    return {"layout": "...LHD"} if fits else None


def _window_by(left: int, right: int, call: GivenCall) -> Arguments | None:
    """Move the ends of a window, which is_causal also is."""
    low, high = call.get("window") or (None, None)
    if call.get("is_causal"):
        high = 0  # the ends of a window are at least 0
    if (left and low is None) or (right and high is None):
        return None
    window = low if low is None else low + left, high if high is None else high + right
    return {"window": window, "is_causal": False}


def _heads_in_turn(call: GivenCall) -> Arguments | None:
    axis = -2 if call.get("layout") == "...LHD" else -3
    key = call.get("key")
    G = key.shape[axis] if key.ndim > 2 else 1
    if not 1 < G < call.H:
        return None
    return {n: np.concatenate([call.get(n)] * (call.H // G), axis) for n in ("key", "value")}


def _mask_inverted(call: GivenCall) -> Arguments | None:
    mask = call.get("mask")
    if callable(mask):
        return {"mask": lambda *at: np.logical_not(mask(*at))}
    return None if mask is None else {"mask": ~mask}


def _mask_added(call: GivenCall) -> Arguments | None:
    mask, bias = call.get("mask"), call.get("bias")
    if mask is None or callable(mask):
        return None
    added = mask.astype(call.dtype)
    return {"mask": None, "bias": added if bias is None else added + bias}


def _softcap_later(than_mask: bool, call: GivenCall) -> Arguments | None:
    """Cap scores with their bias; later than the mask, hidden scores become the least, -softcap."""
    c, bias = call.get("softcap"), call.bias
    applies = call.hides_keys if than_mask else call.get("bias") is not None
    if c is None or call.get("score_mod") is not None or not applies:
        return None
    seen = call.visible if than_mask else call.spread(True)

    def score_mod(s: Any, *at: Any) -> Any:
        capped = c * np.tanh((s + bias[at].astype(s.dtype)) / c)
        return np.where(seen[at], capped, np.asarray(-c, s.dtype))

    shown = _ANYWHERE | {"mask": None, "key_lengths": None} if than_mask else {}
    return shown | {"bias": None, "softcap": None, "score_mod": score_mod}


def _bias_scaled(call: GivenCall) -> Arguments | None:
    if call.get("bias") is None or call.scale is None:
        return None
    return {"bias": lift(call.get("bias")) * abs(call.scale)}


def _rescaled(power: int, call: GivenCall) -> Arguments | None:
    return {"scale": call.scale**power} if call.scale is not None and call.scale > 0 else None


def _without(name: str, default: Any, call: GivenCall) -> Arguments | None:
    return None if call.get(name) is None else {name: default}


def _empty_rows(score: float | None, call: GivenCall) -> Arguments | None:
    """Let rows without a key see all keys, except those with a bias of -inf if others remain.

    A score replaces those of such rows.
    """
    if not call.hides_keys or call.get("sinks") is not None or not call.S:
        return None
    mod, bias = call.get("score_mod"), call.bias
    empty: Array = ~np.any(call.visible, -1)
    left = ~np.isneginf(lift(bias))
    seen = call.visible | empty[..., None] & (left | ~np.any(left, -1, keepdims=True))

    def score_mod(s: Any, *at: Any) -> Any:
        s = (s if mod is None else mod(s, *at)) + bias[at].astype(s.dtype)
        return s if score is None else np.where(empty[at[:3]], np.asarray(score, s.dtype), s)

    return _ANYWHERE | {"mask": lambda *at: seen[at], "score_mod": score_mod, "bias": None}


def _last_axis_padded(call: GivenCall) -> Arguments | None:
    changed: Arguments = {}
    for name, hidden in (("mask", False), ("bias", -np.inf)):
        x = call.get(name)
        if call.S > 1 and isinstance(x, np.ndarray) and x.shape[-1] == 1:
            changed[name] = np.where(np.arange(call.S) == 0, x, np.asarray(hidden, x.dtype))
    return changed or None


def _float32_scale(root: bool, call: GivenCall) -> Arguments | None:
    scale, D = call.get("scale"), call.get("query").shape[-1]
    if call.dtype != np.float64 or call.scale is None or call.scale < 0:
        return None
    scale = 1 / np.sqrt(np.float32(D)) if scale is None else np.float32(scale)
    return {"scale": float(np.sqrt(scale)) ** 2 if root else float(scale)}


def _nan_scores(call: GivenCall) -> Arguments:
    return {"score_mod": lambda s, *at: s * np.asarray(np.nan, s.dtype)}


def _computed_in(narrow: str, call: GivenCall) -> Arguments | None:
    """Compute float64 in float32, and 16 bits in themselves."""
    wide = {"float32": "float64"}.get(narrow, narrow)
    return {"computed in": narrow} if call.dtype == wide else None


#: The other meanings, in the order in which they are tried.
INTERPRETATIONS: dict[str, Change] = {
    "rows count from the first key (query_offset=0)": _from_the_first,
    "a hidden NaN or infinity reaches the row": _all_poisoned,
    "a row whose query is NaN is 0": _nan_queries_hidden,
    "heads come after length": _heads_after_length,
    **{
        f"rows see one key {how} to the {side}": partial(_window_by, left * by, right * by)
        for how, by in (("less", -1), ("more", 1))
        for side, left, right in (("left", 1, 0), ("right", 0, 1))
    },
    "query head h reads key/value head h % G": _heads_in_turn,
    "True in a mask leaves a key out": _mask_inverted,
    "a mask is added as 0 and 1": _mask_added,
    "softcap comes after the bias": partial(_softcap_later, False),
    "softcap comes after the mask": partial(_softcap_later, True),
    "the scale multiplies the bias too": _bias_scaled,
    "scores are not scaled": partial(_rescaled, 0),
    "the scale is squared (1 / D)": partial(_rescaled, 2),
    **{
        f"{name} is ignored": partial(_without, name, option.default)
        for name, option in OPTIONS.items()
        if name != "block_table"  # without it there are no keys
    },
    "a row without keys is the mean of the values": partial(_empty_rows, 0.0),
    "a row without keys is NaN": partial(_empty_rows, math.nan),
    "a row without keys sees all keys": partial(_empty_rows, None),
    "the last axis of a mask is padded rather than broadcast": _last_axis_padded,
    "the scale is rounded to float32": partial(_float32_scale, False),
    "the root of the scale is rounded to float32": partial(_float32_scale, True),
    "every row is NaN": _nan_scores,
    **{
        f"computed in {narrow}": partial(_computed_in, narrow)
        for narrow in ("float32", "float16", "bfloat16")
    },
}
