"""Functions of MLX and Keras, beside those libraries themselves."""

import inspect
import os

import numpy as np
import pytest

from polyattn.dialects import keras as keras_dialect
from polyattn.dialects import mlx as mlx_dialect

mx = pytest.importorskip("mlx.core")
RNG = np.random.default_rng(0)


def normal(*shape):
    return RNG.standard_normal(shape, dtype=np.float32)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mask": "causal"},
        {"mask": RNG.random((6, 9)) > 0.3},
        {"mask": normal(4, 6, 9)},
        {"mask": RNG.random((2, 1, 1, 9)) > 0.3, "sinks": normal(4)},
        {"mask": normal(2, 1, 6, 9), "force_fused": False, "stream": None},
    ],
    ids=lambda options: "-".join(f"{k}{getattr(v, 'shape', v)}" for k, v in options.items()),
)
def test_mlx(options):
    arrays = normal(2, 4, 6, 8), normal(2, 2, 9, 8), normal(2, 2, 9, 8)
    given = {k: mx.array(x) if isinstance(x, np.ndarray) else x for k, x in options.items()}
    in_mlx = list(map(mx.array, arrays))
    expected = np.array(mx.fast.scaled_dot_product_attention(*in_mlx, scale=0.4, **given))
    own = mlx_dialect.scaled_dot_product_attention
    np.testing.assert_allclose(own(*arrays, scale=0.4, **options), expected, atol=2e-6)
    found = own(*in_mlx, scale=0.4, **given)
    assert isinstance(found, mx.array)
    np.testing.assert_allclose(np.array(found), expected, atol=2e-6)


def test_mlx_knows_one_name_of_a_mask():
    x = normal(1, 1, 2, 4)
    with pytest.raises(ValueError, match="mask must be \"causal\" or an array; got 'window'"):
        mlx_dialect.scaled_dot_product_attention(x, x, x, scale=1.0, mask="window")


@pytest.fixture(scope="module")
def keras():
    before = os.environ.get("KERAS_BACKEND")
    os.environ["KERAS_BACKEND"] = "jax"
    module = pytest.importorskip("keras")
    yield module
    if before is None:
        del os.environ["KERAS_BACKEND"]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True},
        {"bias": normal(4, 1, 9), "mask": RNG.random((2, 1, 6, 9)) > 0.3},
        {"mask": np.array([[[[1, 0, 1, 1, 0, 1, 1, 0, 1]]]]) == 1, "is_causal": True},
        {"scale": 0.3, "flash_attention": False},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_keras(options, keras):
    arrays = normal(2, 6, 4, 8), normal(2, 9, 2, 8), normal(2, 9, 2, 8)
    expected = np.asarray(keras.ops.dot_product_attention(*arrays, **options))
    found = keras_dialect.dot_product_attention(*arrays, **options)
    np.testing.assert_allclose(found, expected, atol=2e-6)


def test_keras_in_what_it_documents_only(keras):
    x = normal(1, 3, 2, 4)
    own = keras_dialect.dot_product_attention
    numbers = np.array([1, 0, 2], np.int32)
    np.testing.assert_array_equal(own(x, x, x, mask=numbers), own(x, x, x, mask=numbers != 0))
    capped = own(x, x, x, attn_logits_soft_cap=0.5)
    scores = 0.5 * np.tanh(np.einsum("blhd,bshd->bhls", x, x) / 2 / 0.5)
    weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    np.testing.assert_allclose(capped, np.einsum("bhls,bshd->blhd", weights, x), atol=2e-6)
    with pytest.raises(ValueError, match=r"key .* shape \(B, S, G, D\).*got \(3, 2, 4\)"):
        own(x, x[0], x)
    original = inspect.signature(keras.ops.dot_product_attention)
    assert list(inspect.signature(own).parameters) == list(original.parameters)
