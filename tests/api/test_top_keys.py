"""top_keys: the keys of the largest scores, those of a sort of all scores in float64."""

import math
import tracemalloc

import numpy as np
import pytest
from arrays import FAR, NUMPY, STRICT, TORCH
from optional import da, jax, torch

from polyattn import UnsupportedError, masks, scores, top_keys
from polyattn._kernels import top_keys as kernel

B, H, G, L, S, D = 2, 4, 2, 9, 37, 3
RNG = np.random.default_rng(3)
# Products of small integers are exact on each library, and many scores are equal.
QUERY, KEY, PER_HEAD = (
    RNG.integers(-2, 3, size).astype(np.float32) for size in ((B, H, L, D), (B, G, S, D), (B, H, L))
)
ROWS, KEYS = np.arange(L)[:, None], np.arange(S)
SHOWN = RNG.random((B, H, L, S)) < 0.3
HIDING = np.where(RNG.random((L, S)) < 0.4, -math.inf, RNG.integers(-3, 3, (L, S)))
LENGTHS = np.array([0, 21])
OF_ITEM = LENGTHS[:, None, None, None]
#: Options, which keys they show, and what is added to the scores, whose scale is 1.
OPTIONS = {
    "plain": ({}, True, 0),
    "causal": ({"is_causal": True}, KEYS <= ROWS + S - L, 0),
    "rows without keys": ({"is_causal": True, "query_offset": -3}, KEYS <= ROWS - 3, 0),
    "window": ({"window": (5, 2), "query_offset": 4}, abs(KEYS - ROWS - 2.5) <= 3.5, 0),
    "mask array": ({"mask": SHOWN}, SHOWN, 0),
    "mask": ({"mask": masks.prefix(3) | masks.rule(lambda b, h, i, j: (i + j) % 3 == h)},
        (KEYS < 3) | (np.arange(H)[:, None, None] == (ROWS + KEYS) % 3), 0),
    "bias": ({"bias": HIDING}, np.isfinite(HIDING), HIDING),
    "lengths": ({"key_lengths": LENGTHS, "is_causal": True},
        (KEYS < OF_ITEM) & (KEYS <= ROWS + OF_ITEM - L), 0),
    "score_mod": ({"score_mod": scores.alibi(H)}, True,
        -abs(KEYS - ROWS - S + L) / 4.0 ** np.arange(1, H + 1)[:, None, None]),
}  # fmt: skip


def expected(query, key, count, seen=True, added=0.0, of_heads=None):
    """Return the keys of a stable sort of all scores in float64."""
    key = np.repeat(key, query.shape[-3] // key.shape[-3], axis=-3)
    s = query.astype(float) @ np.swapaxes(key, -1, -2).astype(float) + added
    s = np.where(np.broadcast_to(seen, s.shape), s, -math.inf)
    if of_heads is not None:
        hidden = (s == -math.inf).all(-3, keepdims=True)
        s = (of_heads[..., None] * np.maximum(s, 0)).sum(-3, keepdims=True)
        s = np.where(hidden, -math.inf, s)
    keys = np.argsort(-s, axis=-1, kind="stable")[..., :count]
    keys = np.where(np.take_along_axis(s, keys, -1) == -math.inf, s.shape[-1], keys)
    keys = np.sort(keys, -1)
    missing = np.full((*keys.shape[:-1], count - keys.shape[-1]), -1)
    return np.concatenate([np.where(keys == s.shape[-1], -1, keys), missing], -1)


@pytest.fixture(params=["one tile", "tiles"])
def cut(request, monkeypatch):
    if request.param == "tiles":
        monkeypatch.setattr(kernel, "AREA", 600)
        monkeypatch.setattr(kernel, "LEAST", 7)


OTHERS = [("rows without keys", TORCH), ("mask", STRICT), ("lengths", FAR)]


@pytest.mark.parametrize(
    ("name", "library"), [*((name, NUMPY) for name in OPTIONS), *OTHERS], ids=str
)
def test_the_keys_are_those_of_a_sort(name, library, cut):
    given, seen, added = OPTIONS[name]
    options = {k: library.to(x) if isinstance(x, np.ndarray) else x for k, x in given.items()}
    q, k, w = map(library.to, (QUERY, KEY, PER_HEAD))
    for count in (1, 50):
        found = library.back(top_keys(q, k, count, scale=1.0, **options))
        assert found.dtype == np.int32
        np.testing.assert_array_equal(found, expected(QUERY, KEY, count, seen, added))
        of_all = library.back(top_keys(q, k, count, head_weights=w, scale=1.0, **options))
        sums = expected(QUERY, KEY, count, seen, added, PER_HEAD)
        np.testing.assert_array_equal(of_all, sums)


@pytest.mark.parametrize("cut", ["tiles"], indirect=True)
def test_they_are_traced_by_jax(cut):
    given, seen, added = OPTIONS["lengths"]
    asked = jax.jit(lambda q, k, w: top_keys(q, k, 4, head_weights=w, scale=1.0, **given))
    sums = expected(QUERY, KEY, 4, seen, added, PER_HEAD)
    np.testing.assert_array_equal(asked(QUERY, KEY, PER_HEAD), sums)


def test_sizes_layouts_and_dtypes(cut):
    for size in range(1, 73, 10):
        shapes = (1, size % 4 + 1, size), (1, 73 - size, size)
        q, k = (RNG.integers(-2, 3, shape).astype(np.float64) for shape in shapes)
        np.testing.assert_array_equal(top_keys(q, k, size, scale=1.0), expected(q, k, size))
    flat = top_keys(q[0], k[0], 3)
    np.testing.assert_array_equal(flat, top_keys(q, k, 3)[0])
    swapped = [np.swapaxes(x, 1, 2).astype(np.float16) for x in (QUERY, KEY, PER_HEAD[..., None])]
    by_length = {"head_weights": swapped[2][..., 0], "layout": "...LHD"}
    found = top_keys(*swapped[:2], 5, scale=1.0, **by_length)
    np.testing.assert_array_equal(found, expected(QUERY, KEY, 5, of_heads=PER_HEAD))
    for lengths in ((0, 5), (5, 0)):
        shape = top_keys(*(np.ones((2, n, 4)) for n in lengths), 3).shape
        assert shape == (2, lengths[0], 3)
    assert (top_keys(np.ones((2, 5, 4)), np.ones((2, 0, 4)), 3) == -1).all()


def test_a_score_that_is_nan_comes_first_and_zeros_are_equal():
    for library in (NUMPY, TORCH):
        bias = library.to(np.array([[-0.0, 1.0, 0.0, math.nan, -0.0, 2.0]]))
        zeros = library.to(np.zeros((1, 6, 2))), library.to(np.zeros((1, 1, 2)))
        assert library.back(top_keys(*zeros[::-1], 4, bias=bias)).tolist() == [[[0, 1, 3, 5]]]


@pytest.mark.slow
def test_2048_of_131072_keys_take_less_than_200_mb():
    query = np.ones((1, 32, 1), np.float32)
    key = RNG.permutation(131072).astype(np.float32)[:, None]
    tracemalloc.start()
    found = top_keys(query, key[None], 2048)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 200e6
    assert (found == np.flatnonzero(key >= 131072 - 2048)).all()


def test_autograd_records_nothing():
    q, k, w = (torch.ones(2, 3, 4, requires_grad=True) for _ in range(3))
    assert not top_keys(q, k, 2).requires_grad
    assert not top_keys(q, k, 2, head_weights=w[..., 0]).requires_grad


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"count": 0}, ValueError, "count must be at least 1; got 0"),
        ({"head_weights": np.ones(5)}, ValueError, r"head_weights \(5,\) must broadcast to"),
        ({"head_weights": np.ones((2, 3), int)}, TypeError, "must be floats"),
        ({"sinks": np.ones(2)}, TypeError, "sinks"),
        ({"scale": scores.by_norm(1.0)}, UnsupportedError, "score_norm"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_errors(options, error, said):
    q, k = np.ones((2, 3, 4)), np.ones((2, 6, 4))
    with pytest.raises(error, match=said):
        top_keys(q, k, **({"count": 2} | options))


def test_chunks_are_refused_by_name():
    x = da.ones((2, 8, 4), chunks=(2, 4, 4))
    with pytest.raises(UnsupportedError, match="cut into chunks"):
        top_keys(x, x, 2)
