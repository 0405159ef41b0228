"""Make all cases: those of the topics, pairs of options, lengths, and copies in other dtypes."""

# ruff: noqa: N806 -- the letters are those of the semantics

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import combinations, cycle, pairwise

from polyattn._core.call.features import DTYPES
from polyattn.conformance.cases.cache_cases import CORNERS, TOPIC
from polyattn.conformance.cases.case import Case, Fields, make_case, sampled
from polyattn.conformance.cases.expression_cases import STEPS, make_expression_cases
from polyattn.conformance.cases.generators import bent, two_in_three
from polyattn.conformance.cases.topics import (
    ADVERSARIAL,
    ALONE,
    EMPTY_ROWS,
    IN_ORDER,
    LAYOUTS,
    NO_ROWS,
    OFFSETS,
    PAIRED,
    POISONED,
    SEPARATING,
    TOPICS,
)

# For every tile size an edge of a tile is near one of these.
LENGTHS = (1, 2, 7, 31, 33, 63, 64, 65, 127, 129)
EDGES = [(n, n) for n in LENGTHS]
EDGES += [p for n, m in pairwise(LENGTHS) for p in ((n, m), (m, n))]
EDGES += [(1, 700), (700, 1), (7, 513), (513, 33), (65, 700), (700, 65), (129, 513)]

LONG: Fields = {"batch": (1,), "H": 1, "D": 4, "L": 65, "S": 700}
TALL: Fields = LONG | {"H": 2, "L": 150, "S": 40, "D": 16}
MANY: Fields = {
    **{"is_causal": True, "window": (10, None), "mask": two_in_three, "softcap": 2.0},
    **{"score_mod": bent, **PAIRED["bias"], **PAIRED["sinks"], **PAIRED["grouped heads"]},
    **{"E": 5, "L": 33, "S": 129, "layout": "...LHD", **PAIRED["offset array"]},
}


def make_cases() -> Iterator[Case]:
    for topic, cases in TOPICS.items():
        for name, fields in cases.items():
            yield make_case(name, topic=topic, **fields)
            if name in EMPTY_ROWS and "sinks" not in fields:
                yield make_case(f"{name}, sinks", topic=topic, **fields, **PAIRED["sinks"])
    for (first, a), (second, b) in combinations(PAIRED.items(), 2):
        if not a.keys() & b.keys():
            yield make_case(f"{first} x {second}", **a, **b)
    yield make_case("many", **MANY)
    for name, fields in STEPS.items():
        yield make_case(name, **fields)
    yield from make_long_cases()


def make_long_cases() -> Iterator[Case]:
    long = partial(make_case, topic="lengths")
    for L, S in EDGES:
        yield long(f"{L} x {S}", **LONG | {"L": L, "S": S})
        yield long(f"{L} x {S}, causal", **LONG | {"L": L, "S": S}, is_causal=True)
    for name, fields in (PAIRED | ALONE | EMPTY_ROWS).items():
        if not fields.keys() & {"L", "S", "D", "batch"}:
            yield long(f"long {name}", **LONG | {"H": 2, "L": 17} | fields)
    for name, fields in PAIRED.items():
        if not fields.keys() & {"L", "S", "D", "batch"}:
            yield long(f"1 x 700 with {name}", **LONG | {"H": 2, "L": 1} | fields)
            yield long(f"150 x 40 with {name}", **TALL | fields)
    yield long("513 x 700, causal, window", **LONG | {"L": 513}, window=(130, 0))
    yield long("150 x 160, offset array", **LONG | {"batch": (2,), "L": 150, "S": 160} | OFFSETS)
    yield long("1030 x 1030, window", **LONG | {"L": 1030, "S": 1030}, window=(20, 5))
    yield long("700 x 700, causal", **LONG | {"L": 700, "D": 2}, is_causal=True)


def in_other_dtypes(cases: Iterable[Case]) -> Iterator[Case]:
    """Yield all cases in float32, and those of one feature and the hard ones in other dtypes.

    The plain features and extreme values are in every dtype; each other case is in one more, by
    turns: a kernel casts once, before the options matter.
    """
    others = tuple(dtype for dtype in DTYPES if dtype != "float32")
    turns = cycle(others)
    for case in cases:
        yield case
        is_plain = " x " not in case.name and not case.name.startswith("long")
        if is_plain and case.topic != TOPIC:
            in_all = case.name == "plain" or case.name in PAIRED | ADVERSARIAL | SEPARATING | STEPS
            for dtype in others if in_all else (next(turns),):
                yield replace(case, name=f"{case.name}, {dtype}", dtype=dtype)


# A prime, so that the multiples of a number are the sizes below it, each once.
_SIZES = 73


def size_cases(dtype: str) -> Iterator[Case]:
    """Yield cases that have every size of vectors from 1 to 72, and every length from 1 to 130."""
    for n in range(1, _SIZES):
        lengths = n * 41 % _SIZES, 58 + n * 47 % _SIZES
        L, S = lengths if n % 2 == (dtype == "float64") else lengths[::-1]
        name = f"D = {n}, {dtype}"
        yield make_case(name, dtype=dtype, batch=(1,), H=1, D=n, E=n * 29 % _SIZES, L=L, S=S)


#: All cases by name.
CASES = {
    case.name: sampled(case)
    for cases in (in_other_dtypes(make_cases()), make_expression_cases())
    for case in cases
}

#: One case for each feature and corner: for libraries with slow calls.
ESSENTIAL = {
    name: CASES[name]
    for name in (
        *("plain", "plain, float16", "plain, bfloat16", "plain, float64"),
        *(PAIRED | EMPTY_ROWS | NO_ROWS | ADVERSARIAL | IN_ORDER),
        *(name for name in POISONED if name.startswith("nan ") or "seen" in name),
        *(name for name in LAYOUTS if name.endswith("plain")),
        *("score_mod hides keys", "outliers, float16", "many", *STEPS, "alibi value", "pages"),
        *CORNERS,
        *(*SEPARATING, "scores of 30, float16", "scores of 30, bfloat16"),
        *("values of mean 1000, float16", "scale 0", "window of one", "causal x window"),
        *("16 x 16, causal window", "16 x 16, mask and bias"),
        *("33 x 31", "65 x 127, causal", "129 x 127, causal", "decode", "offset past the end"),
    )
}
