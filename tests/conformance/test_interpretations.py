"""A result that follows another meaning is named by it: each meaning once, by what peers do."""

from typing import NamedTuple

import numpy as np
import pytest

from polyattn import attention, attention_weights
from polyattn.conformance import CASES, ESSENTIAL, make_case
from polyattn.conformance.functions.check import AGREES, DIFFERS, check_callable
from polyattn.conformance.functions.interpretations import INTERPRETATIONS, GivenCall, changes_of
from polyattn.conformance.reference.textbook import textbook


class Fault(NamedTuple):
    """A mistake of a function: a change of its arguments, or another function in its place."""

    case: str
    meaning: str
    change: object = lambda **given: {}  # returns arguments to replace
    attend: object = attention


def capped_last(query, key, value, *, softcap, bias=0, is_causal=False):
    """Attention that caps the scores after the bias, and after it hides keys."""
    scores = query @ key.mT / np.sqrt(query.shape[-1]) + bias
    if is_causal:
        scores = np.where(np.tri(*scores.shape[-2:]), scores, np.finfo("float32").min)
    weights = np.exp(softcap * np.tanh(scores / softcap))
    return (weights / weights.sum(-1, keepdims=True) @ value).astype(query.dtype)


def multiplied(query, key, value, **options):
    """Attention that multiplies hidden values by 0."""
    return attention_weights(query, key, **options) @ value


def in_float32(*arrays):
    return attention(*[x.astype("float32") for x in arrays]).astype("float64")


def in_heads_after_length(*arrays):
    return np.swapaxes(attention(*[np.swapaxes(x, -3, -2) for x in arrays]), -3, -2)


def nan_in_empty_rows(query, key, value, mask):
    output = attention(query, key, value, mask=mask)
    return np.where(np.any(mask, -1, keepdims=True), output, np.nan).astype(query.dtype)


def root_of_scale(query, key, value):
    root = float(np.sqrt(1 / np.sqrt(np.float32(query.shape[-1]))))
    return attention(query * root, key * root, value, scale=1.0)


def zeros_for_nan(query, key, value):
    return np.nan_to_num(attention(query, key, value))


LESS = "rows see one key less to the {}"
FAULTS = {
    "causal from the first": Fault(
        "causal x L < S",
        "rows count from the first key (query_offset=0)",
        lambda **given: {"query_offset": 0},
    ),
    "leak": Fault(
        "nan under mask array", "a hidden NaN or infinity reaches the row", attend=multiplied
    ),
    "queries of NaN": Fault(
        "nan in a query", "a row whose query is NaN is 0", attend=zeros_for_nan
    ),
    "heads after length": Fault("plain", "heads come after length", attend=in_heads_after_length),
    "short window": Fault("window", LESS.format("left"), lambda **given: {"window": (2, 2)}),
    "strictly causal": Fault("causal", LESS.format("right"), lambda **given: {"query_offset": -1}),
    "heads in turn": Fault(
        "grouped heads",
        "query head h reads key/value head h % G",
        lambda key, value, **given: {
            "key": np.tile(key, (2, 1, 1)),
            "value": np.tile(value, (2, 1, 1)),
        },
    ),
    "polarity": Fault(
        "mask array", "True in a mask leaves a key out", lambda mask, **given: {"mask": ~mask}
    ),
    "mask as numbers": Fault(
        "mask array",
        "a mask is added as 0 and 1",
        lambda mask, **given: {"mask": None, "bias": mask.astype("float32")},
    ),
    "softcap after bias": Fault(
        "softcap, then bias", "softcap comes after the bias", attend=capped_last
    ),
    "softcap after causal": Fault(
        "softcap, then causal", "softcap comes after the mask", attend=capped_last
    ),
    "scaled bias": Fault(
        "scale, then bias",
        "the scale multiplies the bias too",
        lambda scale, bias, **given: {"bias": scale * bias},
    ),
    "no scale": Fault("plain", "scores are not scaled", lambda **given: {"scale": 1.0}),
    "scale of 1 / D": Fault(
        "causal", "the scale is squared (1 / D)", lambda **given: {"scale": 1 / 8}
    ),
    "ignored": Fault("scale", "scale is ignored", lambda **given: {"scale": None}),
    "mean": Fault(
        "mask hides some rows",
        "a row without keys is the mean of the values",
        lambda mask, **given: {"mask": None, "bias": np.where(mask, 0, np.float32(-1e30))},
    ),
    "NaN in empty rows": Fault(
        "mask hides some rows", "a row without keys is NaN", attend=nan_in_empty_rows
    ),
    "empty rows see all": Fault(
        "mask hides some rows",
        "a row without keys sees all keys",
        lambda mask, **given: {"mask": mask | ~mask.any(-1, keepdims=True)},
    ),
    "padded": Fault(
        "bias (B, 1, L, 1)",
        "the last axis of a mask is padded rather than broadcast",
        lambda bias, **given: {
            "bias": np.pad(bias, [*[(0, 0)] * 3, (0, 10)], constant_values=-np.inf)
        },
    ),
    "rounded scale": Fault(
        "plain, float64",
        "the scale is rounded to float32",
        lambda **given: {"scale": float(np.float32(8**-0.5))},
    ),
    "root of a scale": Fault(
        "plain, float64", "the root of the scale is rounded to float32", attend=root_of_scale
    ),
    "NaN": Fault(
        "scale below 0", "every row is NaN", lambda query, **given: {"query": query * np.nan}
    ),
    "precision": Fault("plain, float64", "computed in float32", attend=in_float32),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_difference_is_interpreted(name):
    fault = FAULTS[name]

    def wrong(query, key, value, **options):
        arrays = {"query": query, "key": key, "value": value}
        given = arrays | options
        given |= fault.change(**given)
        return fault.attend(given.pop("query"), given.pop("key"), given.pop("value"), **given)

    case = CASES[fault.case]
    assert check_callable(attention, case, np.array, np.asarray).status == AGREES
    finding = check_callable(wrong, case, np.array, np.asarray)
    assert (finding.status, finding.interpretation) == (DIFFERS, fault.meaning)
    assert finding.deviation.units > 10


def test_every_meaning_has_a_fault():
    known = {fault.meaning for fault in FAULTS.values()}
    of_dtypes = {"computed in float16", "computed in bfloat16"}
    others = {
        name for name in INTERPRETATIONS if name.startswith("rows see") or name.endswith("ignored")
    }
    assert INTERPRETATIONS.keys() - others == known - others | of_dtypes


def test_sums_in_16_bits_are_named():
    case = make_case("sums", dtype="float16", values="keys of mean 64", L=5, S=257, D=32)
    finding = check_callable(lambda *arrays: textbook(*arrays)[0], case, np.array, np.asarray)
    assert (finding.status, finding.interpretation) == (DIFFERS, "computed in float16")


def test_a_difference_without_a_meaning_has_none():
    finding = check_callable(
        lambda q, k, v: attention(q, k, v) + q, CASES["plain"], np.array, np.asarray
    )
    assert (finding.status, finding.interpretation) == (DIFFERS, "")
    assert "limit" in finding.deviation.fault


def test_each_meaning_of_each_case_is_a_call():
    """The textbook evaluates one row of each that differs in features or shapes."""
    asked = set()
    for case in ESSENTIAL.values():
        shapes = case.L > case.S, 0 in (*case.score_shape, case.D, case.value_size)
        call = GivenCall(*case.arguments())
        for name, changed in changes_of(call):
            key = case.features, name, case.poison is None, shapes
            if key in asked:
                continue
            asked.add(key)
            changed = call.arguments | changed
            changed.pop("computed in", None)
            with np.errstate(all="ignore"):
                output, _ = textbook(**changed, rows=case.rows and case.rows[:1])
            assert output.shape[-1] == case.value_size, name
