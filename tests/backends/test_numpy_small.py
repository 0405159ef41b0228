"""The kernel small of the NumPy backend."""

import math

import numpy as np
import pytest

from polyattn import attention, attention_partial, explain


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_row_of_absent_keys_is_zero(dtype):
    query = np.array([[[1.0, 0], [2, 0]]], dtype)
    key = np.array([[[-math.inf, 0], [-math.inf, 0]]], dtype)
    value = np.ones_like(key)
    output, logsumexp = attention_partial(query, key, value, kernel="small")
    assert output.dtype == dtype
    np.testing.assert_array_equal(output, 0 * value)
    np.testing.assert_array_equal(logsumexp, [[-math.inf] * 2])
    query[0, 1], key[0, 1] = [0, 1], [0, 3]  # NaN for the first key, so for the row
    value[0, 1] = 5
    assert np.isnan(attention(query, key, value, kernel="small")[0, 1]).all()


def test_a_decoding_step_is_small_and_a_causal_prompt_is_not():
    step, cache = (1, 4, 1, 8), (1, 2, 16, 8)
    assert explain(step, cache, cache, is_causal=True).chosen.kernel == "small"
    prompt = explain(cache, cache, cache, is_causal=True)
    assert prompt.chosen.kernel == "dense"
    assert "it needs rows that see all keys" in str(prompt)
    assert explain(step, cache, cache, dtype="float16").chosen.kernel == "dense"


def test_the_output_keeps_the_byte_order_of_the_query():
    x = np.ones((1, 2, 3, 4), ">f4")
    output, logsumexp = attention_partial(x, x, x, kernel="small")
    assert (output.dtype, logsumexp.dtype) == (x.dtype, np.float32)
    np.testing.assert_array_equal(output, x)
