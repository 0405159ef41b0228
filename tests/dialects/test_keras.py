"""The function of Keras, beside Keras itself."""

import inspect
import os

import numpy as np
import pytest

from polyattn.dialects import keras as keras_dialect

RNG = np.random.default_rng(0)


def normal(*shape):
    return RNG.standard_normal(shape, dtype=np.float32)


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
