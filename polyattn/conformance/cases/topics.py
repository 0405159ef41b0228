"""List the cases by topic: their names and fields."""

from __future__ import annotations

import math
from itertools import product

import numpy as np

from polyattn import masks
from polyattn.conformance.cases.cache_cases import CACHES, TOPIC
from polyattn.conformance.cases.case import ARRAYS, VIEWS, Fields, Generated, Group
from polyattn.conformance.cases.generators import (
    alibi,
    bent,
    bias_with,
    hiding,
    key_lengths,
    mask_with_empty_rows,
    mask_without,
    normal,
    offsets,
    padding,
    random_mask,
    shuffled_pages,
    two_in_three,
)

OFFSETS: Fields = {"is_causal": True, "query_offset": Generated(offsets)}
PAIRED: Group = {
    "causal": {"is_causal": True},
    "window": {"window": (3, 2)},
    "mask array": {"mask": random_mask()},
    "mask function": {"mask": two_in_three},
    "bias": {"bias": normal()},
    "softcap": {"softcap": 1.5},
    "score_mod": {"score_mod": bent},
    "sinks": {"sinks": normal("H")},
    "grouped heads": {"H": 4, "G": 2},
    "offset int": {"is_causal": True, "query_offset": 2},
    "offset array": OFFSETS,
    "scale": {"scale": 0.7},
    "E != D": {"E": 5},
    "L < S": {"L": 7, "S": 17},
    "L > S": {"L": 17, "S": 7},
    "broadcast batch": {"batch": (2, 1), "key_batch": (1, 3), "value_batch": (2, 3)},
    "rank 2": {"batch": (), "H": 1, "one_head": True, "layout": "...HLD"},
    "rank 3": {"batch": ()},
    "rank 5": {"batch": (2, 2)},
    "LHD": {"layout": "...LHD"},
}

PAGES: Fields = {
    **{"block_table": Generated(shuffled_pages), "key_lengths": Generated(key_lengths)},
    **{"S": 12, "page": 4, "is_causal": True},
}
ALONE: Group = {
    "plain": {},
    "left window": {"window": (3, None)},
    "right window": {"window": (None, 2)},
    "window of one": {"window": (0, 0)},
    "window of none bound": {"window": (None, None)},
    "window ahead": {"window": (0, 2), "query_offset": 1},
    "window beyond int32": {"window": (2**40, 0)},
    "window, mask and sinks": PAIRED["window"] | PAIRED["mask array"] | PAIRED["sinks"],
    "softcap and bias": PAIRED["softcap"] | PAIRED["bias"],
    "score_mod and bias": PAIRED["score_mod"] | PAIRED["bias"],
    "causal, mask and bias, grouped": (
        PAIRED["causal"] | PAIRED["mask array"] | PAIRED["bias"] | PAIRED["grouped heads"]
    ),
    "mask (L, S)": {"mask": random_mask("LS")},
    "mask (S,)": {"mask": random_mask("S")},
    "mask (L, 1)": {"mask": random_mask("L1")},
    "mask per head": {"mask": random_mask("1H1S")},
    "mask (B, 1, L, S)": {"mask": random_mask("B1LS")},
    "mask (2, 1, 1, 1, S) for a batch (2, 3)": {"mask": random_mask("2111S"), "batch": (2, 3)},
    "mask (1, 1)": {"mask": Generated(lambda case, rng: np.zeros((1, 1), bool))},
    "padding mask": {"mask": Generated(padding)},
    "mask function of j": {"mask": lambda b, h, i, j: j < 7},
    "segments": {"mask": lambda b, h, i, j: i // 4 == j // 4},
    "bias (L, S)": {"bias": normal("LS")},
    "bias (1, H, 1, S)": {"bias": normal("1H1S")},
    "bias (B, 1, L, 1)": {"bias": normal("B1L1")},
    "bias of float32": {"bias": normal("LS", "float32")},
    "bias of float64": {"bias": normal("LS", "float64")},
    "sinks of float64": {"sinks": normal("H", "float64")},
    "bias as mask": {"bias": bias_with(lambda i, j: (i + j) % 3 == 0)},
    "bias (1, H, L, S)": {"bias": normal("1HLS")},
    "alibi": {"score_mod": alibi},
    "score_mod hides keys": {"score_mod": hiding(lambda *at: ~two_in_three(*at))},
    "low sinks": {"sinks": Generated(lambda case, rng: np.full(case.H, -1e4))},
    "high sinks": {"sinks": Generated(lambda case, rng: np.full(case.H, 1e4))},
    "sink of -inf": {"sinks": Generated(lambda case, rng: np.full(case.H, -np.inf))},
    "one sink of -inf": {
        "sinks": Generated(lambda case, rng: np.where(np.arange(case.H), 0.3, -np.inf))
    },
    "offset 0, L < S": {"query_offset": 0, "is_causal": True, "L": 7, "S": 17},
    "offset 0, L > S": {"query_offset": 0, "is_causal": True, "L": 17, "S": 7},
    "offset below 0": {"query_offset": -3, "is_causal": True},
    "offset past the end": {"query_offset": 30, "is_causal": True},
    "offset beyond int32": {"query_offset": 2**40, "is_causal": True},
    "offset array and window beyond int32": {
        "query_offset": Generated(lambda case, rng: 2**40 + offsets(case, rng)),
        "window": (2**40 + 2, None),
    },
    "offset array without causal": {"query_offset": Generated(offsets), "window": (3, 2)},
    "offset array of int32": {
        "query_offset": Generated(lambda case, rng: offsets(case, rng).astype("int32")),
        "is_causal": True,
    },
    "offset array (3,) for a batch (2, 3)": {
        **{"query_offset": Generated(lambda case, rng: np.array([-3, 2, 6]))},
        **{"is_causal": True, "batch": (2, 3)},
    },
    "key lengths": {"key_lengths": Generated(key_lengths), "is_causal": True},
    "key lengths without positions": {"key_lengths": Generated(key_lengths), "L": 3},
    "key lengths, window and mask": {
        **{"key_lengths": Generated(key_lengths), "window": (3, 0), "L": 3},
        **PAIRED["mask array"],
    },
    "key lengths and mask value": {
        **{"key_lengths": Generated(key_lengths), "L": 3},
        "mask": masks.causal() & masks.dilated(2),
    },
    "key lengths and offset": {"key_lengths": Generated(key_lengths), **PAIRED["offset int"]},
    "one key length": {"key_lengths": 6, "is_causal": True, "L": 3},
    "pages": PAGES,
    "pages, LHD": PAGES | {"layout": "...LHD", "G": 1},
    "pages, many keys": PAGES | {"batch": (3,), "L": 1, "S": 640, "page": 16, "E": 5},
    "scale 0": {"scale": 0.0},
    "scale below 0": {"scale": -0.4},
    "scale 0, causal": {"scale": 0.0, "is_causal": True},
    "scale below 0, causal": {"scale": -0.4, "is_causal": True},
    "softcap 50": {"softcap": 50.0},
    "one key/value head": {"H": 4, "G": 1},
    "groups of three heads": {"H": 6, "G": 2},
    "five items, nine heads": {"batch": (5,), "H": 9, "L": 3},
    "D = 0": {"D": 0, "E": 3},
    "D = 1": {"D": 1},
    "E = 1": {"E": 1},
    "E > D": {"D": 4, "E": 9},
    "D = 20": {"D": 20},
    "D = 80": {"D": 80},
    "D = 192": {"D": 192, "L": 5, "S": 9},
    "E = 192": {"E": 192, "L": 5, "S": 9},
    "one query, one key": {"L": 1, "S": 1},
    "decode": {"L": 1, "S": 33, "is_causal": True, "H": 4, "G": 2},
    "key without batch axes": {"key_batch": (), "value_batch": ()},
    "query without batch axes": {"batch": (), "key_batch": (2,), "value_batch": (2,)},
    "value alone in a batch": {"batch": (), "key_batch": (), "value_batch": (3,)},
    "rank 6": {"batch": (2, 1, 2)},
    "rank 6, mask function": {"batch": (2, 3, 2), "L": 7, "mask": two_in_three},
}

EMPTY_ROWS: Group = {
    "mask hides some rows": {"mask": Generated(mask_with_empty_rows)},
    "mask hides all": {"mask": Generated(lambda case, rng: np.zeros((case.L, case.S), bool))},
    "function hides some rows": {"mask": lambda b, h, i, j: (i % 3 != 0) & (j >= 0)},
    "function hides all": {"mask": lambda b, h, i, j: (i < 0) & (j < 0)},
    "causal, L > S": {"is_causal": True, "L": 17, "S": 7},
    "bias hides some rows": {"bias": bias_with(lambda i, j: i % 3 == 0)},
    "bias hides all": {"bias": bias_with(lambda i, j: i >= 0)},
    "score_mod hides some rows": {"score_mod": hiding(lambda b, h, i, j: i % 3 == 0)},
    "score_mod hides all": {"score_mod": hiding(lambda b, h, i, j: i >= 0)},
    "window behind all keys": {"window": (1, 0), "query_offset": 9},
    "window ahead of all keys": {"window": (0, 1), "query_offset": -9},
    "causal and mask share no key": {"is_causal": True, "mask": mask_without(*range(5))},
    "mask and bias share no key": {
        "mask": mask_without(0, 2, 4, 6, 8, 10),
        "bias": bias_with(lambda i, j: j % 2 == 1),
    },
    "sink of -inf in an empty row": {
        **ALONE["sink of -inf"],
        "mask": Generated(mask_with_empty_rows),
    },
    "S = 0": {"S": 0},
    "S = 0, causal": {"S": 0, "is_causal": True},
    "S = 0, mask": {"S": 0, **PAIRED["mask array"]},
    "S = 0, mask function": {"S": 0, "mask": two_in_three},
    "S = 0, window": {"S": 0, "window": (1, 1)},
    "S = 0, score_mod": {"S": 0, "score_mod": bent},
    "S = 0, rank 2": {"S": 0, **PAIRED["rank 2"]},
    "S = 0, LHD": {"S": 0, "layout": "...LHD"},
}

NO_ROWS: Group = {
    "L = 0": {"L": 0},
    "L = 0, causal": {"L": 0, "is_causal": True},
    "L = 0, mask function": {"L": 0, "mask": two_in_three},
    "L = 0, LHD": {"L": 0, "layout": "...LHD"},
    "E = 0": {"E": 0},
    "no head": {"H": 0},
    "L = 0, S = 0": {"L": 0, "S": 0},
    "no batch item": {"batch": (0,)},
    "no batch item, causal": {"batch": (0,), "is_causal": True},
    "no batch item, S = 0": {"batch": (0,), "S": 0},
    "no batch item, broadcast": {"batch": (0, 2), "key_batch": (2,), "value_batch": (1, 2)},
}

ADVERSARIAL: Group = {
    "outliers": {"values": "outliers", "batch": (1,), "L": 33, "S": 129, "D": 64},
    "outliers, causal": {"values": "outliers", "L": 65, "S": 65, "D": 32, "is_causal": True},
    "scores of 1e4": {"values": "scores of 1e4", "L": 33, "S": 33},
    "scores of 1e4, softcap": {"values": "scores of 1e4", "L": 33, "S": 65, "softcap": 30.0},
    "scores of 1e4, causal": {"values": "scores of 1e4", "L": 33, "S": 33, "is_causal": True},
    "scores of 1e4, sinks": {
        **{"values": "scores of 1e4", "L": 33, "S": 33},
        "sinks": Generated(lambda case, rng: np.linspace(-1e4, 2e4, case.H)),
    },
    "bias of 1e4": {"bias": Generated(lambda case, rng: 1e4 * rng.normal(size=case.score_shape))},
    "bias of -1e4 in some rows": {
        "bias": Generated(
            lambda case, rng: np.where(
                np.arange(case.L)[:, None] % 3, rng.normal(size=(case.L, case.S)), -1e4
            )
        )
    },
    "equal scores": {"values": "equal scores", "S": 33},
    "zero values": {"values": "zero values"},
    "subnormal": {"values": "subnormal", "S": 33},
    "large values": {"values": "large values", "S": 33},
    "cancelling values": {"values": "cancelling values", "S": 32},
}

#: Inputs that show mistakes which random ones hide. Long ones have no copies in other dtypes.
SEPARATING: Group = {
    **{
        f"{L} x {S}, one key each{name}": {
            **{"values": "one key each", "batch": (1,), "H": 1, "L": L, "S": S, "D": 32},
            **fields,
        }
        for L, S, name, fields in (
            *((n, 300, "", {}) for n in (1, 300)),
            (300, 300, ", window", {"window": (40, 0)}),
            (2, 2800, "", {}),
            (1, 33000, "", {}),
        )
    },
    "300 x 300, causal": {"batch": (1,), "H": 1, "L": 300, "S": 300, "is_causal": True},
    "scores of 30": {"values": "scores of 30", "S": 33},
    "values of mean 1000": {"values": "values of mean 1000", "S": 130, "L": 5},
    "items unlike": {"values": "items unlike", "batch": (3,), "S": 70},
}

# Keys 3 and 4 are hidden from every row. Other poisoned keys are hidden from some rows, whose
# results must not change; the rows that see them must become NaN.
HIDDEN: Group = {
    "mask array": {"mask": mask_without(3, 4)},
    "mask function": {"mask": lambda b, h, i, j: (j < 3) | (j > 4)},
    "bias": {"bias": bias_with(lambda i, j: (j == 3) | (j == 4))},
    "score_mod": {"score_mod": hiding(lambda b, h, i, j: (j == 3) | (j == 4))},
    "window": {"window": (2, None), "L": 5, "S": 17},
    "causal": {"is_causal": True, "query_offset": -9},
    "key_lengths": {"key_lengths": 3},
}
POISONED: Group = {
    f"{poison} under {name}": {"poison": poison, "poisoned": (3, 4), **fields}
    for poison in (math.nan, math.inf, -math.inf)
    for name, fields in HIDDEN.items()
}
# In one array only, so that no other NaN hides the effect.
POISONED |= {
    f"{poison} in a {name} under {how}": {**fields, "poison_in": (name,)}
    for poison, name in ((math.nan, "key"), (math.inf, "value"))
    for how in HIDDEN
    for fields in (POISONED[f"{poison} under {how}"],)
}
LATER: Fields = {"poison": math.nan, "poisoned": (5,), "is_causal": True}
POISONED |= {
    "nan in a query": {"poison": math.nan, "poisoned": (3,), "poison_in": ("query",)},
    "nan in a query of which some rows are empty": {
        **{"poison": math.nan, "poisoned": (0, 4), "poison_in": ("query",)},
        **EMPTY_ROWS["function hides some rows"],
    },
    **{
        f"{poison} in a value seen by later rows": LATER
        | {"poison": poison, "poison_in": ("value",)}
        for poison in (math.nan, math.inf, -math.inf)
    },
    "nan seen by later rows": LATER,
    "nan in a key seen by later rows": LATER | {"poison_in": ("key",)},
    "nan seen through a window": {"poison": math.nan, "poisoned": (5,), "window": (2, 1)},
    "nan seen by even rows": {
        "poison": math.nan,
        "poisoned": (5,),
        "mask": lambda b, h, i, j: (j != 5) | (i % 2 == 0),
    },
    "nan seen far away": {
        **{"poison": math.nan, "poisoned": (300,), "batch": (1,), "D": 4, "L": 65, "S": 513},
        **{"is_causal": True, "query_offset": 270},
    },
}

LAYOUTS: Group = {
    f"{view}, {name}": {"view": view, **fields}
    for view in VIEWS
    if view is not None
    for name, fields in {
        "plain": {},
        "mask, bias": {**PAIRED["mask array"], **PAIRED["bias"]},
        "causal, LHD": {"is_causal": True, "layout": "...LHD"},
    }.items()
} | {
    f"{view}, {name} alone": {"view": view, "viewed": name, **PAIRED["mask array"]}
    for view in ("transposed", "rows in steps", "zero strides")
    for name in (*ARRAYS, "mask")
}

# Two options whose order shows. They are six, so that the turns of the dtypes do not change.
AFTER_SOFTCAP = ("bias", "mask array", "causal", "window", "sinks")
IN_ORDER: Group = {
    f"{one}, then {other}": PAIRED[one] | PAIRED[other]
    for one, other in (("scale", "bias"), *product(["softcap"], AFTER_SOFTCAP))
}

#: The topics, with the cases that each show one sentence of the semantics.
TOPICS: dict[str, Group] = {
    "formula": PAIRED | ALONE,
    "rows without a visible key": EMPTY_ROWS,
    "nothing to compute": NO_ROWS,
    "extreme values": ADVERSARIAL,
    "inputs that separate": SEPARATING,
    "NaN and infinity": POISONED,
    "lengths": {},
    "memory layouts": LAYOUTS,
    "order of the steps": IN_ORDER,
    TOPIC: CACHES,
}
