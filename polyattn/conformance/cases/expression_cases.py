"""List the cases with mask and score expressions, replaced steps, and dropout."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from polyattn import masks, scores
from polyattn.conformance.cases.case import Case, Fields, Generated, Group, make_case
from polyattn.conformance.cases.generators import (
    bent,
    normal,
    offsets,
    random_mask,
    slope_of_bent,
    two_in_three,
)

# ---- masks -------------------------------------------------------------------------------------


def counts(case: Case, *numbers: int) -> Any:
    """Return a number for each batch item."""
    return np.resize(numbers, case.full_batch)


def documents(case: Case, rng: Any, length: int) -> Any:
    """Return ids of consecutive documents, different in each batch item."""
    return np.sort(rng.integers(0, 4, size=(*case.full_batch, length)), axis=-1)


def prefix_of_items(case: Case, rng: Any) -> Any:
    return masks.causal() | masks.prefix(counts(case, 3, 0, case.S))


def packed(case: Case, rng: Any) -> Any:
    return masks.causal() & masks.segments(documents(case, rng, case.L))


def packed_apart(case: Case, rng: Any) -> Any:
    """Return unordered segments of queries and keys, without a batch axis."""
    queries, keys = (rng.integers(0, 3, size=length) for length in (case.L, case.S))
    return masks.segments(queries, keys)


def by_position(case: Case, rng: Any) -> Any:
    """Return a window with first tokens, over a circular cache of which some slots are empty."""
    rows = rng.integers(0, 12, size=(*case.full_batch, case.L))
    keys = np.roll(np.arange(case.S), 5) - 3
    return masks.positions(rows, keys, masks.causal() & (masks.window(4, 0) | masks.prefix(2)))


def drafts(case: Case, rng: Any) -> Any:
    index = np.arange(case.L)
    far = rng.integers(1, 4, (*case.full_batch, case.L))
    return masks.tree(np.maximum(index - far, -1))


def selected(case: Case, rng: Any) -> Any:
    """Return a third of the keys of each row of each head, some twice and some absent."""
    shape = (*case.full_batch, case.H, case.L, max(1, case.S // 3))
    return masks.selected(rng.integers(-1, case.S, shape))


def few_selected(case: Case, rng: Any) -> Any:
    """Return so few keys of each row of each head that they are read by themselves."""
    return masks.selected(rng.integers(-1, case.S, (*case.full_batch, case.H, case.L, 4)))


def a_block(case: Case, rng: Any) -> Any:
    """Return a block of 4 keys for all rows of each head."""
    index = rng.integers(0, case.S // 4, (*case.full_batch, case.H, 1, 1))
    return masks.blocks(index, (case.L, 4)) & masks.causal()


def selected_of_all(case: Case, rng: Any) -> Any:
    """Return keys that all heads and items share, and causal ones of them."""
    keys = rng.permuted(np.tile(np.arange(case.S + 2), (case.L, 1)), axis=-1)
    return masks.causal() & masks.selected(keys[:, : max(1, case.S // 2)])


def selected_and_rule(case: Case, rng: Any) -> Any:
    return selected(case, rng) & masks.rule(two_in_three)


def blocks(case: Case, rng: Any) -> Any:
    """Return two blocks of 5 keys for each 4 rows, or one."""
    shape = (*case.full_batch, case.H, -(-case.L // 4), 2)
    return masks.blocks(rng.integers(-1, -(-case.S // 5), shape), (4, 5)) & ~masks.dilated(3)


def padded(case: Case, rng: Any) -> Any:
    return masks.padding(counts(case, case.S - 2, 1, case.S), counts(case, case.L, case.L - 3))


def per_head(case: Case, rng: Any) -> Any:
    return masks.window(1, 0) | masks.dense(random_mask("1H1S").make(case, rng))


def by_head(case: Case, rng: Any) -> Any:
    """Return a mask with the same coverage of tiles for each head, but different keys."""
    return masks.prefix(case.S - 1) & masks.rule(two_in_three)


def compiled(case: Case, rng: Any) -> Any:
    mask = masks.rule(two_in_three) & ~masks.window(2, 3)
    items = math.prod(case.full_batch)
    return masks.compile(mask, case.L, case.S, batch=items, heads=case.H, tile=4)


def composed(case: Case, rng: Any) -> Any:
    ids = documents(case, rng, case.L)
    near = masks.segments(ids) & ~masks.dilated(3) | masks.global_tokens(2)
    return near & masks.padding(counts(case, case.S - 1, 4))


def without_3_and_4(case: Case, rng: Any) -> Any:
    return masks.prefix(3) | ~masks.prefix(counts(case, 5))


# ---- scores ------------------------------------------------------------------------------------


def relative(case: Case, rng: Any) -> Any:
    table = scores.relative_bias(rng.normal(size=(8, case.H)), max_distance=8)
    return scores.temperature(0.8) >> table >> scores.softcap(1.5)


def backwards(case: Case, rng: Any) -> Any:
    table = rng.normal(size=(6, case.H))
    return scores.relative_bias(table, bidirectional=False, max_distance=9)


def sloped(case: Case, rng: Any) -> Any:
    return scores.alibi(rng.random(case.H))


def additive(case: Case, rng: Any) -> Any:
    return scores.additive(rng.normal(size=case.D))


# ---- the cases ---------------------------------------------------------------------------------

#: One case for each of these features, in every dtype.
STEPS: Group = {
    "mask value": {"mask": Generated(prefix_of_items)},
    "score value": {"score_mod": Generated(relative)},
    "similarity": {"similarity": scores.cosine()},
    "score norm": {"scale": scores.by_norm(5.0)},
    "normalizer": {"normalizer": scores.sparsemax()},
    "dropout": {"dropout": (0.25, 7)},
}

SHAPES: Group = {
    "grouped heads, LHD": {"H": 4, "G": 2, "layout": "...LHD"},
    "broadcast batch, E != D": {"batch": (2, 1), "key_batch": (1, 3), "value_batch": (3,), "E": 5},
    "rank 2, L > S": {"batch": (), "H": 1, "one_head": True, "L": 17, "S": 7},
    "rank 5, L < S": {"batch": (2, 2), "L": 7, "S": 17},
}
MEETING: dict[str, Group] = {
    "mask value": {
        "offset int": {"query_offset": 2},
        "offset array": {"query_offset": Generated(offsets)},
        "bias and sinks": {"bias": normal(), "sinks": normal("H")},
    },
    "score value": {
        "offset array": {"query_offset": Generated(offsets)},
        "softcap and causal": {"softcap": 2.0, "is_causal": True},
        "mask value": STEPS["mask value"],
    },
    "similarity": {
        "scale and mask array": {"scale": 4.0, "mask": random_mask()},
        "score norm": STEPS["score norm"],
        "softcap and scale": {"softcap": 2.0, "scale": 3.0},
    },
    "score norm": {
        "causal": {"is_causal": True},
        "window and bias as mask": {
            "window": (4, 2),
            "bias": Generated(
                lambda case, rng: np.where(
                    np.arange(case.S) % 4 == 1, -np.inf, rng.normal(size=case.score_shape)
                )
            ),
        },
        "mask value and softcap": STEPS["mask value"] | {"softcap": 2.0},
    },
    "normalizer": {
        "causal and bias": {"bias": normal(), "is_causal": True},
        "score value and mask value": STEPS["score value"] | STEPS["mask value"],
        "dropout": STEPS["dropout"],
        "softcap": {"softcap": 2.0},
    },
    "dropout": {
        "mask value": STEPS["mask value"],
        "causal and sinks": {"sinks": normal("H"), "is_causal": True},
    },
}

VARIANTS: Group = {
    "prefix": {"mask": masks.causal() | masks.prefix(4)},
    "window or global tokens": {"mask": masks.window(2, 1) | masks.global_tokens(0, 1, 7)},
    "window and dilated": {"mask": masks.window(6, 4) & masks.dilated(3), "query_offset": 1},
    "neighborhood": {"mask": masks.neighborhood((3, 5), 3, stride=(1, 2)), "L": 15, "S": 15},
    "neighborhood, causal and dilated": {
        "mask": masks.neighborhood((2, 2, 4), 2, dilation=(1, 1, 2), is_causal=(True, False, True)),
        **{"L": 9, "S": 16},
    },
    "outside of a window": {"mask": ~masks.window(1, None)},
    "packed documents": {"mask": Generated(packed)},
    "segments of queries and keys": {"mask": Generated(packed_apart), "L": 7, "S": 17},
    "positions": {"mask": Generated(by_position), "L": 7, "S": 17},
    "tree": {"mask": Generated(drafts), "L": 7, "S": 17},
    "tree, offset below 0": {"mask": Generated(drafts), "query_offset": -3},
    "selected keys": {"mask": Generated(selected)},
    "few selected keys": {"mask": Generated(few_selected), "L": 3, "S": 96},
    "a selected block": {"mask": Generated(a_block), "L": 3, "S": 96, "H": 4, "G": 2},
    "selected keys of all heads, L < S": {"mask": Generated(selected_of_all), "L": 7, "S": 17},
    "selected keys, dropout, bias, sinks": {
        **{"mask": Generated(selected), "dropout": (0.25, 7), "bias": normal()},
        **{"sinks": normal("H"), "query_offset": 2, "H": 4, "G": 2},
    },
    "selected keys, many steps": {
        **{"mask": Generated(selected_of_all), "is_causal": True, "window": (9, None)},
        **{"query_offset": Generated(offsets), "softcap": 2.0, "scale": 0.5, "E": 5},
        **{"batch": (2, 1), "key_batch": (1, 3), "value_batch": (3,)},
        "score_mod": scores.function(bent, slope_of_bent),
    },
    "selected keys and a function, sigmoid": {
        **{"mask": Generated(selected_and_rule), "normalizer": scores.sigmoid()},
        "similarity": Generated(additive),
    },
    "selected keys, score norm": {"mask": Generated(selected_of_all), "scale": scores.by_norm(5.0)},
    "blocks of keys": {"mask": Generated(blocks), "score_mod": Generated(relative)},
    "mask value per head": {"mask": Generated(per_head)},
    "mask value of a function": {"mask": masks.causal() | masks.rule(two_in_three)},
    "compiled mask": {"mask": Generated(compiled)},
    "compiled mask, L < S": {"mask": Generated(compiled), "L": 7, "S": 17},
    "composed masks": {"mask": Generated(composed)},
    "composed masks, offset below 0": {"mask": Generated(composed), "query_offset": -3},
    "alibi value": {"score_mod": Generated(sloped)},
    "alibi of six heads": {"score_mod": scores.alibi(6), "H": 6, "G": 2},
    "relative bias one way": {"score_mod": Generated(backwards), "L": 15, "S": 15},
    "score value of a function": {"score_mod": scores.softcap(3.0) >> scores.function(bent)},
    "distance": {"similarity": scores.distance(2)},
    "sum of distances": {"similarity": scores.distance(1), "scale": 0.3},
    "additive": {"similarity": Generated(additive)},
    "scale of long sequences": {"scale": scores.long_sequence(), "S": 23},
    "sigmoid": {"normalizer": scores.sigmoid()},
    "sigmoid of both signs": {"normalizer": scores.sigmoid(), "scale": -9.0},
    "dropout of most": {"dropout": (0.9, 2**64 - 1)},
    "dropout, seed of an array": {
        "dropout": Generated(lambda case, rng: (0.5, np.asarray(2**40 + 3)))
    },
    "dropout of a part": {"dropout": (0.4, 5, (1, 2, 3, 6))},
}

EMPTY: Group = {
    "mask value hides some rows": {"mask": Generated(padded)},
    "mask value hides all": {"mask": masks.prefix(0) | ~masks.prefix(11)},
    **{
        f"causal, L > S, {name}": {"is_causal": True, "L": 17, "S": 7} | fields
        for name, fields in (STEPS | {"sigmoid": VARIANTS["sigmoid"]}).items()
        if name not in ("mask value", "score value")
    },
    **{f"S = 0, {name}": {"S": 0} | fields for name, fields in STEPS.items()},
}

NORMALIZED: Group = {
    "sparsemax": STEPS["normalizer"],
    "sigmoid": VARIANTS["sigmoid"],
    "score norm": STEPS["score norm"],
    "cosine": STEPS["similarity"],
}
EXTREME: Group = {
    f"scores of 1e4, {name}": {"values": "scores of 1e4", "L": 33, "S": 33} | fields
    for name, fields in NORMALIZED.items()
} | {
    "equal scores, score norm": {"values": "equal scores"} | STEPS["score norm"],
    "equal scores, sparsemax": {"values": "equal scores"} | STEPS["normalizer"],
    "zero queries, cosine": {"values": "equal scores"} | STEPS["similarity"],
}

HIDDEN: Fields = {"mask": Generated(without_3_and_4), "poisoned": (3, 4)}
POISONED: Group = {
    **{f"{x} under a mask value": HIDDEN | {"poison": x} for x in (math.nan, math.inf, -math.inf)},
    **{
        f"nan under a mask value, {name}": HIDDEN | {"poison": math.nan} | fields
        for name, fields in (STEPS | {"sigmoid": VARIANTS["sigmoid"]}).items()
        if name != "mask value"
    },
    **{
        f"nan in a key seen by later rows, {name}": {
            **{"poison": math.nan, "poisoned": (5,), "poison_in": ("key",), "is_causal": True},
            **NORMALIZED[name],
        }
        for name in ("sparsemax", "sigmoid", "score norm")
    },
}

LONG: Fields = {"batch": (1,), "D": 4}
SQUARE: Fields = {"L": 150, "S": 150}
TALL: Fields = {"L": 150, "S": 40, "is_causal": True}
LENGTHS: Group = {
    "65 x 700, prefix": {"mask": masks.causal() | masks.prefix(30), "L": 65, "S": 700},
    "150 x 150, packed documents": SQUARE | {"mask": Generated(packed)},
    "150 x 150, composed masks": SQUARE | {"mask": Generated(composed)},
    # Whole blocks of rows see no key by position, and the mask is evaluated nevertheless.
    "150 x 40, causal and padding": TALL | {"mask": Generated(padded)},
    "150 x 40, causal and a mask (S,)": TALL | {"mask": random_mask("S")},
    "150 x 150, window past all keys and a mask array": (
        SQUARE | {"mask": random_mask(), "window": (9, 9), "query_offset": 100}
    ),
    "150 x 150, composed masks before all keys": (
        SQUARE | {"mask": Generated(composed), "is_causal": True, "query_offset": -120}
    ),
    "129 x 300, dropout": {"dropout": (0.3, 11), "is_causal": True, "L": 129, "S": 300},
    "150 x 150, blocks of keys": SQUARE | {"mask": Generated(blocks), "H": 4, "G": 2},
    "65 x 700, selected keys": {"mask": Generated(selected_of_all), "L": 65, "S": 700},
    "150 x 150, heads that differ": SQUARE | {"mask": Generated(by_head), "H": 4},
    "65 x 513, score value": {"score_mod": Generated(relative), "L": 65, "S": 513},
}


# Lengths at which a kernel may change its algorithm. Only a few rows are checked: the first and the
# last, their neighbours, and some at the edges of blocks.
VERY_LONG: Group = {
    "4096 x 4096, window, padding": {
        **{"mask": Generated(padded), "window": (700, 5), "L": 4096, "S": 4096},
        "rows": (0, 511, 512, 4095),
    },
    "5000 x 1100, causal and a mask (S,)": {
        **{"mask": random_mask("S"), "is_causal": True},
        **{"L": 5000, "S": 1100, "rows": (0, 3899, 3901, 3999, 4097, 4999)},
    },
    "1100 x 4500, documents before all keys": {
        **{"mask": Generated(packed_apart), "is_causal": True, "query_offset": -600},
        **{"L": 1100, "S": 4500, "rows": (0, 599, 601, 1099)},
    },
    "17 x 20000, bias": {"bias": normal("LS"), "L": 17, "S": 20000, "rows": (0, 16)},
    "20000 x 17, alibi, sinks": {
        **{"score_mod": Generated(sloped), "query_offset": -19980, "is_causal": True},
        **{"H": 4, "G": 2, "sinks": normal("H")},
        **{"L": 20000, "S": 17, "rows": (0, 8191, 8192, 16384, 19980, 19999)},
    },
    "2 x 9001, decoding, softcap": {
        **{"is_causal": True, "softcap": 2.0, "H": 4, "G": 1, "L": 2, "S": 9001, "rows": (0, 1)}
    },
}


#: Cases that accelerators take: 16 bits, even lengths, vectors of 16 numbers or more.
ACCELERATED: Group = {
    "16 x 16, causal window": {"is_causal": True, "window": (3, None)},
    "16 x 16, mask and bias": {"mask": random_mask(), "bias": normal()},
    "16 x 16, broadcast batch, E != D, expressions": {
        **{"batch": (2, 1), "key_batch": (1, 3), "value_batch": (2, 3), "E": 24},
        **STEPS["mask value"],
        **STEPS["score value"],
    },
}


def make_expression_cases() -> Iterator[Case]:
    """Make the other cases of these features, in float32 but for those of accelerators."""
    for name, fields in VERY_LONG.items():
        yield make_case(name, topic="lengths", **LONG | {"H": 1} | fields)
    for first, a in STEPS.items():
        for second, b in (SHAPES | MEETING[first]).items():
            yield make_case(f"{first} x {second}", **a | b)
    for topic, cases in {
        "formula": VARIANTS,
        "rows without a visible key": EMPTY,
        "extreme values": EXTREME,
        "NaN and infinity": POISONED,
        "lengths": LENGTHS,
    }.items():
        for name, fields in cases.items():
            long = LONG if topic == "lengths" else {}
            yield make_case(name, topic=topic, **long | fields)
    for name, fields in ACCELERATED.items():
        yield make_case(name, dtype="bfloat16", L=16, S=16, D=16, **fields)
