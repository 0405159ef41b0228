"""The yardstick itself: the oracle is right, and each classic way to be wrong is refused."""

import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from polyattn.conformance import CASES, assert_accurate, oracle
from polyattn.conformance.tolerance import deviation, exact, output_yardstick, wants_extended


def test_the_oracle_by_hand():
    """Two keys of weight 1 and 3; then a sink of weight 4 beside them."""
    q, k, v = np.ones((1, 1)), np.array([[0.0], [math.log(3)]]), np.array([[0.0], [4.0]])
    assert oracle(q, k, v, scale=1.0)[:2] == (3.0, pytest.approx(math.log(4)))
    assert oracle(q, k, v, scale=1.0, sinks=[math.log(4)])[:2] == (
        pytest.approx(1.5),
        pytest.approx(math.log(8)),
    )


@pytest.mark.parametrize(
    "case",
    [
        case
        for case in CASES.values()
        if wants_extended(case, dict(case.options)) and "dropout" not in case.features
    ],
    ids=str,
)
def test_more_digits_change_nothing_that_float64_can_hold(case):
    """The two arithmetics of the oracle agree: float64's rounding is all that is between them."""
    arrays, options = case.arguments()
    plain, extended = (oracle(*arrays, **options, extended=digits) for digits in (False, True))
    eps, tiny = np.finfo(float).eps, np.finfo(float).smallest_subnormal
    assert extended.output.dtype == np.longdouble
    off = np.abs(plain.output - extended.output)
    assert np.all(off <= 4 * eps * (extended.condition + extended.sensitivity) + case.S * tiny)
    with np.errstate(invalid="ignore"):  # -inf of an empty row, in both
        off = np.nan_to_num(np.abs(plain.logsumexp - extended.logsumexp))
    assert np.all(off <= 4 * eps * extended.logsumexp_condition)


@pytest.mark.parametrize(
    "name", ["plain", "offset 0, L < S", "mask array", "bias", "scale", "grouped heads"]
)
def test_the_oracle_agrees_with_torch(name):
    case = replace(CASES[name], dtype="float64")
    (q, k, v), options = case.arguments()
    added = options.get("mask", options.get("bias"))
    theirs = torch.nn.functional.scaled_dot_product_attention(
        *map(torch.asarray, (q, k, v)),
        attn_mask=None if added is None else torch.asarray(added),
        is_causal=options.get("is_causal", False),
        scale=options.get("scale"),
        enable_gqa=True,
    )
    assert_accurate(theirs.numpy(), case)


def test_poison_does_not_move_the_oracle():
    for case in CASES.values():
        if case.poison is not None:
            arrays, options = case.arguments(poisoned=False)
            clean, poisoned = oracle(*arrays, **options).output, exact(case).output
            untouched = np.isfinite(poisoned)
            assert np.array_equal(poisoned[untouched], clean[untouched])
            assert np.any(untouched)


def with_options(**changed):
    return lambda q, k, v, options: oracle(q, k, v, **options | changed)


def softcap_after_bias(q, k, v, options):
    options = dict(options)
    c, bias = options.pop("softcap"), options.pop("bias").astype(float)
    return oracle(
        q, k, v, **options, score_mod=lambda s, b, h, i, j: c * np.tanh((s + bias[b, h, i, j]) / c)
    )


def heads_tiled(q, k, v, options):
    """Query head h reads head h % G: right where every group has one head, wrong elsewhere."""
    times = q.shape[-3] // k.shape[-3]
    return oracle(q, np.concatenate([k] * times, -3), np.concatenate([v] * times, -3), **options)


def score_mod_after_bias(q, k, v, options):
    options = dict(options)
    mod, bias = options.pop("score_mod"), options.pop("bias").astype(float)
    return oracle(
        q, k, v, **options, score_mod=lambda s, b, h, i, j: mod(s + bias[b, h, i, j], b, h, i, j)
    )


def score_mod_before_softcap(q, k, v, options):
    options = dict(options)
    mod, c = options.pop("score_mod"), options.pop("softcap")
    return oracle(q, k, v, **options, score_mod=lambda *args: c * np.tanh(mod(*args) / c))


def one_key_dropped(q, k, v, options):
    """The last key left out, as at the edge of a tile."""
    offset = k.shape[-2] - q.shape[-2]
    return oracle(q, k[..., :-1, :], v[..., :-1, :], query_offset=offset, **options)


MISTAKES = {
    "scale of the wrong sign": ("plain", with_options(scale=-1 / math.sqrt(8))),
    "no scale": ("plain", with_options(scale=1.0)),
    "softcap after bias": ("bias x softcap", softcap_after_bias),
    "score_mod after bias": ("bias x score_mod", score_mod_after_bias),
    "score_mod before softcap": ("softcap x score_mod", score_mod_before_softcap),
    "< for <=": ("causal", with_options(query_offset=-1)),
    "top-left for bottom-right": ("causal x L < S", with_options(query_offset=0)),
    "one offset for all items": ("offset array", with_options(query_offset=2)),
    "head order tiled": ("grouped heads", heads_tiled),
    "window off by one, left": ("window", with_options(window=(2, 2))),
    "window off by one, right": ("window", with_options(window=(3, 3))),
    "window ignored": ("long window", with_options(window=None)),
    "mask ignored": ("padding mask", with_options(mask=None)),
    "bias ignored": ("bias", with_options(bias=None)),
    "sink dropped": ("sinks", with_options(sinks=None)),
    "one key dropped": ("plain", one_key_dropped),
}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_refused(name, dtype):
    of, mistake = MISTAKES[name]
    case = replace(CASES[of], dtype=dtype)
    (q, k, v), options = case.arguments()
    wrong = mistake(q, k, v, options)
    with pytest.raises(AssertionError, match="output"):
        assert_accurate(wrong.output.astype(q.dtype), case)
    with pytest.raises(AssertionError, match="logsumexp"):
        assert_accurate(exact(case).output.astype(q.dtype), case, wrong.logsumexp)


def test_what_must_be_exact_is_exact():
    """No limit excuses a number where there is none, or a leak into an empty row."""
    case = CASES["nan seen by later rows"]
    right = exact(case).output
    for wrong in (np.nan_to_num(right), np.full_like(right, np.nan), right[..., :1]):
        with pytest.raises(AssertionError, match="nan seen by later rows: output"):
            assert_accurate(wrong, case)
    case = CASES["mask hides some rows"]
    assert_accurate(exact(case).output.astype("float32"), case)
    with pytest.raises(AssertionError, match=r"must be 0"):
        assert_accurate(exact(case).output + 1e-30, case)


def test_where_there_is_no_unit_nothing_but_the_exact_result_will_do():
    yard = output_yardstick(CASES["plain"])
    yard = yard._replace(unit=np.full_like(yard.unit, np.nan))
    assert deviation(yard.exact, yard, "plain").fault is None
    assert "must be" in deviation(yard.exact + 1e-9, yard, "plain").fault


def test_a_failure_says_what_and_how_much():
    yard = output_yardstick(CASES["plain"])
    wrong = yard.exact.copy()
    wrong[1, 0, 2, 3] += 10 * yard.limit[1, 0, 2, 3] * yard.unit[1, 0, 2, 3]
    fault = deviation(wrong, yard, "plain").fault
    assert re.match(r"plain\[1, 0, 2, 3\] is .* limit .* textbook", fault)
