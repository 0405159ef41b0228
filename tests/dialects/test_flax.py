"""Attention of Flax's layers, with the layers themselves."""

import inspect
from functools import partial

import numpy as np
import pytest
from optional import jax

from polyattn.dialects.flax import dot_product_attention

pytest.importorskip("flax")
from flax import linen, nnx


def tokens(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=(*shape, 32)).astype("f4")


def made(**options):
    """Return a layer of Flax, with weights, that arrays are passed to."""
    return nnx.MultiHeadAttention(4, 32, **{"decode": False} | options, rngs=nnx.Rngs(0))


CAUSAL = np.tril(np.ones((6, 6), "f4"))[None, None]  # of floats, as Flax makes masks


@pytest.mark.slow
def test_a_layer_of_flax_gives_the_output_and_gradients_of_its_own_function():
    results = []
    for function in ({}, {"attention_fn": dot_product_attention}):
        layer = made(num_kv_heads=2, normalize_qk=True, **function)

        def both(x, along, layer=layer):
            y, pullback = jax.vjp(lambda x: layer(x, mask=CAUSAL), x)
            return y, *pullback(along)

        results.append(jax.jit(both)(tokens(2, 6), tokens(2, 6, seed=2)))
    for own, ours in zip(*results, strict=True):
        assert abs(own - ours).max() < 1e-6 * abs(own).max()


@pytest.mark.slow
def test_a_layer_of_flax_decodes_with_its_cache():
    x = tokens(2, 6)
    layer = made(decode=True, attention_fn=dot_product_attention)
    layer.init_cache(x.shape)
    step = nnx.jit(lambda layer, x: layer(x))
    rows = [step(layer, x[:, i : i + 1]) for i in range(6)]
    np.testing.assert_allclose(np.concatenate(rows, 1), made()(x, mask=CAUSAL), atol=1e-5)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dropout_rate": 0.5}, "broadcast_dropout must be False; got True"),
        ({"module": object()}, "sow_weights must be False; got True"),
        ({"precision": "high"}, "precision must be None; got 'high'"),
        ({"qk_attn_weights_einsum": np.einsum}, "qk_attn_weights_einsum must be"),
    ],
)
def test_options_of_flax_that_are_not_supported_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        dot_product_attention(*[heads(1, 6)] * 3, **options)


def heads(*shape, seed=0):
    return tokens(*shape, 1, seed=seed).reshape(*shape, 4, 8)


@pytest.mark.parametrize(
    ("options", "batch"),
    [
        ({"bias": heads(1)[0, :, :6, None], "deterministic": True, "dropout_rate": 0.5}, (2, 3)),
        ({"mask": np.tri(6, 9, 2), "bias": tokens(4, 6)[..., :9], "dtype": "bfloat16"}, (2,)),
        (
            {"promote_dtype": lambda arrays, dtype: [x * 0.5 for x in arrays], "is_causal": True},
            (),
        ),
    ],
    ids=("bias", "mask", "causal"),
)
def test_the_function_gives_the_numbers_of_flaxs(options, batch):
    arrays = heads(*batch, 6), heads(*batch, 9, seed=1), heads(*batch, 9, seed=2)
    jnp = jax.numpy
    given = {k: jnp.asarray(x) if isinstance(x, np.ndarray) else x for k, x in options.items()}

    def both(*arrays):
        functions = dot_product_attention, nnx.dot_product_attention
        return [function(*arrays, **given) for function in functions]

    found, expected = jax.jit(both)(*arrays)
    assert found.dtype == expected.dtype
    atol = 0.03 if "dtype" in options else 2e-6
    np.testing.assert_allclose(*(np.asarray(x, "f4") for x in (found, expected)), atol=atol)
    if "dtype" not in options:  # NumPy has no bfloat16
        np.testing.assert_allclose(dot_product_attention(*arrays, **options), expected, atol=atol)


def test_dropout_needs_a_key_or_a_number():
    x = heads(1, 64)
    call = partial(dot_product_attention, x, x, x, dropout_rate=0.5, broadcast_dropout=False)
    with pytest.raises(ValueError, match=r"dropout_rng must be a key of jax.random or an integer"):
        call()
    assert np.array_equal(call(dropout_rng=1), call(dropout_rng=1))
    assert not np.array_equal(call(dropout_rng=1), call(dropout_rng=2))


def test_the_function_has_the_arguments_of_both_of_flaxs():
    functions = dot_product_attention, nnx.dot_product_attention, linen.dot_product_attention
    own, one, other = (list(inspect.signature(function).parameters) for function in functions)
    assert own == list(dict.fromkeys(one + other))
