"""The yardstick itself: the oracle is right, and each classic way to be wrong is refused."""

import math
from dataclasses import replace

import numpy as np
import pytest

from polyattn import scores
from polyattn._base.arrays import facts_of
from polyattn.conformance import CASES, Target, assert_accurate, oracle
from polyattn.conformance.cases.expression_cases import STEPS, make_expression_cases
from polyattn.conformance.checks import cases as checks
from polyattn.conformance.reference.philox import keep_mask, philox
from polyattn.conformance.reference.textbook import textbook
from polyattn.conformance.reference.tolerance import (
    exact,
    output_yardstick,
)


def test_the_oracle_by_hand():
    """Two keys of weight 1 and 3; then a sink of weight 4 beside them."""
    q, k, v = np.ones((1, 1)), np.array([[0.0], [math.log(3)]]), np.array([[0.0], [4.0]])
    assert oracle(q, k, v, scale=1.0)[:2] == (3.0, pytest.approx(math.log(4)))
    assert oracle(q, k, v, scale=1.0, sinks=[math.log(4)])[:2] == (
        pytest.approx(1.5),
        pytest.approx(math.log(8)),
    )


def by_hand(similarities, **options):
    """The result of the oracle for two keys so alike to a query, and of the values 0 and 4."""
    q, k, v = np.ones((1, 1)), np.array(similarities)[:, None], np.array([[0.0], [4.0]])
    return oracle(q, k, v, **{"scale": 1.0} | options).output.item()


def test_the_oracle_of_each_step_by_hand():
    """Most often the second key has a weight of 3/4."""
    assert by_hand([0.0, math.log(3)]) == pytest.approx(3)
    assert by_hand([9.0, math.log(3)], normalizer=scores.sigmoid()) == pytest.approx(3)
    assert by_hand([0.25, 0.75], normalizer=scores.sparsemax()) == pytest.approx(3)
    assert by_hand([0.25, 1.25], normalizer=scores.sparsemax()) == 4
    # A norm of 5 and scores of 3/5 and 4/5 of the factor.
    log = 5 * math.log(3)
    assert by_hand([3.0, 4.0], scale=scores.by_norm(log)) == pytest.approx(3)
    assert by_hand([-8.0, 8.0], similarity=scores.cosine(), scale=log / 10) == pytest.approx(3)
    for p in (1, 2):
        far = {"similarity": scores.distance(p), "scale": math.log(3)}
        assert by_hand([3.0, 2.0], **far) == pytest.approx(3)
    additive = scores.additive(np.array([math.log(3) / math.tanh(1)]))
    assert by_hand([-1.0, 0.0], similarity=additive, scale=None) == pytest.approx(3)
    # The root of the number of keys.
    long = {"scale": scores.long_sequence(), "similarity": scores.distance(1)}
    assert by_hand([2.0, 1.0], **long) == pytest.approx(4 / (1 + math.exp(-math.sqrt(0.5))))


SHORT = [x for x in (*map(CASES.get, STEPS), *make_expression_cases()) if x.L * x.S < 10_000]


@pytest.mark.parametrize("case", SHORT, ids=str)
def test_the_textbook_means_what_the_oracle_means(case):
    """With more digits than the case has: an error between the two would excuse any kernel."""
    arrays, options = case.arguments(poisoned=False)
    with np.errstate(all="ignore"):
        found, _ = textbook(*(x.astype("float64") for x in arrays), **options, rows=case.rows)
    right = oracle(*arrays, **options, rows=case.rows)
    size = right.condition + right.sensitivity
    assert np.all(np.abs(found - right.output) <= 1e-12 * size)


def test_dropout_draws_what_the_authors_of_philox_published():
    """The three known answers of Random123, each of ten rounds."""
    ones, pi = 2**32 - 1, (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    assert philox((ones,) * 4, (ones,) * 2) == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)
    found = philox(pi, (0xA4093822, 0x299F31D0))
    assert found == (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)


def test_a_weight_is_kept_by_the_word_of_its_own_indices():
    seed, rate = 2**40 + 3, 0.3
    table = keep_mask(rate, seed, (2, 2), (2, 3, 6))
    for b, h, i, j in np.ndindex(4, 2, 3, 6):
        word = philox((j // 4, i, h, b), (3, 2**8))[j % 4]
        assert table[b // 2, b % 2, h, i, j] == (word >= rate * 2**32)
    part = keep_mask(rate, seed, (3,), (1, 2, 3), None, (1, 1, 1, 3))
    np.testing.assert_array_equal(part, table.reshape(4, 2, 3, 6)[1:, 1:, 1:, 3:])


@pytest.mark.parametrize(("items", "pages"), [(0, 2), (2, 0)])
def test_no_item_and_no_page_of_an_item_are_nothing_to_attend_to(items, pages):
    pool, table = np.ones((3, 2, 4, 8)), np.zeros((items, pages), int)
    exact = oracle(np.ones((items, 2, 1, 8)), pool, pool, block_table=table, key_lengths=0)
    np.testing.assert_array_equal(exact.output, np.zeros((items, 2, 1, 8)))


def with_options(**changed):
    return lambda q, k, v, options: oracle(q, k, v, **options | changed)


def heads_tiled(q, k, v, options):
    """Query head h reads head h % G: right where every group has one head, wrong elsewhere."""
    times = q.shape[-3] // k.shape[-3]
    return oracle(q, np.concatenate([k] * times, -3), np.concatenate([v] * times, -3), **options)


def dropped_without_scale(q, k, v, options):
    found = oracle(q, k, v, **options)
    return found._replace(output=found.output * (1 - options["dropout"][0]))


#: Mistakes that change a result least, by the case that shows them.
MISTAKES = {
    "scale of the wrong sign": ("plain", with_options(scale=-1 / math.sqrt(8))),
    "< for <=": ("causal", with_options(query_offset=-1)),
    "top-left for bottom-right": ("causal x L < S", with_options(query_offset=0)),
    "head order tiled": ("grouped heads", heads_tiled),
    "window off by one, left": ("window", with_options(window=(2, 2))),
    "sink dropped": ("sinks", with_options(sinks=None)),
    "mask from the first key": ("mask value x rank 5, L < S", with_options(query_offset=0)),
    "softcap twice": ("score value", with_options(softcap=1.5)),
    "the other distance": ("distance", with_options(similarity=scores.distance(1))),
    "no norm": ("score norm", with_options(scale=None)),
    "sigmoid for sparsemax": ("normalizer", with_options(normalizer=scores.sigmoid())),
    "dropped without scale": ("dropout", dropped_without_scale),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_refused(name):
    of, mistake = MISTAKES[name]
    case = replace(CASES[of], dtype="bfloat16")  # whose limits are the widest
    (q, k, v), options = case.arguments()
    right, wrong = oracle(q, k, v, **options), mistake(q, k, v, options)
    assert_accurate(right.output.astype(q.dtype), case)
    with pytest.raises(AssertionError, match="output"):
        assert_accurate(wrong.output.astype(q.dtype), case)
    if case.features <= {"causal", "window", "sinks", "mask", "scale"}:
        with pytest.raises(AssertionError, match="logsumexp"):
            assert_accurate(right.output.astype(q.dtype), case, wrong.logsumexp)


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


def in_tf32(x):
    """Return numbers of 11 significant bits, by rounding half up."""
    return ((x.view(np.uint32) + 0x1000) & 0xFFFFE000).view(np.float32)


@pytest.mark.slow
def test_on_cuda_a_float32_result_may_have_four_times_the_error(monkeypatch):
    name = "129 x 513, causal"
    case, target = CASES[name], Target("numpy")
    arguments, yard = target.arguments(case), output_yardstick(case)
    (q, k, v), options = arguments

    def check(result):
        whole = np.zeros((*q.shape[:-1], v.shape[-1]), np.float32)
        whole[..., case.rows or slice(None), :] = result
        checks._check_result(target, name, whole, "float32", yard, arguments)

    off, tf32 = 3.7 * yard.limit * yard.unit, oracle(*map(in_tf32, (q, k, v)), **options).output
    with pytest.raises(AssertionError, match=r"limit \S+ \(2 × textbook"):
        check(yard.exact + off)
    monkeypatch.setattr(checks, "facts_of", lambda x: facts_of(x)._replace(device="cuda:0"))
    check(yard.exact + off)
    with pytest.raises(AssertionError, match=r"limit \S+ \(4 × \(2 × textbook"):
        check(yard.of(tf32))
