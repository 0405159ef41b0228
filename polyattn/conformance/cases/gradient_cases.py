"""List the cases whose gradients and directional derivatives are checked."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from polyattn import scores
from polyattn.conformance.cases.case import Case, Generated, make_case
from polyattn.conformance.cases.catalogue import CASES, MANY
from polyattn.conformance.cases.generators import (
    bent,
    mask_with_empty_rows,
    mask_without,
    normal,
    slope_of_bent,
)
from polyattn.conformance.cases.topics import HIDDEN, PAIRED

#: A score function with its derivative, which every library can differentiate.
BENT = scores.function(bent, slope_of_bent)
#: What the keys have in common multiplies each error that the gradients of a row's scores share.
ALIKE: dict[str, Any] = {"values": "keys of mean 64", "rounded_once": True}
OWN = {
    case.name: case
    for case in (
        make_case("score function with a derivative", score_mod=BENT),
        make_case(
            "many with a derivative",
            **MANY | {"score_mod": scores.softcap(3.0) >> BENT, "L": 13, "S": 29},
        ),
        make_case(
            "nan under a mask, many steps",
            **{"poison": math.nan, "poisoned": (3, 4), "mask": mask_without(3, 4)},
            **{"softcap": 1.5, "score_mod": BENT, "dropout": (0.25, 7), "scale": 0.8},
        ),
        # With so many heads, small tiles cut the keys of each.
        make_case(
            "eight heads, softcap and bias (1, H, L, 1)",
            **{"batch": (1,), "H": 8, "L": 5, "S": 33, "softcap": 1.5},
            bias=normal("1HL1"),
        ),
        make_case(
            "nan in the queries of empty rows",
            **{"poison": math.nan, "poisoned": (0, 3, 6, 9), "poison_in": ("query",)},
            mask=Generated(mask_with_empty_rows),
        ),
        make_case("S = 0, sinks", S=0, **PAIRED["sinks"]),
        make_case("bias (S,) and softcap, float64", dtype="float64", bias=normal("S"), softcap=2.0),
        make_case(
            "bias of all scores, causal, float64",
            **{"dtype": "float64", "is_causal": True, "bias": normal("BHLS")},
        ),
        make_case(
            "distance, scale 0, causal, softcap, float64",
            **{"dtype": "float64", "is_causal": True, "scale": 0.0, "softcap": 1.5},
            similarity=scores.distance(2),
        ),
        make_case("keys of mean 64", **ALIKE, L=65, S=65),
        make_case("keys of mean 64, few heads", **ALIKE, H=4, G=2, L=70, S=90, D=64),
    )
}

NAMES = (
    *PAIRED,
    *("plain", "padding mask", "mask (L, 1)", "bias (1, H, 1, S)", "bias (B, 1, L, 1)"),
    *("bias as mask", "sink of -inf", "offset below 0", "key lengths", "scale below 0, causal"),
    *("one key/value head", "key without batch axes", "value alone in a batch", "decode"),
    *("mask hides some rows", "mask hides some rows, sinks", "mask hides all", "causal, L > S"),
    *("bias hides some rows", "sink of -inf in an empty row", "S = 0", "equal scores", "many"),
    *("65 x 65, causal", "64 x 65", "mask value", "mask value hides some rows"),
    *("composed masks, offset below 0", "selected keys", "score value", "score value x mask value"),
    *("score value x offset array", "score value of a function", "keys of mean 64"),
    *("keys of mean 64, few heads", "few selected keys", "a selected block"),
)

#: Features that meet in the backward pass.
PAIRS = (
    *("bias x softcap", "bias x broadcast batch", "bias x E != D", "softcap x scale"),
    *("sinks x grouped heads", "sinks x broadcast batch", "grouped heads x broadcast batch"),
    *("grouped heads x LHD", "dropout", "dropout x causal and sinks", "dropout of a part"),
    *("dropout x grouped heads, LHD", "dropout x broadcast batch, E != D"),
    *("scale of long sequences", "window x offset int"),
)

#: Cases in 16 bits, in which the result is rounded before its gradient is known.
IN_16_BITS = (
    *("plain", "bias x softcap", "grouped heads", "mask hides some rows, sinks", "dropout"),
    "many with a derivative",
    "keys of mean 64",
)

#: Cases that are compared with differences: steps that the formula for gradients leaves out, arrays
#: in expressions, and the numbers `scale` and `softcap`.
BY_DIFFERENCES = (
    *("plain", "softcap and bias", "scale", "scale 0"),
    *("scale of long sequences", "L > S"),
    *("causal, L > S", "mask hides some rows, sinks", "sinks x grouped heads"),
    *("dropout x causal and sinks", "score value x grouped heads, LHD", "alibi value"),
    *("score value x broadcast batch, E != D", "score value x softcap and causal"),
    *("relative bias one way", "score function with a derivative", "many with a derivative"),
    *("similarity", "similarity x grouped heads, LHD", "similarity x score norm"),
    *("similarity x broadcast batch, E != D", "similarity x scale and mask array"),
    *("distance", "sum of distances", "additive", "score norm x causal"),
    *("score norm x mask value and softcap", "score norm x window and bias as mask"),
    *("normalizer x causal and bias", "normalizer x dropout", "sigmoid", "S = 0, similarity"),
    *("nan under a mask value, similarity", "nan under a mask value, score norm"),
    *("nan under a mask value, normalizer", "nan under a mask, many steps"),
    *("eight heads, softcap and bias (1, H, L, 1)", "nan in the queries of empty rows"),
    *("selected keys, dropout, bias, sinks", "selected keys, many steps", "blocks of keys"),
    *("selected keys and a function, sigmoid", "selected keys, score norm", "S = 0, sinks"),
)


def named(name: str) -> Case:
    """Return a case by name, with all its rows: each adds to the gradients of the keys."""
    return OWN[name] if name in OWN else replace(CASES[name], rows=None)


def in_dtypes(names: Iterable[str], *dtypes: str) -> Iterator[Case]:
    for name in names:
        for dtype in dtypes:
            case = named(name)
            yield replace(case, name=f"{name}, {dtype}", dtype=dtype)


def by_name(cases: Iterable[Case]) -> dict[str, Case]:
    return {case.name: case for case in cases}


_NARROW = by_name(
    map(named, (*NAMES, *PAIRS, "score function with a derivative", "many with a derivative"))
)
_NARROW |= by_name(in_dtypes(IN_16_BITS, "float16", "bfloat16"))
_WIDE = by_name(in_dtypes(BY_DIFFERENCES, "float64"))

#: Cases whose gradients the formula judges, by name.
GRADIENT_CASES = _NARROW | by_name(in_dtypes(NAMES, "float64"))

#: Cases with NaN or infinity in hidden keys and values: no gradient may change.
POISONED_GRADIENT_CASES = {
    name: CASES[name]
    for name in (
        *(f"nan under {how}" for how in HIDDEN if how not in ("window", "causal")),
        *("inf under mask array", "nan in a key under mask array"),
        "nan under a mask value",
    )
}

# The gradient of a row may change only if the row sees the key.
_SEEN_LATER: dict[str, Any] = by_name(
    replace(CASES[name], name=f"{name}, rows before", rows=tuple(range(5)))
    for name in ("nan seen by later rows", "inf in a value seen by later rows")
)

#: Cases of `attention_backward`.
BACKWARD_CASES = _NARROW | _WIDE | POISONED_GRADIENT_CASES | _SEEN_LATER | OWN

#: Cases of `attention_jvp`: it follows from the gradients, so that few of them will do.
JVP_CASES = {
    name: case
    for name, case in BACKWARD_CASES.items()
    if case.dtype != "float32"
    or name in POISONED_GRADIENT_CASES
    or name
    in ("plain", "offset below 0", "many with a derivative", "grouped heads x LHD", "selected keys")
}
