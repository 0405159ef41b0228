"""Integers of 4 bits: the rule of the semantics, and caches and attention that go by it."""

import pickle
from pathlib import Path

import numpy as np
import pytest
from optional import torch
from tiny_models import LIBRARIES

from polyattn import attention, nn
from polyattn.nn import integers, quantized_cache

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "generate.md"
RNG = np.random.default_rng(8)
B, H, G, D, E, GROUP, BLOCK = 2, 4, 2, 64, 32, 32, 8
KEYS, VALUES = (
    RNG.standard_normal((B, G, 70, size), "f4") * np.exp(RNG.standard_normal((1, G, 70, 1), "f4"))
    for size in (D, E)
)
QUERIES = RNG.standard_normal((B, H, 3, D)).astype("f4")
READ = ["numpy", "torch", "strict"]  # JAX compiles each length


def made(to, steps, dtype=np.float32, **settings):
    """Return a cache after so many tokens at a time."""
    settings = {"window": 4, "block": BLOCK, "capacity": 16, "bits": 4, "group": GROUP} | settings
    cache = nn.QuantizedCache.init(
        G, D, value_size=E, batch=(B,), like=to(np.zeros(1, dtype)), **settings
    )
    start = 0
    for stop in np.cumsum(steps).tolist():
        new = (to(np.ascontiguousarray(x[:, :, start:stop], dtype)) for x in (KEYS, VALUES))
        cache, start = cache.append(*new), stop
    return cache


def by_the_rule(group):
    """Return the integers, step and offset of a group, as the semantics say."""
    low, high = min(group), max(group)
    offset = low if -low > high else high
    s = (high - low) / np.float32(15) * (1 if offset == low and low != high else -1)
    if s == 0:
        return [0] * len(group), None, offset
    step = offset / np.rint(offset / s)
    return [int(min(max(np.rint((x - offset) / step), 0), 15)) for x in group], step, offset


def floats(cache, back=np.asarray):
    """Return the keys and values that the cache stands for, as float64."""
    found = []
    for codes, steps, recent in (
        (cache.codes.keys, cache.steps.keys, cache.recent.keys),
        (cache.codes.values, cache.steps.values, cache.recent.values),
    ):
        codes, newest = back(codes), back(recent).astype(float)
        bits = np.stack([codes % 16, codes // 16], axis=-1).astype(float)
        by, plus = np.moveaxis(
            back(steps).astype(float).reshape(B, G, -1, 2, newest.shape[-1] // cache.group), 3, 0
        )
        groups = bits.reshape(*by.shape, cache.group) * by[..., None] + plus[..., None]
        found.append(np.concatenate([groups.reshape(B, G, -1, newest.shape[-1]), newest], axis=2))
    return found


def largest_error(numbers, group=GROUP):
    """Return |s| of each number's group, and what float32 rounds."""
    groups = numbers.reshape(*numbers.shape[:-1], numbers.shape[-1] // group, group).astype(float)
    span = np.ptp(groups, axis=-1, keepdims=True) / 15 + 1e-6 * np.abs(groups).max(initial=0)
    return np.broadcast_to(span, groups.shape).reshape(numbers.shape)


GROUPS = {
    "numbers of both signs": RNG.standard_normal(32),
    "positive": 1 + RNG.random(32),
    "negative": -3 - RNG.random(32),
    "one outlier": np.where(np.arange(32) == 5, -40, RNG.standard_normal(32)),
    "as far on both sides": np.linspace(-1, 1, 32),
    "zeros": np.zeros(32),
    "equal numbers": np.full(32, -0.3),
    "tiny": 1e-30 * RNG.standard_normal(32),
}


@pytest.mark.parametrize("library", [*READ, "jax"], indirect=True)
def test_integers_steps_and_offsets_are_those_of_the_rule(library):
    to, back = library
    tokens = np.stack(list(GROUPS.values())).astype("f4")[None]
    codes, steps = (back(x) for x in integers.packed(to(tokens), 4, 32))
    assert (codes.dtype, codes.shape, steps.shape) == (np.uint8, (1, 8, 16), (1, 2, 8))
    for name, found, (by, plus), group in zip(
        GROUPS, codes[0], steps.reshape(8, 2), tokens[0], strict=True
    ):
        expected, step, offset = by_the_rule(group)
        assert [n >> shift & 15 for n in found.tolist() for shift in (0, 4)] == expected, name
        assert plus == offset, name
        assert step is None or abs(by / step - 1) < 1e-6, name
        assert np.isfinite(by), name


@pytest.mark.parametrize("group", [32, 64, 128])
def test_the_numbers_are_those_of_mlx(group):
    mx = pytest.importorskip("mlx.core")
    tokens = (RNG.standard_normal((50, 128)) + RNG.standard_normal((50, 1))).astype("f4")
    codes, steps = integers.packed(tokens, 1, group)
    theirs = [np.array(x) for x in mx.quantize(mx.array(tokens), group_size=group, bits=4)]
    np.testing.assert_array_equal(codes, theirs[0].view(np.uint8))
    np.testing.assert_array_equal(steps, np.concatenate(theirs[1:], axis=-1))


@pytest.mark.parametrize("steps", [[21, 4], [70], [5, 1, 1, 1, 1, 1, 1, 1, 20, 38]])
@pytest.mark.parametrize("library", READ, indirect=True)
def test_an_entry_is_within_a_step_and_the_newest_are_as_they_were(library, steps):
    to, back = library
    cache, count = made(to, steps), sum(steps)
    coded = cache.codes.length
    assert (cache.length, coded) == (count, (count - 4) // BLOCK * BLOCK)
    for found, whole in zip(floats(cache, back), (KEYS, VALUES), strict=True):
        error = np.abs(found - whole[:, :, :count])
        assert (error[:, :, :coded] <= largest_error(whole[:, :, :coded])).all()
        assert (error[:, :, :coded] > 0).mean() > 0.5
        assert (error[:, :, coded:] == 0).all()


OPTIONS = {
    "none": {},
    "a window": {"is_causal": True, "window": (40, 0), "softcap": 3.0},
    "lengths": {"is_causal": True, "key_lengths": np.array([3, 66])},
    "sinks": {"sinks": np.array([1.0, 2, 3, 4], np.float32)},
}


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_attention_is_that_over_what_the_integers_stand_for(monkeypatch, name, traced):
    monkeypatch.setattr(nn.QuantizedCache, "_is_traced", traced)
    monkeypatch.setattr(quantized_cache, "PIECE", 4000)  # one block
    cache = made(np.asarray, [20, 1, 49], np.float64, capacity=96)
    found = cache.attention(QUERIES.astype(float), **OPTIONS[name])
    expected = attention(QUERIES.astype(float), *floats(cache), **OPTIONS[name])
    np.testing.assert_allclose(found, expected, atol=1e-12)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("library", [*READ, "torch on a device", "jax"], indirect=True)
def test_every_library_attends(monkeypatch, library, rows):
    to, back = library
    monkeypatch.setattr(quantized_cache, "PIECE", 8000)  # two blocks
    # JAX compiles each length.
    cache = made(to, [13] if to is LIBRARIES["jax"][0] else [30, 1])
    query = np.ascontiguousarray(QUERIES[:, :, :rows])
    found = back(cache.attention(to(query), is_causal=True))
    expected = attention(query.astype(float), *floats(cache, back), is_causal=True)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_other_floats_keep_their_dtype(dtype):
    cache = made(np.asarray, [70], dtype)
    found = cache.attention(QUERIES.astype(dtype))
    assert found.dtype == cache.recent.key.dtype == dtype
    assert cache.steps.key.dtype == (np.float64 if dtype is np.float64 else np.float32)
    expected = attention(QUERIES.astype(dtype).astype(float), *floats(cache))
    tolerance = 2**-10 if dtype is np.float16 else 1e-13
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("length", [70, 66, 59, 8, 3, 0])
def test_after_truncate_no_old_token_is_seen(length):
    cache = made(np.asarray, [70])
    shorter = cache.truncate(length)
    assert (shorter.length, cache.length) == (length, 70)
    again = [np.full_like(x[:, :, :20], 9) for x in (KEYS, VALUES)]
    longer = shorter.append(*again)
    for found, whole in zip(floats(longer), floats(cache), strict=True):
        error = np.abs(found[:, :, :length] - whole[:, :, :length])
        assert (error <= largest_error(whole[:, :, :length])).all()  # that were rounded again
        kept = length // BLOCK * BLOCK
        assert (error[:, :, : min(kept, cache.codes.length)] == 0).all()
        np.testing.assert_allclose(found[:, :, length:], 9, rtol=1e-6)


def test_a_cache_that_was_stored_goes_on_as_it_would_have():
    cache = made(np.asarray, [50])
    loaded = pickle.loads(pickle.dumps(cache))
    assert (loaded.bits, loaded.group, loaded.length) == (4, GROUP, 50)
    more = [x[:, :, 50:] for x in (KEYS, VALUES)]
    one, other = (each.append(*more).attention(QUERIES) for each in (loaded, cache))
    np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"bits": 3}, "bits must be 4 or 8; got 3"),
        ({"group": 16}, "group must be one of 32, 64, 128; got 16"),
        ({"size": 80}, "size must be a multiple of group=64 .*; got 80: give bits=8"),
        ({"size": 96}, "size must be a multiple of group=64 .*; got 96: give group=32 or bits=8"),
        ({"value_size": 65}, "value_size must be a multiple of .*; got 65: give bits=8"),
    ],
)
def test_what_does_not_fit_is_refused(settings, words):
    settings = {"heads": G, "size": 64, "capacity": 8, "bits": 4} | settings
    with pytest.raises(ValueError, match=words):
        nn.QuantizedCache.init(like=np.zeros(1), **settings)


def test_groups_are_those_of_4_bits_only():
    assert nn.QuantizedCache.init(G, 5, 8, like=np.zeros(1), group=16).bits == 8


def test_what_no_integer_stands_for_is_refused_where_it_can_be_read():
    new = [np.ones((B, G, 12, size), np.float32) for size in (D, E)]
    new[1][0, 1, 0, 2] = np.nan
    with pytest.raises(ValueError, match=r"NaN or infinite, .*: append finite numbers"):
        made(np.asarray, []).append(*new)


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_elsewhere_it_spoils_its_group(number):
    key = KEYS[:, :, :8].copy()
    key[0, 1, 5, 40] = number
    cache = made(torch.tensor, [], window=0, block=4)
    cache = cache.append(torch.tensor(key), torch.tensor(VALUES[:, :, :8]))
    spoilt = np.argwhere(np.isnan(floats(cache)[0]))
    np.testing.assert_array_equal(spoilt, [[0, 1, 5, place] for place in range(32, 64)])


def test_its_memory_is_small():
    key, held = np.zeros((2, 4096, 128), np.float32), []
    for group in (64, 32):
        cache = nn.QuantizedCache.init(2, 128, 4096, like=key, bits=4, group=group)
        parts = (cache.codes, cache.steps, cache.recent)
        held.append(sum(x.key.nbytes + x.value.nbytes for x in parts) / (2 * key.nbytes))
    sentence = "With `bits=4` it takes {:.2f} of the memory of float32, and {:.2f} with `group=32`"
    assert sentence.format(*held) in " ".join(GUIDE.read_text(encoding="utf-8").split())
