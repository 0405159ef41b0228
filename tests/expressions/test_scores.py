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
SLOPES, TABLE, WEIGHT = RNG.random(H), RNG.normal(size=(32, H)), RNG.normal(size=D)
KEYS, VALUES = (np.repeat(x, H // G, 1) for x in (KEY, VALUE))
PRODUCT = QUERY @ np.swapaxes(KEYS, -1, -2)


def doubled(score, b, h, i, j):
    return score + score


def published_slopes(heads):
    """As the paper's own code has them."""
    if math.log2(heads).is_integer():
        start = 2 ** (-(2 ** -(math.log2(heads) - 3)))
        return [start * start**i for i in range(heads)]
    whole = 2 ** math.floor(math.log2(heads))
    return published_slopes(whole) + published_slopes(2 * whole)[0::2][: heads - whole]


@pytest.mark.parametrize(
    "value",
    [scores.alibi(H), scores.relative_bias(TABLE), scores.temperature(0.5) >> doubled],
    ids=["alibi", "relative bias", "chain"],
)
def test_a_score_called_as_a_function_has_no_offset(value):
    expected = attention(QUERY, KEY, VALUE, score_mod=value, query_offset=0)
    found = attention(QUERY, KEY, VALUE, score_mod=lambda *given: value(*given))
    np.testing.assert_allclose(found, expected, rtol=1e-12)


@pytest.mark.parametrize("heads", [1, 8, 20])
def test_alibi_has_the_published_slopes(heads):
    s = scores.alibi(heads)(np.zeros((1, heads, 1, 2)), *np.ogrid[:1, :heads, :1, :2])
    np.testing.assert_allclose(-s[0, :, 0, 1], published_slopes(heads), rtol=1e-14)


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("buckets", "furthest"), [(32, 128), (16, 40)])
def test_relative_bias_has_the_buckets_of_t5(bidirectional, buckets, furthest):
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5").T5Attention
    away = np.arange(-600, 600)
    table = np.arange(buckets, dtype=float)[:, None]
    value = scores.relative_bias(table, bidirectional=bidirectional, max_distance=furthest)
    zero, j = np.zeros((1, 1, 1, 1), int), away[None, None, None]
    found = value(np.zeros(j.shape), zero, zero, zero, j)
    theirs = t5._relative_position_bucket(torch.tensor(away), bidirectional, buckets, furthest)
    np.testing.assert_array_equal(found.ravel(), theirs.numpy())


@pytest.mark.parametrize("furthest", [10**30, 10**400], ids=["30", "400"])
def test_buckets_that_end_beyond_all_distances(furthest):
    table, zero = np.arange(16.0)[:, None], np.zeros((1, 1, 1, 1), np.int32)
    value = scores.relative_bias(table, bidirectional=False, max_distance=furthest)
    away = zero + np.array([0, 7, 8, 34_689, 34_690], np.int32)
    found = value(np.zeros(away.shape), zero, zero, away, zero)
    # 10**30 begins the second bucket of the far ones at 8 · (10**30 / 8) ** (1 / 8).
    np.testing.assert_array_equal(found.ravel(), [0, 7, 8, 8, 8 + (furthest == 10**30)])


# ---- in place of the dot product, its scale, and softmax ---------------------------------------


def test_the_cosine_of_small_and_large_vectors_is_exact():
    for size in (1e-200, 1e200):
        output = attention(QUERY * size, KEY / size, VALUE, similarity=scores.cosine())
        expected = attention(QUERY, KEY, VALUE, similarity=scores.cosine())
        np.testing.assert_allclose(output, expected, rtol=1e-12)


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
@pytest.mark.parametrize("close", ["one pair", "all", "none"])
@pytest.mark.parametrize("rows", [1, 40])
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


@pytest.mark.parametrize("size", [1e-30, 1e30])
@pytest.mark.parametrize("normalizer", [scores.sigmoid(), scores.sparsemax()])
def test_a_normalizer_bears_large_scores(normalizer, size):
    with np.errstate(all="raise", under="ignore"):
        output = attention(QUERY * size, KEY, VALUE, normalizer=normalizer)
    assert np.all(np.isfinite(output))


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
