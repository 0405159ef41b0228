"""The page of layers: its code does what the page says, and it names all that there is."""

import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pages
import pytest

from polyattn import nn
from polyattn.nn.load.models import FAMILIES

PAGE = Path(__file__).resolve().parents[2] / "docs" / "nn.md"
TEXT = PAGE.read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_page_prints_what_it_shows_and_its_model_trains():
    assert pages.surprises(PAGE) == []
    names = pages.run(PAGE)[-1].names
    after, _ = names["loss"](names["model"], names["jnp"].asarray([[3, 1, 4, 1, 5]]))
    assert after < names["before"]


def test_every_public_name_is_on_the_page():
    # A block or a model names the parts that it is made of.
    parts = {"Embedding", "FeedForward", "LayerNorm", "Linear", "Module", "Stack", "load"}
    missing = [name for name in nn.__all__ if name not in TEXT and name not in parts]
    assert missing == []


def test_the_table_of_families_has_all_of_them():
    rows = re.findall(
        r"^\| \w+ \| (`[^|]+`) \| .*\|$", TEXT.partition("| family |")[2], re.MULTILINE
    )
    assert set(re.findall(r"`([\w-]+)`", " ".join(rows))) == FAMILIES.keys()


@pytest.fixture(scope="module")
def page():
    """Return the names of the page's code for layers of others."""
    names = {"jax": pytest.importorskip("jax"), "flax": pytest.importorskip("flax")}
    text = TEXT.partition("## In layers of")[2]
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(block, names)
    return SimpleNamespace(**names)


def tokens(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=(*shape, 32)).astype("f4")


def made(page, variant, heads=4, **options):
    """Return a layer of Flax, with weights, that arrays are passed to."""
    if variant == "nnx":
        options = {"decode": False} | options
        return page.nnx.MultiHeadAttention(heads, 32, **options, rngs=page.nnx.Rngs(0))
    layer, key = page.linen.MultiHeadAttention(heads, **options), page.jax.random.key(0)
    own = {"dropout_rate": 0.0, "attention_fn": page.linen.dot_product_attention}
    weights = layer.clone(**own).init(key, tokens(2, 6))
    return layer.bind(weights, rngs={"dropout": key}, mutable=["cache"])


CAUSAL = np.tril(np.ones((6, 6), "f4"))[None, None]  # of floats, as Flax makes masks


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "options", "called"),
    [
        ("nnx", {"num_kv_heads": 2, "normalize_qk": True}, {"mask": CAUSAL}),
        ("linen", {"dropout_rate": 0.5, "deterministic": True}, {"mask": CAUSAL > 0}),
        ("nnx", {}, {"inputs_k": tokens(2, 9, seed=1), "is_causal": True}),
        ("nnx", {"dtype": "bfloat16"}, {"is_causal": True}),
        ("linen", {}, {"inputs_k": tokens(2, 9, seed=1)}),
    ],
    ids=("grouped heads", "mask", "causal, L < S", "bfloat16", "memory"),
)
def test_a_layer_of_flax_gives_the_output_and_gradients_of_its_own_function(
    page, variant, options, called
):
    results = []
    for function in ({}, {"attention_fn": page.attention_fn}):
        layer = made(page, variant, **options, **function)

        def both(x, along, layer=layer):
            y, pullback = page.jax.vjp(lambda x: layer(x, **called), x)
            return y, *pullback(along.astype(y.dtype))

        results.append(page.jax.jit(both)(tokens(2, 6), tokens(2, 6, seed=2)))
    for own, ours in zip(*results, strict=True):
        assert own.dtype == ours.dtype
        assert abs(own - ours).max() < (0.02 if "dtype" in options else 1e-6) * abs(own).max()


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["nnx", "linen"])
def test_a_layer_of_flax_decodes_with_its_cache(page, variant):
    x = tokens(2, 6)
    whole = made(page, variant)(x, mask=CAUSAL)
    layer = made(page, variant, decode=True, attention_fn=page.attention_fn)
    step = layer
    if variant == "nnx":
        layer.init_cache(x.shape)
        step = partial(page.nnx.jit(lambda layer, x: layer(x)), layer)
    rows = [step(x[:, i : i + 1]) for i in range(6)]
    np.testing.assert_allclose(np.concatenate(rows, 1), whole, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["nnx", "linen"])
def test_a_layer_of_flax_drops_weights(page, variant):
    """Each row sees its own key, so it is 0 or 4/3 of what it is without dropout."""
    own = {"dropout_rate": 0.25, "broadcast_dropout": False, "use_bias": False}
    layer = made(page, variant, 1, **own, attention_fn=page.attention_fn)
    call = partial(layer, tokens(2, 64), mask=np.eye(64)[None, None])
    whole, one, other = (call(deterministic=is_whole) for is_whole in (True, False, False))
    kept = abs(one).max(-1, keepdims=True) > 0
    np.testing.assert_allclose(one, kept * whole / 0.75, atol=1e-5)
    assert 0.6 < kept.mean() < 0.9
    assert not np.array_equal(one, other)


DROPS = {"dropout_rate": 0.5, "deterministic": False}
EINSUM = ("qk_attn_weights_einsum_cls", "attn_weights_value_einsum_cls")


@pytest.mark.parametrize(
    ("variant", "options", "called", "reason"),
    [
        ("nnx", DROPS, {}, "support broadcast_dropout=True: pass broadcast_dropout=False"),
        ("linen", DROPS, {}, "support broadcast_dropout=True: pass broadcast_dropout=False"),
        ("nnx", {}, {"sow_weights": True}, "support sow_weights=True: pass sow_weights=False"),
        ("linen", {}, {"sow_weights": True}, "support sow_weights=True: pass sow_weights=False"),
        ("linen", {"precision": "high"}, {}, "support precision=high: pass precision=None"),
        ("linen", dict.fromkeys(EINSUM, lambda: np.einsum), {}, f"support {EINSUM[0]}="),
    ],
)
def test_options_of_flax_that_are_not_supported_are_refused(page, variant, options, called, reason):
    layer = made(page, variant, **options, attention_fn=page.attention_fn)
    with pytest.raises(ValueError, match=reason):
        layer(tokens(2, 6), **called)


def test_the_function_for_flax_computes_in_the_dtype_of_the_layer(page):
    x = page.jax.numpy.ones((1, 2, 1, 4))
    assert page.attention_fn(x, x, x, dtype="bfloat16").dtype == "bfloat16"


@pytest.mark.slow
def test_a_layer_of_equinox_takes_the_function_of_the_page(page):
    jax, x = page.jax, tokens(6)
    maps = [np.random.default_rng(n).normal(size=(32, 32)).astype("f4") for n in range(4)]
    fields = ("query_proj", "key_proj", "value_proj", "output_proj")
    layer = SimpleNamespace(num_heads=4)  # the parts of Equinox' layer
    for field, weight in zip(fields, maps, strict=True):
        setattr(layer, field, lambda x, weight=weight: weight @ x)
    heads = [(x @ weight.T).reshape(1, 6, 4, 8) for weight in maps[:3]]
    expected = jax.nn.dot_product_attention(*heads, is_causal=True)[0].reshape(6, 32) @ maps[3].T
    x = jax.numpy.asarray(x)
    assert jax.numpy.allclose(page.attend(layer, x, x, x, is_causal=True), expected, atol=1e-4)
