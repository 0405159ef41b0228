"""The cases themselves: every feature has one, and no option of one is idle."""

import numpy as np
import pytest

from polyattn import attention, attention_partial
from polyattn._core.call.features import DTYPES, FEATURES
from polyattn.conformance import CASES, ESSENTIAL
from polyattn.conformance.checks.gradients import DERIVATIVES

#: What these options ask for is what happens without them.
IDLE = {
    "is_causal": {
        *("decode", "offset past the end", "offset beyond int32", "long offset beyond int32"),
        *("1 x 1, causal", "1 x 2, causal", "1 x 700, causal"),
        *("1 x 700 with causal", "pages, many keys", "selected keys, many steps"),
    },
    "query_offset": {"selected keys, dropout, bias, sinks"},
    "key_lengths": {"long key lengths and offset", "cache, full"},
    "window": {"window of none bound", "long window of none bound"},
    "scale": {"equal scores, score norm"},
    "similarity": {"zero queries, cosine"},
    "normalizer": {"scores of 1e4, sparsemax"},
    "sinks": {
        *("low sinks", "long low sinks", "sink of -inf", "long sink of -inf"),
        *("sink of -inf in an empty row", "long sink of -inf in an empty row"),
    },
}


def test_every_feature_and_every_dtype_has_a_case():
    needed = set().union(*(case.features for case in CASES.values()))
    assert needed | {"logsumexp", *DERIVATIVES} == set(FEATURES)
    assert set().union(*(case.features for case in ESSENTIAL.values())) == needed
    for cases in (CASES, ESSENTIAL):
        assert {case.dtype for case in cases.values()} == set(DTYPES)


@pytest.mark.parametrize("name", DERIVATIVES)
def test_every_feature_has_a_case_of_each_derivative(name):
    cases = DERIVATIVES[name].cases.values()
    needed = set().union(*(case.features for case in cases))
    # A derivative gets gathered keys.
    assert needed | {"logsumexp", "block_table", *DERIVATIVES} == set(FEATURES)
    assert {case.dtype for case in cases} == set(DTYPES)
    in_float64 = set().union(*(case.features for case in cases if case.dtype == "float64"))
    assert {"normalizer", "score_expression", "score_norm", "similarity", "softcap"} <= in_float64


def idle_options(case):
    """The options without which the result is the same, bit for bit."""
    arrays, options = case.arguments()
    # A normalizer has no logsumexp.
    run = attention if "normalizer" in case.features else attention_partial
    whole = run(*arrays, **options, kernel="dense")
    # Without a table or lengths, pages are no call.
    needed = {"block_table", "key_lengths"} if case.page else set()
    for name in options.keys() - {"layout"} - needed:
        others = {other: x for other, x in options.items() if other != name}
        without = run(*arrays, **others, kernel="dense")
        pairs = [(whole, without)] if run is attention else zip(whole, without, strict=True)
        if all(np.array_equal(*pair, equal_nan=True) for pair in pairs):
            yield name


@pytest.mark.slow
def test_a_kernel_that_ignores_an_option_of_a_case_fails_it():
    """Or the option is listed: it says what would have happened anyway."""
    cases = [
        case
        for case in CASES.values()
        if case.dtype == "float32" and 0 not in (*case.score_shape, case.value_size)
    ]
    idle = {(name, case.name) for case in cases for name in idle_options(case)}
    assert idle == {(name, case) for name, those in IDLE.items() for case in those}
