"""attention_weights: the weights that attention multiplies the values with, whole or in part."""

import tracemalloc

import numpy as np
import pytest
from arrays import EVERYWHERE, LIBRARIES, close, draw
from optional import jax, torch

from polyattn import (
    TopWeights,
    attention,
    attention_partial,
    attention_weights,
    masks,
    merge,
    scores,
)
from polyattn._kernels.weights import MOST_MAXIMA
from polyattn.conformance.cases.generators import bent

B, H, G, L, S, D = 2, 4, 2, 9, 13, 6
RNG = np.random.default_rng(2)
QUERY, KEY, VALUE = draw((B, H, L, D), (B, G, S, D), (B, G, S, 3))
VALUES = np.repeat(VALUE, H // G, 1)
OPTIONS = {
    "plain": {},
    "rows without keys": {"is_causal": True, "query_offset": -3},
    "offsets": {"is_causal": True, "query_offset": np.array([-3, 2])},
    "mask array": {"mask": RNG.random((B, 1, L, S)) < 0.6},
    "mask value": {"mask": masks.causal() & masks.window(2, 0) | masks.prefix(2)},
    "mask function": {"mask": lambda b, h, i, j: (i + j + b + h) % 3 != 0},
    "bias per head": {"bias": RNG.normal(size=(H, L, S)).astype(np.float32)[None]},
    "sinks": {"sinks": RNG.normal(size=H).astype(np.float32)},
    "scores": {"score_mod": scores.alibi(H) >> scores.softcap(2.0)},
    "dropout": {"dropout": (0.3, 5)},
    "cosine": {"similarity": scores.cosine(), "scale": 9.0},
    "sparsemax": {"normalizer": scores.sparsemax()},
    "norm": {"scale": scores.by_norm(3.0)},
}
SOFTMAX = [name for name in OPTIONS if name != "sparsemax"]


@pytest.mark.parametrize(
    ("name", "library"),
    [(name, EVERYWHERE[turn % 4]) for turn, name in enumerate(OPTIONS)],
    ids=str,
)
def test_weights_times_values_are_the_attention(name, library):
    given = OPTIONS[name].items()
    options = {k: library.to(x) if isinstance(x, np.ndarray) else x for k, x in given}
    query, key, value = (library.to(x) for x in (QUERY, KEY, VALUE))
    weights = library.back(attention_weights(query, key, **options))
    assert weights.shape == (B, H, L, S)
    close(weights @ VALUES, library.back(attention(query, key, value, **options)))


def test_weights_are_traced_by_jax():
    mask = masks.causal() & masks.window(3, 0) | masks.prefix(1)

    def asked(query, key):
        return attention_weights(query, key, top=2, mask=mask, score_mod=bent)

    expected, found = asked(QUERY, KEY), jax.jit(asked)(QUERY, KEY)
    np.testing.assert_array_equal(found.keys, expected.keys)
    close(found.weights, expected.weights)


@pytest.mark.parametrize("name", OPTIONS)
def test_selected_rows_heads_sums_and_top_equal_the_whole(name):
    whole = attention_weights(QUERY, KEY, **OPTIONS[name])
    for rows, heads in (([8, 2, 3], slice(1, 3)), (None, -1), (slice(None, None, -1), None)):
        found = attention_weights(QUERY, KEY, rows=rows, heads=heads, **OPTIONS[name])
        expected = whole if heads is None else whole[:, np.atleast_1d(np.arange(H)[heads])]
        if rows is not None:
            expected = expected[:, :, np.atleast_1d(np.arange(L)[rows])]
        close(found, expected)
    close(attention_weights(QUERY, KEY, per_key=True, **OPTIONS[name]), whole.sum(-2))
    top = attention_weights(QUERY, KEY, top=4, **OPTIONS[name])
    assert isinstance(top, TopWeights)
    np.testing.assert_array_equal(top.weights, -np.sort(-whole, -1)[..., :4])
    np.testing.assert_array_equal(np.take_along_axis(whole, top.keys, -1), top.weights)
    some = attention_weights(QUERY, KEY, top=4, rows=[5, 1], heads=2, **OPTIONS[name])
    close(some.weights, top.weights[:, 2:3][:, :, [5, 1]])


@pytest.mark.parametrize(
    ("name", "layout"), [*((name, "...HLD") for name in SOFTMAX), ("sinks", "...LHD")]
)
def test_a_logsumexp_that_is_known_gives_the_same(name, layout):
    query, key, value = QUERY, KEY, VALUE
    if layout == "...LHD":
        query, key, value = (np.swapaxes(x, 1, 2) for x in (query, key, value))
    options = OPTIONS[name] | {"layout": layout}
    known = attention_partial(query, key, value, **options).logsumexp
    expected = attention_weights(QUERY, KEY, **OPTIONS[name])
    close(attention_weights(query, key, logsumexp=known, **options), expected)
    some = attention_weights(query, key, logsumexp=known, heads=[2], rows=[3, 4], **options)
    close(some, expected[:, 2:3, 3:5])


def test_a_merged_logsumexp_gives_the_weights_among_all_keys():
    parts = [attention_partial(QUERY, KEY[:, :, s], VALUE[:, :, s]) for s in np.s_[:5, 5:]]
    known = merge(*parts).logsumexp
    found = attention_weights(QUERY, KEY[:, :, 5:], logsumexp=known)
    close(found, attention_weights(QUERY, KEY)[..., 5:])


def test_a_matrix_is_one_head_without_an_axis():
    assert attention_weights(QUERY[0, 0], KEY[0, 0], per_key=True).shape == (S,)
    known = attention_partial(QUERY[0, 0], KEY[0, 0], KEY[0, 0]).logsumexp
    top = attention_weights(QUERY[0, 0], KEY[0, 0], top=2, logsumexp=known)
    assert top.weights.shape == top.keys.shape == (L, 2)


def test_where_there_are_no_rows_gradients_are_0():
    query, key = (torch.zeros(1, 2, n, D, dtype=torch.float64, requires_grad=True) for n in (0, S))
    attention_weights(query, key, per_key=True).sum().backward()
    assert not key.grad.any()
    assert query.grad.shape == query.shape


def test_a_named_backend_gives_the_callers_arrays():
    known = attention_partial(QUERY, KEY, VALUE, sinks=np.ones(H, np.float32)).logsumexp
    here, there = (
        attention_weights(QUERY, KEY, top=2, logsumexp=known, backend=one)
        for one in (None, "torch")
    )
    assert type(there.weights) is type(there.keys) is np.ndarray
    close(there.weights, here.weights)
    assert there.keys.dtype.kind == "i"


def test_memory_is_for_the_result_and_one_block_of_rows():
    x = np.zeros((2, 2048, 8), np.float32)
    tracemalloc.start()
    try:
        attention_weights(x, x, top=4)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 0.5 * 32 * 2**20  # of all scores


@pytest.mark.parametrize("top", [MOST_MAXIMA, MOST_MAXIMA + 1])
@pytest.mark.parametrize("library", LIBRARIES, ids=str)
def test_of_equal_weights_the_smaller_key_comes_first(library, top):
    key = RNG.integers(0, 2, (1, 1, 4 * top, 1)).astype(np.float32)
    found = attention_weights(library.to(np.ones_like(key[:, :, :1])), library.to(key), top=top)
    order = np.argsort(-key[0, 0, :, 0], kind="stable")[:top]
    np.testing.assert_array_equal(library.back(found.keys)[0, 0, 0], order)
    unknown = attention_weights(library.to(key), library.to(key * np.nan), top=top)
    np.testing.assert_array_equal(library.back(unknown.keys)[0, 0, 0], np.arange(top))


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"rows": 9}, IndexError, "index 9 is out of range for 9 rows"),
        ({"rows": []}, ValueError, "at least one"),
        ({"rows": 1.5}, TypeError, "1.5"),
        ({"top": 14}, ValueError, "from 1 to S = 13; got 14"),
        ({"top": 2, "per_key": True}, ValueError, "cannot be given together"),
        ({"logsumexp": np.zeros((B, H, S), np.float32)}, ValueError, r"\(2, 4, 9\)"),
        ({"logsumexp": QUERY[..., 0], "normalizer": scores.sigmoid()}, ValueError, "no logsumexp"),
    ],
)
def test_what_cannot_be_asked_is_refused(options, error, words):
    with pytest.raises(error, match=words):
        attention_weights(QUERY, KEY, **options)
