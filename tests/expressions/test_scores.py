"""Scores as values: what each does, and what may stand in place of the dot product and softmax."""

import math

import numpy as np
import pytest
from optional import TorchBackend, torch

from polyattn import attention, attention_weights, explain, scores
from polyattn.plugin import Score
from polyattn_numpy.backend import NumpyBackend

BACKENDS = {"numpy": NumpyBackend, "torch": TorchBackend}
TO = {"numpy": np.asarray, "torch": torch.from_numpy}
B, H, G, L, S, D = 2, 6, 3, 9, 14, 5
RNG = np.random.default_rng(11)
QUERY, KEY, VALUE = (RNG.normal(size=(B, h, n, D)) for h, n in ((H, L), (G, S), (G, S)))
TABLE = RNG.normal(size=(32, H))
KEYS = np.repeat(KEY, H // G, 1)


def doubled(score, b, h, i, j):
    return score + score


@pytest.mark.parametrize(
    "value",
    [scores.alibi(H), scores.relative_bias(TABLE), scores.temperature(0.5) >> doubled],
    ids=["alibi", "relative bias", "chain"],
)
def test_a_score_called_as_a_function_has_no_offset(value):
    expected = attention(QUERY, KEY, VALUE, score_mod=value, query_offset=0)
    found = attention(QUERY, KEY, VALUE, score_mod=lambda *given: value(*given))
    np.testing.assert_allclose(found, expected, rtol=1e-12)


@pytest.mark.parametrize(
    ("heads", "slopes"),
    [(1, [2**-8]), (6, [1 / 4, 1 / 16, 1 / 64, 1 / 256, 1 / 2, 1 / 8])],
)
def test_alibi_has_the_published_slopes(heads, slopes):
    s = scores.alibi(heads)(np.zeros((1, heads, 1, 2)), *np.ogrid[:1, :heads, :1, :2])
    np.testing.assert_allclose(-s[0, :, 0, 1], slopes, rtol=1e-14)


DISTANCES = np.array([-600, -64, -20, -8, -7, 0, 1, 7, 8, 12, 20, 64, 600])


@pytest.mark.parametrize(
    ("bidirectional", "buckets", "furthest", "expected"),
    [
        (True, 32, 128, [15, 14, 10, 8, 7, 0, 17, 23, 24, 25, 26, 30, 31]),
        (False, 16, 40, [15, 15, 12, 8, 7, 0, 0, 0, 0, 0, 0, 0, 0]),
    ],
)
def test_relative_bias_has_the_buckets_of_t5(bidirectional, buckets, furthest, expected):
    """As the function of its authors gives them."""
    table, zero = np.arange(buckets, dtype=float)[:, None], np.zeros((1, 1, 1, 1), int)
    value = scores.relative_bias(table, bidirectional=bidirectional, max_distance=furthest)
    found = value(np.zeros(DISTANCES.shape), zero, zero, zero, zero + DISTANCES)
    np.testing.assert_array_equal(found.ravel(), expected)


@pytest.mark.parametrize("furthest", [10**30, 10**400], ids=["30", "400"])
def test_buckets_that_end_beyond_all_distances(furthest):
    table, zero = np.arange(16.0)[:, None], np.zeros((1, 1, 1, 1), np.int32)
    value = scores.relative_bias(table, bidirectional=False, max_distance=furthest)
    away = zero + np.array([0, 7, 8, 34_689, 34_690], np.int32)
    found = value(np.zeros(away.shape), zero, zero, away, zero)
    # 10**30 begins the second bucket of the far ones at 8 · (10**30 / 8) ** (1 / 8).
    np.testing.assert_array_equal(found.ravel(), [0, 7, 8, 8, 8 + (furthest == 10**30)])


# ---- in place of the dot product, its scale, and softmax ---------------------------------------


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_ordinary_vectors_are_divided_alike_with_tiny_and_huge_ones(library):
    to = TO[library]
    keys = KEYS.copy()
    keys[:, :, 0], keys[:, :, 1], keys[:, :, 2] = 0, 1e-200, 1e200
    for rows in (1, L):
        query, similarity = to(QUERY[:, :, -rows:]), scores.cosine()
        odd, plain = (attention_weights(query, to(k), similarity=similarity) for k in (keys, KEYS))
        ratio = np.asarray(odd[..., 3:] / plain[..., 3:])
        np.testing.assert_allclose(ratio, np.broadcast_to(ratio[..., :1], ratio.shape), rtol=1e-13)
        assert np.isfinite(np.asarray(odd)).all()


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize(
    ("close", "rows"), [("one pair", 40), ("all", 40), ("none", 40), ("all", 1)]
)
def test_distances_of_close_vectors_keep_their_digits(library, close, rows):
    to = TO[library]
    rng = np.random.default_rng(1)
    query, key = (rng.normal(size=(2, n, 32)).astype(np.float32) for n in (rows, 50))
    if close == "all":
        query, key = 100 + query / 1000, 100 + key / 1000
    elif close == "one pair":
        key[0, 3] = query[0, 0] + np.float32(1e-4)
        key[1, 2] = query[1, 0]
    difference = query.astype(float)[:, :, None] - key.astype(float)[:, None]
    expected = -np.sqrt((difference**2).sum(-1))
    found = scores.distance().between(to(query), to(key), BACKENDS[library]())
    np.testing.assert_allclose(np.asarray(found), expected, rtol=2e-6)


def test_the_long_sequence_rule_is_a_number():
    output = attention(QUERY, KEY, VALUE, scale=scores.long_sequence())
    np.testing.assert_array_equal(
        output, attention(QUERY, KEY, VALUE, scale=1 / math.sqrt(D) / math.sqrt(S))
    )
    needs = explain(QUERY, KEY, VALUE, scale=scores.long_sequence()).problem.features
    assert needs == {"grouped_heads", "scale"}


# ---- values ------------------------------------------------------------------------------------


def test_scores_compose_flat_and_with_functions_on_either_side():
    chain = doubled >> scores.softcap(2.0) >> (scores.temperature(3.0) >> doubled)
    assert isinstance(chain, Score)
    assert len(chain.parts) == 4


def test_what_an_option_says_goes_to_that_option():
    shape = (2, 4, 9, 8)

    def problem(score_mod, **options):
        return explain(shape, shape, shape, score_mod=score_mod, **options).problem

    assert problem(scores.softcap(3.0)).features == {"softcap"}
    assert problem(scores.softcap(3.0)).softcap == 3.0
    both = problem(scores.softcap(3.0), softcap=2.0)
    assert both.features == {"softcap", "score_expression"}
    first = problem(scores.softcap(3.0) >> scores.alibi(4))
    assert first.features == {"softcap", "score_expression"}
    assert problem(scores.function(doubled)).features == {"score_mod"}
    assert problem(scores.alibi(4) >> doubled).features == {"score_mod", "score_expression"}


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"score_mod": scores.alibi(5)}, ValueError, "5 query heads; got 6"),
        ({"score_mod": scores.alibi(np.ones(5))}, ValueError, r"shape \(6,\); got \(5,\)"),
        ({"score_mod": scores.relative_bias(np.zeros((32, 5)))}, ValueError, "H = 6"),
        ({"similarity": scores.additive(np.ones(4))}, ValueError, r"\(5,\); got \(4,\)"),
        ({"similarity": "cosine"}, TypeError, "similarity must be an expression .* 'cosine'"),
        ({"normalizer": max}, TypeError, "normalizer must be an expression"),
        ({"normalizer": scores.sigmoid(), "sinks": np.zeros(6)}, ValueError, "supports no sinks"),
    ],
)
def test_scores_that_do_not_fit_the_call_are_refused(options, error, words):
    with pytest.raises(error, match=words):
        attention(QUERY, KEY, VALUE, **options)
