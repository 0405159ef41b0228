"""Decoding with a cache: step by step what the full pass gives, whatever a library's arrays do."""

import copy
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product
from threading import Barrier

import numpy as np
import pytest
from optional import jax, jnp, torch

from polyattn import attention, nn
from polyattn.integrations.jax import register
from polyattn.nn import cache as cache_module

RNG = np.random.default_rng(9)
IDS = RNG.integers(0, 11, size=(2, 9))
TOKENS = RNG.normal(size=(2, 3, 9, 4))  # (batch, G, tokens, D)
TOKEN = TOKENS[:, :, :1]
CONTEXT = RNG.normal(size=(2, 5, 24)).astype(np.float32)
#: Options of a model, its context, and a window that its caches slide by.
KINDS = {
    "rotary, grouped": ({"key_heads": 2, "rotary": nn.Rotary(6), "norm": nn.RMSNorm}, (), None),
    "learned positions, fused": ({"positions": 16, "fused": True, "value_size": 3}, (), None),
    "sines, after the sum": ({"positions": nn.Sinusoidal(24), "pre_norm": False}, (), None),
    "cross-attention": ({"cross": True, "blocks": 1}, (CONTEXT,), None),
    "a slid window": ({"key_heads": 2, "rotary": nn.Rotary(6)}, (), 3),
}


@pytest.fixture(scope="module", autouse=True)
def _pytrees():
    register()


def model_of(to, blocks=2, **options):
    options = {"is_causal": True, "positions": 16, "seed": 2} | options
    return nn.Transformer.init(11, 24, 4, blocks, like=to(np.zeros(1, np.float32)), **options)


def full_pass(kind, context=(), **options):
    """The logits of all tokens, without caches and by NumPy: a seed means one model everywhere."""
    return model_of(np.asarray, **kind)(IDS, *context, is_causal=True, **options)


# JAX, which compiles each block and each length of a step, has a compiled step, below.
@pytest.mark.parametrize(
    ("library", "kind"),
    [
        *(("numpy", kind) for kind in KINDS),
        *product(["torch", "torch on a device", "strict"], ["rotary, grouped", "a slid window"]),
    ],
    indirect=["library"],
)
def test_every_step_gives_what_the_full_pass_does(library, kind):
    (kind, context, window), (to, back) = KINDS[kind], library
    options = {} if window is None else {"window": (window, 0)}
    full, model, found = full_pass(kind, context, **options), model_of(to, **kind), []
    caches = model.caches(5, batch=(2,))
    for ids in np.split(IDS, [4, 5, 6], axis=1):
        given = map(to, (ids, *context))
        logits, caches = model(*given, caches=caches, is_causal=True, **options)
        found.append(back(logits))
        if window is not None:
            caches = tuple(cache.slide(window) for cache in caches)
    np.testing.assert_allclose(np.concatenate(found, axis=1), full, atol=2e-5)
    assert all(cache.next_position == 9 for cache in caches)


def test_a_compiled_step_of_jax_is_compiled_once_and_gives_the_same():
    kind, compiled = KINDS["rotary, grouped"][0] | {"blocks": 1}, []

    @jax.jit
    def step(model, token, caches):
        compiled.append(token)
        return model(token, caches=caches, is_causal=True)

    model, full = model_of(jnp.asarray, **kind), full_pass(kind)
    caches = model.caches(9, batch=(2,))  # the last token fits
    for n in range(9):
        logits, caches = step(model, jnp.asarray(IDS[:, n : n + 1]), caches)
        np.testing.assert_allclose(logits[:, 0], full[:, n], atol=2e-5)
    assert len(compiled) == 1


# ---- the cache by itself -----------------------------------------------------------------------


def filled(to, count, capacity=6, **options):
    tokens = to(TOKENS[:, :, :count])
    cache = nn.KVCache.init(3, 4, capacity, batch=(2,), like=to(TOKEN), **options)
    return cache.append(tokens, tokens + 1)


def holds(back, cache, tokens):
    np.testing.assert_allclose(back(cache.keys), tokens, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(back(cache.values), tokens + 1, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "library", ["numpy", "torch", "torch on a device", "strict"], indirect=True
)
def test_caches_hold_what_was_appended_grow_and_go_on_truncated_and_slid(library):
    to, back = library
    cache, rest = filled(to, 5), to(TOKENS[:, :, 5:])
    assert (cache.length, cache.capacity) == (5, 6)
    grown = cache.append(rest, rest + 1)
    holds(back, grown, TOKENS)
    assert grown.capacity >= 9
    more = to(TOKENS[:, :, 7:8])
    holds(back, cache.truncate(np.asarray(2)).append(more, more + 1), TOKENS[:, :, [0, 1, 7]])
    holds(back, cache, TOKENS[:, :, :5])
    cache = cache.slide(2)
    assert (cache.length, cache.dropped, cache.next_position) == (2, 3, 5)
    for n in range(5, 9):
        more = to(TOKENS[:, :, n : n + 1])
        cache = cache.append(more, more + 1).slide(2)
        holds(back, cache, TOKENS[:, :, n - 1 : n + 1])
    assert cache.capacity <= 16
    assert cache.slide(5).length == 2


CACHES = {
    "KVCache": {},
    "KVCache without memory": {"capacity": 0},
    "PagedCache": {"items": 2, "page": 4},
    "no window": {"window": 0, "block": 4},
    "no float": {"window": 0, "block": 1},
}


def cache_of(kind, like, **more):
    options = {"like": like, "capacity": 8} | CACHES[kind] | more
    if kind == "PagedCache":
        return nn.PagedCache.init(3, 4, **options)
    create = nn.QuantizedCache if "window" in options else nn.KVCache
    return create.init(3, 4, batch=(2,), **options)


@pytest.mark.parametrize(
    ("library", "kind"),
    [
        *product(["numpy"], CACHES),
        *product(["torch", "strict"], ["KVCache without memory", "no float"]),
        ("jax", "KVCache"),
    ],
    indirect=["library"],
)
def test_no_rows_may_be_appended(library, kind):
    to, back = library
    whole, query, none = (to(TOKENS[:, :, :count].astype(np.float32)) for count in (8, 1, 0))
    cache = cache_of(kind, whole).append(none, none)
    full = cache.append(whole, whole).append(none, none)
    for one, count in ((full, 8), (full.truncate(0), 0), (full.truncate(0).append(none, none), 0)):
        if isinstance(one, nn.QuantizedCache):
            found, most = one.attention(query), 0.05
        else:
            found, most = attention(query, one.keys, one.values, **one.options({})), 1e-5
        tokens = TOKENS[:, :, :count]
        np.testing.assert_allclose(
            back(found), attention(TOKENS[:, :, :1], tokens, tokens), atol=most
        )


@pytest.mark.parametrize("kind", CACHES)
def test_values_of_size_0_are_not_those_of_the_keys_size(kind):
    cache = cache_of(kind, np.zeros(1, np.float32), value_size=0)
    tokens = np.zeros((2, 3, 99, 4), np.float32)  # beyond its capacity
    cache = cache.append(tokens, tokens[..., :0])
    assert getattr(cache, "recent", cache).values.shape[-1] == 0


def draft(to, number, count=3):
    tokens = to(np.full((2, 3, count, 4), number, TOKENS.dtype))
    return tokens, tokens + 1


@pytest.mark.parametrize("library", ["numpy", "torch", "torch on a device"], indirect=True)
@pytest.mark.parametrize("slid", [0, 2])
def test_drafts_that_were_taken_back_are_overwritten_without_a_copy(library, slid):
    to, back = library
    cache, expected = filled(to, 4, capacity=64).slide(4 - slid), TOKENS[:, :, slid:4]
    buffer = cache.buffer
    for number in range(5):
        cache = cache.append(*draft(to, number)).truncate(cache.length + 1)
        expected = np.concatenate([expected, np.full((2, 3, 1, 4), number)], axis=2)
        holds(back, cache, expected)
    assert cache.buffer is buffer
    cache = cache.truncate(2)
    cache = cache.append(*draft(to, 9))
    assert cache.buffer is buffer
    holds(back, cache, np.concatenate([expected[:, :, :2], np.full((2, 3, 3, 4), 9)], axis=2))


def numpy_of_torch(cache):
    arrays = (torch.from_numpy(array.numpy()) for array in (cache.key, cache.value))
    return nn.KVCache(*arrays, cache.length)


#: What may hold the memory of a cache, or some of it.
OTHERS = {
    "the older cache": lambda cache: cache,
    "one that slid": lambda cache: cache.slide(3),
    "a copy": copy.copy,
    "views": lambda cache: nn.KVCache(cache.keys, cache.values, cache.length),
    "tree map": lambda cache: jax.tree.map(lambda leaf: leaf, cache),
    "replaced key": lambda cache: replace(cache, key=cache.key + 0),
    "another's buffer": lambda c: replace(c, buffer=filled(np.asarray, c.length).buffer),
    "detached": lambda c: nn.KVCache(c.key.detach(), c.value.detach(), c.length),
    "numpy of torch": numpy_of_torch,
}
IN_NUMPY = ["one that slid", "a copy", "views", "tree map", "replaced key", "another's buffer"]
IN_TORCH = ["the older cache", "views", "detached", "numpy of torch"]


@pytest.mark.parametrize(
    ("library", "other"),
    [*product(["numpy"], IN_NUMPY), *product(["torch"], IN_TORCH)],
    indirect=["library"],
)
def test_what_was_taken_back_stays_where_anything_else_holds_it(library, other):
    to, back = library
    for count, length in ((6, 2), (2, 2), (0, 0)):
        cache = filled(to, count)
        kept = OTHERS[other](cache)
        before = back(kept.keys).copy()
        cache = cache.truncate(length)
        following = cache.append(*draft(to, 9))
        after = [kept.append(*draft(to, number)) for number in (7, 8)]
        np.testing.assert_array_equal(back(kept.keys), before)
        tokens = (TOKENS[:, :, :length], before, before)
        for one, held, number in zip((following, *after), tokens, (9, 7, 8), strict=True):
            holds(back, one, np.concatenate([held, np.full((2, 3, 3, 4), number)], axis=2))


class Slow(np.ndarray):
    """Memory that lets other threads run before it is written to."""

    def __setitem__(self, where, rows):
        time.sleep(0.01)
        super().__setitem__(where, rows)


@pytest.mark.parametrize("taken_back", [0, 3])
def test_of_threads_that_follow_one_cache_each_has_its_own_tokens(monkeypatch, taken_back):
    zeros = cache_module.zeros
    monkeypatch.setattr(cache_module, "zeros", lambda *args: zeros(*args).view(Slow))
    tokens = [TOKEN + number for number in range(8)]
    cache = filled(np.asarray, 2 + taken_back).truncate(2)
    start = Barrier(len(tokens), timeout=60)

    def follow(new):
        start.wait()
        return cache.append(new, new + 1)

    with ThreadPoolExecutor(len(tokens)) as pool:
        for found, new in zip(pool.map(follow, tokens), tokens, strict=True):
            holds(np.asarray, found, np.concatenate([TOKENS[:, :, :2], new], axis=2))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_caches_are_made_and_grow_in_a_compiled_function_of_torch():
    def grown(tokens):
        cache = nn.KVCache.init(3, 4, 6, batch=(2,), like=tokens)
        return cache, cache.append(tokens, tokens + 1)

    tokens = torch.tensor(TOKENS[:, :, :8])
    empty, cache = torch.compile(grown, fullgraph=True, backend="eager")(tokens)
    one, other = tokens[:, :, :1], tokens[:, :, 1:2]
    first, second = empty.append(one, one + 1), empty.append(other, other + 1)
    holds(np.asarray, first, TOKENS[:, :, :1])
    holds(np.asarray, second, TOKENS[:, :, 1:2])
    holds(np.asarray, cache.append(one, one + 1), TOKENS[:, :, [*range(8), 0]])


KEYS, SHORT = np.ones((2, 3, 1, 4)), np.ones((2, 1, 4))


@pytest.mark.parametrize(
    ("act", "error", "said"),
    [
        (lambda c: c.append(np.ones((2, 3, 1, 5)), KEYS), ValueError, r"key must .* 'n', 4\)"),
        (lambda c: c.append(KEYS, SHORT), ValueError, "value must have the shape"),
        (lambda c: c.append(KEYS, np.ones((2, 3, 2, 4))), ValueError, "as many values as keys"),
        (lambda c: c.truncate(4), ValueError, "3 tokens; got 4"),
        (lambda c: c.truncate(-1), ValueError, "3 tokens; got -1"),
        (
            lambda c: c.append(torch.tensor(TOKEN), torch.tensor(TOKEN)), TypeError,
            r"key must be float64 of numpy.* got torch.float64 of torch",
        ),
        (
            lambda c: c.append(TOKEN, TOKEN.astype(np.float32)), TypeError,
            r"value must be float64 of numpy.* got float32 of numpy",
        ),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(act, error, said):
    with pytest.raises(error, match=said):
        act(filled(np.asarray, 3))


def test_a_step_compiled_once_decodes_a_window_in_memory_for_the_window_alone():
    traced, cache = [], filled(jnp.asarray, 0, capacity=3)

    @jax.jit
    def step(cache, *token):
        traced.append(cache)
        return cache.append(*token)

    for n in range(9):
        token = jnp.asarray(TOKENS[:, :, n : n + 1])
        cache = step(cache.slide(2), token, token + 1)
        holds(np.asarray, cache.slide(3), TOKENS[:, :, max(n - 2, 0) : n + 1])
        assert cache.next_position == n + 1
    assert len(traced) == 1
    with pytest.raises(ValueError, match=r"inside a traced function.*give attention window="):
        jax.jit(lambda length: nn.KVCache(cache.key, cache.value, length).slide(2).key)(3)


def test_gradients_are_right_whichever_map_is_trained():
    layer = nn.MultiHeadAttention.init(8, 2, like=torch.zeros(1), is_causal=True)
    x, parameters = torch.randn(1, 6, 8), layer.parameters()
    for name in ("query", "key", "value"):
        trained = parameters[f"{name}.weight"].requires_grad_()
        layer(x).square().sum().backward()
        expected, trained.grad = trained.grad, None
        cache = layer.cache(8, like=torch.zeros(1), batch=(1,))
        first, following = layer(x[:, :4], cache=cache)
        second, _ = layer(x[:, 4:], cache=following)
        (first.square().sum() + second.square().sum()).backward()
        torch.testing.assert_close(trained.grad, expected, atol=1e-4, rtol=1e-4)
        assert not cache.value.requires_grad
        trained.requires_grad_(False)


def test_memory_of_inference_mode_is_left_alone_outside_of_it():
    token = torch.tensor(TOKEN)
    with torch.inference_mode():
        cache = nn.KVCache.init(3, 4, 6, batch=(2,), like=token).append(token, token + 1)
    holds(np.asarray, cache.append(token, token + 1), TOKENS[:, :, [0, 0]])


def test_a_cache_whose_lengths_are_names_has_shapes_and_no_memory():
    token = np.ones((2, 3, 1, 4), np.float32)
    cache = nn.KVCache.init(3, 4, 16, like=token, batch=("B", 2), value_size=5)
    assert (cache.key.shape, cache.value.shape) == (("B", 2, 3, 16, 4), ("B", 2, 3, 16, 5))
    assert cache.value.dtype == "float32"
    with pytest.raises(ValueError, match="has no memory, because a string names a length"):
        cache.append(token, token)
