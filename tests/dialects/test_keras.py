"""The function of Keras, beside Keras itself."""

import inspect
import os

import numpy as np
import pytest
from arrays import draw
from pairs import ours

from polyattn.dialects import keras as keras_dialect

BIAS, SEEN = draw((4, 1, 9), (2, 1, 6, 9))
OPTIONS = [
    {"bias": BIAS, "mask": SEEN > -0.5},
    {"mask": np.array([[[[1, 0, 1, 1, 0, 1, 1, 0, 1]]]]) == 1, "is_causal": True},
    {"scale": 0.3, "flash_attention": False},
]


@pytest.fixture(scope="module")
def keras():
    before = os.environ.get("KERAS_BACKEND")
    os.environ["KERAS_BACKEND"] = "jax"
    module = pytest.importorskip("keras")
    yield module
    if before is None:
        del os.environ["KERAS_BACKEND"]


def test_keras(keras):
    arrays = draw((2, 6, 4, 8), (2, 9, 2, 8), (2, 9, 2, 8))
    for options in OPTIONS:
        expected = np.asarray(keras.ops.dot_product_attention(*arrays, **options))
        found = keras_dialect.dot_product_attention(*arrays, **options)
        np.testing.assert_allclose(found, expected, atol=2e-6)
    original = inspect.signature(keras.ops.dot_product_attention)
    own = inspect.signature(keras_dialect.dot_product_attention)
    assert list(own.parameters) == list(original.parameters)


def test_keras_in_what_it_documents_only():
    (x,), own = draw((1, 3, 2, 4)), keras_dialect.dot_product_attention
    numbers = np.array([1, 0, 2], np.int32)
    np.testing.assert_array_equal(own(x, x, x, mask=numbers), own(x, x, x, mask=numbers != 0))
    capped = own(x, x, x, attn_logits_soft_cap=0.5)
    np.testing.assert_allclose(capped, ours(x, x, x, softcap=0.5)[0], atol=2e-6)
    with pytest.raises(ValueError, match=r"key .* shape \(B, S, G, D\).*got \(3, 2, 4\)"):
        own(x, x[0], x)
