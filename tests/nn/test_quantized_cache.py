"""A quantised cache: integers within half a step, and attention over them without a float copy."""

import pickle
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from optional import jax, torch
from tiny_models import LIBRARIES

from polyattn import UnknownBackendError, attention, masks, nn, scores
from polyattn.integrations.jax import register
from polyattn.nn import quantized_cache

pytestmark = pytest.mark.with_native

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "generate.md"
RNG = np.random.default_rng(5)
B, H, G, D, E = 2, 4, 2, 6, 5
KEYS = RNG.standard_normal((B, G, 70, D)) * np.exp(2 * RNG.standard_normal((1, G, 1, D)))
VALUES = RNG.standard_normal((B, G, 70, E)) * np.exp(RNG.standard_normal((1, 1, 70, 1)))
QUERIES = RNG.standard_normal((B, H, 3, D))


def made(to, steps, dtype=np.float32, **settings):
    """Return a cache after so many tokens at a time."""
    settings = {"window": 4, "block": 8, "value_size": E, "batch": (B,), "capacity": 16} | settings
    cache = nn.QuantizedCache.init(G, D, like=to(np.zeros(1, dtype)), **settings)
    start = 0
    for stop in np.cumsum(steps).tolist():
        new = (to(np.ascontiguousarray(x[:, :, start:stop], dtype)) for x in (KEYS, VALUES))
        cache, start = cache.append(*new), stop
    return cache


def floats(cache, back=np.asarray):
    """Return the keys and values that the cache stands for, as float64."""
    codes, steps = cache.codes, cache.steps
    blocks, size = codes.length // cache.block, cache.block
    found = []
    for ints, of, recent, axis in (
        (codes.keys, steps.keys, cache.recent.keys, -2),
        (codes.values, steps.values, cache.recent.values, -1),
    ):
        ints = back(ints).reshape(B, G, blocks, size, -1).astype(np.float64)
        whole = (ints * np.expand_dims(back(of).astype(np.float64), axis)).reshape(
            B, G, -1, ints.shape[-1]
        )
        found.append(np.concatenate([whole, back(recent).astype(np.float64)], axis=2))
    return found


@pytest.mark.parametrize(
    ("library", "steps"),
    [("numpy", [21, 4]), *((name, [5, *[1] * 7, 20, 38]) for name in ("numpy", "torch", "strict"))],
    indirect=["library"],
)
def test_an_entry_is_within_half_a_step_and_the_newest_are_as_they_were(library, steps):
    to, back = library
    cache, count = made(to, steps), sum(steps)
    assert cache.length == count
    assert 4 <= cache.recent.length < 4 + 8
    coded = cache.codes.length
    for found, whole, axes in zip(floats(cache, back), (KEYS, VALUES), (3, 4), strict=True):
        whole = whole[:, :, :count].astype(np.float32)
        blocks = np.abs(whole[:, :, :coded]).reshape(B, G, -1, 8, whole.shape[-1])
        half = np.broadcast_to(blocks.max(axis=axes, keepdims=True) / 254, blocks.shape)
        half = half.reshape(whole[:, :, :coded].shape)
        assert (np.abs(found[:, :, :coded] - whole[:, :, :coded]) <= half * 1.001).all()
        np.testing.assert_array_equal(found[:, :, coded:], whole[:, :, coded:])


OPTIONS = {
    "causal": {"is_causal": True},
    "mask of positions": {"mask": masks.causal() & (masks.window(5, 0) | masks.prefix(3))},
    "mask array": {"mask": RNG.random((B, 1, 1, 70)) < 0.5},
    "bias": {"bias": RNG.standard_normal((1, H, 3, 70)).astype(np.float32)},
    "ALiBi": {"is_causal": True, "score_mod": scores.alibi(H)},
    "sinks": {"sinks": np.array([1.0, 2, 3, 4], np.float32)},
    "lengths": {"is_causal": True, "key_lengths": np.array([3, 66])},
    "dropout": {"dropout": (0.5, 7)},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_attention_is_that_over_what_the_integers_stand_for(monkeypatch, name):
    monkeypatch.setattr(quantized_cache, "PIECE", 400)  # two blocks
    cache = made(np.asarray, [70], np.float64)
    found = cache.attention(QUERIES, **OPTIONS[name])
    expected = attention(QUERIES, *floats(cache), **OPTIONS[name])
    np.testing.assert_allclose(found, expected, atol=1e-12)
    # No floats are made of all tokens at once.
    assert [piece.key.shape[-2] for piece in cache._float_pieces()] == [16] * 4
    assert [piece.key.shape[-2] for piece in cache._pieces()] == [64, 6]


ATOL = {"float16": 2e-3, "float32": 3e-6, "float64": 1e-13}


@pytest.mark.parametrize(
    ("library", "rows", "dtype"),
    [
        *product(["numpy", "torch", "strict"], [1, 3], ["float32"]),
        ("numpy", 3, "float16"),
        ("numpy", 3, "float64"),
        pytest.param("jax", 1, "float32", marks=pytest.mark.slow),
    ],
    indirect=["library"],
)
def test_every_library_attends_and_keeps_its_dtype(monkeypatch, library, rows, dtype):
    to, back = library
    monkeypatch.setattr(quantized_cache, "PIECE", 400)
    cache = made(to, [30, 1], np.dtype(dtype))
    query = np.ascontiguousarray(QUERIES[:, :, :rows]).astype(dtype)
    found = back(cache.attention(to(query), is_causal=True, scale=0.3))
    assert found.dtype == back(cache.recent.key).dtype == dtype
    assert back(cache.steps.key).dtype == np.promote_types(dtype, "float32")
    expected = attention(query.astype(float), *floats(cache, back), is_causal=True, scale=0.3)
    np.testing.assert_allclose(found, expected, atol=ATOL[dtype])


@pytest.mark.parametrize("length", [66, 59, 0])
def test_after_truncate_no_old_token_is_seen(length):
    cache = pickle.loads(pickle.dumps(made(np.asarray, [70])))
    shorter = cache.truncate(length)
    assert (shorter.length, cache.length) == (length, 70)
    again = [np.full_like(x[:, :, :20], 9, np.float32) for x in (KEYS, VALUES)]
    longer = shorter.append(*again)
    for found, whole in zip(floats(longer), floats(cache), strict=True):
        most = np.abs(whole).max() / 254  # of tokens that become integers again
        np.testing.assert_allclose(found[:, :, :length], whole[:, :, :length], atol=most)
        np.testing.assert_allclose(found[:, :, length:], 9, atol=most)


def test_its_memory_and_its_error_are_small():
    rng = np.random.default_rng(0)
    size = np.exp(rng.standard_normal((2, 1, 128)))  # key channels of unlike size
    key, value = (rng.standard_normal((2, 4096, 128)) for _ in range(2))
    key, value = (key * size).astype(np.float32), value.astype(np.float32)
    query = (rng.standard_normal((8, 1, 128)) / size.repeat(4, 0)).astype(np.float32)
    cache = nn.QuantizedCache.init(2, 128, 4096, like=key).append(key, value)
    parts = (cache.codes, cache.steps, cache.recent)
    held = sum(x.key.nbytes + x.value.nbytes for x in parts) / (key.nbytes + value.nbytes)
    assert f"in {held:.2f} of the memory of float32" in GUIDE.read_text(encoding="utf-8")
    found, expected = cache.attention(query), attention(query, key, value)
    error = np.sqrt(((found - expected) ** 2).mean() / (expected**2).mean())
    assert 1e-3 < error <= 2e-2


@pytest.mark.parametrize(
    ("act", "kind", "words"),
    [
        (lambda c, x: c.append(x, x[..., :1]), ValueError, r"have the shape \(2, 2, 'n', 5"),
        (lambda c, x: c.attention(x[:, :, :1].astype(float)), TypeError, "query .*float64"),
        (lambda c, x: c.attention(x[:, :, :1], is_causal="yes"), TypeError, "is_causal"),
        (lambda c, x: c.attention(x[:, :, :1], scale=float("nan")), ValueError, "scale"),
        (lambda c, x: c.attention(x[:, :, :1], backend="no"), UnknownBackendError, "no"),
        (lambda c, x: c.truncate(9), ValueError, "from 0 to the cache's 0 tokens; got 9"),
        (lambda c, x: c.attention(x, normalizer=None, layout="LHD"), ValueError, "layout must be"),
        (lambda c, x: made(np.asarray, [], block=0), ValueError, "block must be at least 1; got 0"),
        (
            lambda c, x: c.attention(x[:, :, :1], normalizer=scores.sparsemax()),
            ValueError, "omit normalizer, or give a KVCache",
        ),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(act, kind, words):
    with pytest.raises(kind, match=words):
        act(made(np.asarray, []), np.zeros((2, 2, 3, D), np.float32))


def test_a_gradient_with_respect_to_keys_is_refused():
    cache = made(torch.tensor, [4])
    key, value = torch.zeros(B, G, 1, D, requires_grad=True), torch.zeros(B, G, 1, E)
    with pytest.raises(ValueError, match=r"no gradient .*: detach them, or give a KVCache"):
        cache.append(key, value)
    query = torch.zeros(B, H, 1, D, requires_grad=True)
    cache.attention(query).sum().backward()
    assert query.grad.shape == query.shape


# ---- compiled steps -----------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize("name", ["jax", pytest.param("torch", marks=pytest.mark.slow)])
def test_a_step_is_compiled_once_for_each_number_of_tokens_and_cannot_truncate(name):
    register()
    to, back = LIBRARIES[name]
    counts, options = {"jax": [1] * 19, "torch": [11] + [1] * 8}[name], {"is_causal": True}
    compiled = []

    def step(cache, query, key, value):
        cache = cache.append(key, value)
        return cache.attention(query, **options), cache

    def keep(graph, example):
        compiled.append(graph)
        return graph

    def traced(*given):
        compiled.append(given)
        return step(*given)

    run = jax.jit(traced) if name == "jax" else torch.compile(step, fullgraph=True, backend=keep)
    cache, other = made(to, [], window=3), made(np.asarray, [], window=3)
    for start, count in zip(np.cumsum([0, *counts]).tolist(), counts, strict=False):
        query = QUERIES[:, :, :1].repeat(count, axis=2)
        tokens = [x[:, :, start : start + count] for x in (KEYS, VALUES)]
        new = [x.astype(np.float32) for x in (query, *tokens)]
        found, cache = run(cache, *map(to, new))
        expected, other = step(other, *new)
        np.testing.assert_allclose(back(found), expected, atol=6e-6)
        assert (int(cache.codes.length), int(cache.length)) == (other.codes.length, other.length)
    assert other.codes.length == 16
    assert len(compiled) == len(set(counts))
    if name == "jax":
        with pytest.raises(ValueError, match=r"length of a quantised .* unknown, .* a KVCache"):
            jax.jit(lambda cache: cache.truncate(6))(cache)


@pytest.mark.parametrize("name", [n for n in OPTIONS if n not in ("mask array", "bias")])
def test_shapes_without_lengths_give_the_same(monkeypatch, name):
    steps, options = [20, 1, 49], OPTIONS[name]
    expected = made(np.asarray, steps, np.float64).attention(QUERIES, **options)
    monkeypatch.setattr(nn.QuantizedCache, "_is_traced", True)
    monkeypatch.setattr(quantized_cache, "PIECE", 400)
    cache = made(np.asarray, steps, np.float64, capacity=96)
    assert (cache.codes.length, cache.recent.length) == (64, 6)
    np.testing.assert_allclose(cache.attention(QUERIES, **options), expected, atol=1e-12)


@pytest.mark.parametrize(
    ("capacity", "block", "window"),
    [(1, 5, 0), (16, 4, 3)],
)
def test_all_tokens_that_the_capacity_promises_fit(monkeypatch, window, block, capacity):
    settings = {"window": window, "block": block}
    query = QUERIES[:, :, :1].astype(np.float32)
    for before in (0, 2 * capacity + 9):  # which make it grow, and not to whole blocks
        begun = made(np.asarray, [before], capacity=capacity, **settings)
        assert begun.capacity >= max(capacity, before)
        for count in (1, 3):
            one = other = begun
            for start in range(before, begun.capacity, count):
                stop = min(start + count, begun.capacity)
                rows = np.arange(start, stop) % 70
                new = [x[:, :, rows].astype(np.float32) for x in (KEYS, VALUES)]
                other = other.append(*new)
                with monkeypatch.context() as traced:
                    traced.setattr(nn.QuantizedCache, "_is_traced", True)
                    one = one.append(*new)
                    found = one.attention(query, is_causal=True)
                assert (one.length, one.capacity) == (stop, begun.capacity)
                expected = other.attention(query, is_causal=True)
                np.testing.assert_allclose(found, expected, atol=1e-5)


def test_parts_are_joined_in_float32_under_autocast(monkeypatch):
    monkeypatch.setattr(quantized_cache, "PIECE", 1)
    cache = made(torch.tensor, [70], window=0, block=1)
    arrays = [torch.tensor(x, dtype=torch.float32) for x in (QUERIES, *floats(cache))]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, expected = cache.attention(arrays[0]), attention(*arrays)
    assert found.dtype == torch.bfloat16
    error = (found.float() - expected.float()).abs().amax((0, 1, 2))
    assert (error <= 2**-8 * expected.float().abs().amax((0, 1, 2))).all()  # once rounded


@pytest.mark.parametrize("number", [np.nan, -np.inf])
@pytest.mark.parametrize("place", [0, 1])
def test_what_no_integer_stands_for_is_refused_where_it_can_be_read(number, place):
    new = [np.ones((B, G, 1, size), np.float32) for size in (D, E)]
    new[place][0, 1, 0, 2] = number
    cache = made(np.asarray, [20]).append(*new)  # which keeps it as it is at first
    with pytest.raises(ValueError, match=r"NaN or infinite, .*: append finite numbers"):
        cache.append(*(x.repeat(12, axis=2) for x in new))


def test_elsewhere_it_spoils_the_keys_of_its_block_and_its_own_value():
    key, value = (x[:, :, :8].astype(np.float32) for x in (KEYS, VALUES))
    key[0, 1, 5, 2] = value[0, 1, 6, 2] = np.nan
    settings = {"window": 0, "block": 4, "value_size": E, "batch": (B,)}
    cache = nn.QuantizedCache.init(G, D, 8, like=torch.zeros(1), **settings)
    cache = cache.append(torch.tensor(key), torch.tensor(value))
    spoilt = [np.isnan(x).any(axis=-1)[0, 1].tolist() for x in floats(cache)]
    assert spoilt == [[False] * 4 + [True] * 4, [False] * 6 + [True, False]]
    query, options = torch.tensor(QUERIES.astype(np.float32)), {"mask": masks.prefix(4)}
    found = cache.attention(query, kernel="dense", **options)
    expected = attention(QUERIES, *floats(cache), **options)
    np.testing.assert_allclose(found, expected, atol=3e-6)


@pytest.mark.parametrize(("items", "width"), [(0, 32), (1, 0)])
def test_a_batch_and_values_may_be_empty(items, width):
    key, value = (np.ones((items, 2, 4, size), np.float32) for size in (32, width))
    settings = {"batch": (items,), "value_size": width, "window": 0, "block": 2}
    cache = nn.QuantizedCache.init(2, 32, 8, like=key, **settings).append(key, value)
    for options in ({}, {"softcap": 2.0}):
        assert cache.attention(key[:, :, :1], **options).shape == (items, 2, 1, width)
    assert cache.truncate(3).recent.values.shape == (items, 2, 1, width)
