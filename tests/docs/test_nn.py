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
    flax = pytest.importorskip("flax")
    names = {"jax": pytest.importorskip("jax")}
    for block in re.findall(
        r"```python\n(.*?)```", TEXT.partition("## In layers of")[2], re.DOTALL
    ):
        exec(block, names)
    assert names["nnx"] is flax.nnx
    return SimpleNamespace(**names)


def tokens(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=(*shape, 32)).astype("f4")


CAUSAL = np.tril(np.ones((6, 6), "f4"))[None, None]  # of floats, as Flax makes masks


def results(page, variant, made, called, **function):
    """Return the output of a layer of Flax and its gradients, compiled."""
    jax, nnx, linen = page.jax, page.nnx, page.linen
    x, memory = tokens(2, 6), called.get("memory")
    options = {name: value for name, value in called.items() if name != "memory"}

    def weighed(y):
        return (y * tokens(2, 6, seed=2)).sum(), y

    if variant == "nnx":
        layer = nnx.MultiHeadAttention(4, 32, **made, **function, decode=False, rngs=nnx.Rngs(0))
        run = nnx.grad(lambda layer: weighed(layer(x, memory, **options)), has_aux=True)
        return jax.tree.leaves(nnx.jit(run)(layer))
    layer = linen.MultiHeadAttention(4, **made, **function)
    run = jax.grad(lambda made: weighed(layer.apply(made, x, memory, **options)), has_aux=True)
    return jax.tree.leaves(jax.jit(run)(layer.init(jax.random.key(0), x)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "made", "called"),
    [
        ("nnx", {"num_kv_heads": 2, "normalize_qk": True}, {"mask": CAUSAL}),
        ("linen", {"dropout_rate": 0.5, "deterministic": True}, {"mask": CAUSAL > 0}),
        ("nnx", {}, {"is_causal": True, "memory": tokens(2, 9, seed=1)}),
        ("nnx", {"dtype": "bfloat16"}, {"is_causal": True}),
        ("linen", {}, {"memory": tokens(2, 9, seed=1)}),
    ],
    ids=(
        "nnx, grouped heads",
        "linen, mask",
        "nnx, causal, L < S",
        "nnx, bfloat16",
        "linen, memory",
    ),
)
def test_a_layer_of_flax_gives_the_output_and_gradients_of_its_own_function(
    page, variant, made, called
):
    theirs = results(page, variant, made, called)
    ours = results(page, variant, made, called, attention_fn=page.attention_fn)
    assert all(own.dtype == one.dtype for own, one in zip(theirs, ours, strict=True))
    largest = max(abs(own).max() for own in theirs)
    error = max(abs(own - one).max() for own, one in zip(theirs, ours, strict=True))
    assert error < (0.01 if "dtype" in made else 1e-6) * largest


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["nnx", "linen"])
def test_a_layer_of_flax_decodes_with_its_cache(page, variant):
    jax, nnx, linen, x = page.jax, page.nnx, page.linen, tokens(2, 6)
    if variant == "nnx":
        layer = nnx.MultiHeadAttention(4, 32, attention_fn=page.attention_fn, rngs=nnx.Rngs(0))
        whole = layer(x, mask=CAUSAL, decode=False)
        layer.init_cache(x.shape)
        step = nnx.jit(lambda layer, x: layer(x, decode=True))
        rows = [step(layer, x[:, i : i + 1]) for i in range(6)]
    else:
        layer = linen.MultiHeadAttention(4, decode=True, attention_fn=page.attention_fn)
        made, rows = layer.init(jax.random.key(0), x), []
        own = {"params": made["params"]}
        whole = linen.MultiHeadAttention(4).apply(own, x, mask=CAUSAL)
        for i in range(6):
            row, cache = layer.apply(made, x[:, i : i + 1], mutable=["cache"])
            made, rows = made | cache, [*rows, row]
    np.testing.assert_allclose(np.concatenate(rows, 1), whole, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["nnx", "linen"])
def test_a_layer_of_flax_drops_weights(page, variant):
    """Each row sees its own key, so it is 0 or 4/3 of what it is without dropout."""
    jax, nnx, linen, x = page.jax, page.nnx, page.linen, tokens(2, 64)
    own = {"dropout_rate": 0.25, "broadcast_dropout": False, "use_bias": False}
    own["attention_fn"] = page.attention_fn
    alone = {"mask": np.eye(64)[None, None]}
    if variant == "nnx":
        call = nnx.MultiHeadAttention(1, 32, **own, decode=False, rngs=nnx.Rngs(0))
        keys = ({}, {})
    else:
        layer = linen.MultiHeadAttention(1, **own)
        made = layer.init(jax.random.key(0), x, deterministic=True)
        call = partial(layer.apply, made)
        keys = tuple({"dropout_rng": jax.random.key(n)} for n in range(2))
    whole = call(x, **alone, deterministic=True)
    one, other = (call(x, **alone, deterministic=False, **key) for key in keys)
    kept = abs(one).max(-1, keepdims=True) > 0
    np.testing.assert_allclose(one, kept * whole / 0.75, atol=1e-5)
    assert 0.6 < kept.mean() < 0.9
    assert not np.array_equal(one, other)


@pytest.mark.parametrize(
    ("variant", "made", "called", "reason"),
    [
        ("nnx", {"dropout_rate": 0.5}, {"deterministic": False}, "pass broadcast_dropout=False"),
        ("linen", {"dropout_rate": 0.5}, {"deterministic": False}, "pass broadcast_dropout=False"),
        ("nnx", {}, {"sow_weights": True}, "pass sow_weights=False"),
        ("linen", {}, {"sow_weights": True}, "pass sow_weights=False"),
        ("linen", {"precision": "high"}, {}, "precision=high: pass precision=None"),
        (
            "linen",
            dict.fromkeys(
                ("qk_attn_weights_einsum_cls", "attn_weights_value_einsum_cls"),
                lambda: np.einsum,
            ),
            {},
            "support qk_attn_weights_einsum_cls=",
        ),
    ],
)
def test_what_polyattn_does_not_support_in_a_layer_of_flax_is_refused(
    page, variant, made, called, reason
):
    if variant == "nnx":
        layer = page.nnx.MultiHeadAttention(
            4, 32, **made, attention_fn=page.attention_fn, decode=False, rngs=page.nnx.Rngs(0)
        )
    else:
        layer = page.linen.MultiHeadAttention(4, **made, attention_fn=page.attention_fn)
        layer = layer.bind(
            page.linen.MultiHeadAttention(4).init(page.jax.random.key(0), tokens(6)),
            rngs={"dropout": page.jax.random.key(0)},
        )
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
