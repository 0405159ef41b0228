"""Integers of a quantised cache, which the compiled kernel reads as they are."""

import sys

import numpy as np
import pytest
import torch
from arrays import close
from torch.utils._python_dispatch import TorchDispatchMode

from polyattn import attention, masks, nn, scores
from polyattn._dispatch.cache import forget
from polyattn.nn import integers
from polyattn_native import call

B, H, G, S, D, E = 2, 6, 2, 330, 32, 16
RNG = np.random.default_rng(3)
QUERY, KEY, VALUE = map(RNG.standard_normal, ((B, H, 40, D), (B, G, S, D), (B, G, S, E)))
OPTIONS = {
    "none": {},
    "window": {"is_causal": True, "window": (270, 0), "softcap": 3.0},
    "array": {"mask": RNG.random((B, 1, 40, S)) < 0.5},
    "made": {
        "mask": masks.dilated(3),
        "bias": RNG.standard_normal((1, H, 40, S)).astype("float32"),
    },
    "ALiBi": {"is_causal": True, "score_mod": scores.alibi(H), "scale": -0.3},
    "sinks": {"sinks": RNG.standard_normal(H)},
    "lengths": {"is_causal": True, "key_lengths": np.array([3, 300])},
    "dropout": {"dropout": (0.4, 7)},
}


def empty(like, **settings):
    """Return a cache for keys and values."""
    given = {"value_size": E} | settings
    return nn.QuantizedCache.init(G, given.pop("size", D), S, like=like, batch=(B,), **given)


def cached(dtype, monkeypatch, size=D, value_size=E):
    """Return a cache that cannot make floats any more, and the floats that it stands for."""
    key, value = KEY[..., :size].astype(dtype), VALUE[..., :value_size].astype(dtype)
    cache = empty(key, window=9, block=16, size=size, value_size=value_size).append(key, value)
    floats = cache._read(integers.floats_of, 0, cache.steps.length)
    for n, recent in enumerate((cache.recent.keys, cache.recent.values)):
        floats[n] = np.concatenate([floats[n], recent], axis=-2)
    without_floats(monkeypatch)
    return cache, floats


def without_floats(monkeypatch):
    monkeypatch.delattr(integers, "blocks_of")
    monkeypatch.delattr(integers, "floats_of")


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize(
    ("dtype", "roundings", "sizes"),
    [("float32", 30, (20, 9)), ("float32", 30, (D, E)), ("float64", 500, (D, E))],
)
def test_attention_is_that_over_what_the_integers_stand_for(dtype, roundings, sizes, monkeypatch):
    """Few rows multiply integers where they lie, if vectors hold the elements."""
    monkeypatch.setattr(call, "MADE", 2**10)  # masks are made for some rows at a time
    cache, floats = cached(dtype, monkeypatch, *sizes)
    for rows in (QUERY, QUERY[:, :, :1], QUERY[:, :, ::13]):
        query = rows[..., : sizes[0]].astype(dtype)
        for options in OPTIONS.values() if rows is QUERY else [{}, {"is_causal": True}]:
            found = cache.attention(query, **options)
            expected = attention(query, *floats, kernel="dense", **options)
            close(found, expected, roundings)


class Recorder(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_tensors_are_read_too_unless_somebody_records_them(monkeypatch):
    query, key, value = map(torch.tensor, (QUERY, KEY, VALUE))
    cache = empty(key).append(key[:, :, :70], value[:, :, :70])
    with Recorder():
        expected = [cache.attention(x) for x in (query, query[:, :, :1])]
    without_floats(monkeypatch)
    for x, other in zip((query, query[:, :, :1]), expected, strict=True):
        assert torch.allclose(cache.attention(x), other, rtol=0, atol=1e-12)


def test_16_bits_and_a_step_after_another(monkeypatch):
    cache, floats = cached("float16", monkeypatch)
    query = QUERY[:, :, :1].astype("float16")
    for _ in range(3):  # a call of the same kind is not taken for one over floats
        attention(query, *(x.astype("float16") for x in floats))
        found = cache.attention(query)
        expected = attention(query.astype(float), *(x.astype(float) for x in floats))
        np.testing.assert_allclose(found, expected, atol=2e-3)
    assert found.dtype == np.float16


def test_under_autocast_a_step_is_that_of_floats():
    query, key, value = (torch.from_numpy(x).float() for x in (QUERY, KEY, VALUE))
    query, cache = query[:, :, :1], empty(key).append(key, value)
    with torch.autocast("cpu", torch.bfloat16):
        found = cache.attention(query)
        torch.testing.assert_close(found, cache.attention(query, kernel="tiled"))


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_steps_of_decoding_are_described_once(library, monkeypatch):
    token = np.ones((1, 2, 1, 8), np.float32)
    token = token if library == "numpy" else torch.from_numpy(token)
    cache = nn.QuantizedCache.init(2, 8, 64, like=token, batch=(1,), window=4, block=8)
    for _ in range(30):
        cache = cache.append(token, token)
    calls = []
    for name in ("partial", "pieces"):
        module = sys.modules[f"polyattn._api.{name}"]

        def describe(*x, real=module.describe, **options):
            calls.append(x)
            return real(*x, **options)

        monkeypatch.setattr(module, "describe", describe)
    forget()
    outputs = [np.asarray(cache.attention(token)) for _ in range(3)]
    assert len(calls) == 2  # over the integers, and over the newest tokens
    np.testing.assert_array_equal(outputs[0], outputs[2])
    np.testing.assert_allclose(outputs[2], 1.0, atol=1e-2)
