"""Functions of SageAttention and tokamax against the formula that their documentation gives."""

import numpy as np
import pytest
from optional import jax, torch
from scipy.special import logsumexp

from polyattn.dialects import sageattention, tokamax

RNG = np.random.default_rng(0)


def normal(*shape):
    return RNG.standard_normal(shape)


def plain(q, k, v, seen=True, scale=None, cap=None, bias=0.0):
    """Return the output (..., H, L, E) and the logsumexp of heads-first arrays."""
    k, v = (np.repeat(x, q.shape[-3] // x.shape[-3], axis=-3) for x in (k, v))
    s = q @ k.swapaxes(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    s = (s if cap is None else cap * np.tanh(s / cap)) + bias
    s = np.where(seen, s, -np.inf)
    lse = logsumexp(s, axis=-1)
    return np.exp(s - lse[..., None]) @ v, lse


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("causal", [False, True])
def test_sageattn(layout, causal):
    q, k, v = normal(2, 4, 7, 8), normal(2, 2, 7, 8), normal(2, 2, 7, 5)
    expected, lse = plain(q, k, v, np.tri(7, dtype=bool) if causal else True, 0.3)
    given = [torch.asarray(x if layout == "HND" else x.swapaxes(1, 2)) for x in (q, k, v)]
    output, total = sageattention.sageattn(
        *given, layout, is_causal=causal, sm_scale=0.3, return_lse=True, smooth_k=False
    )
    output = output if layout == "HND" else output.transpose(1, 2)
    np.testing.assert_allclose(output, expected, atol=1e-12)
    np.testing.assert_allclose(total, lse, atol=1e-12)
    alone = sageattention.sageattn(*given, tensor_layout=layout, is_causal=causal, sm_scale=0.3)
    np.testing.assert_allclose(alone if layout == "HND" else alone.transpose(1, 2), output)


def test_packed_sequences_of_sageattn():
    q, k, v = normal(9, 4, 8), normal(9, 2, 8), normal(9, 2, 5)
    ends = np.array([0, 4, 9], dtype=np.int32)
    found = sageattention.sageattn_varlen(q, k, v, ends, ends, 5, 5, True)
    for i, j in ((0, 4), (4, 9)):
        one = [x[i:j].swapaxes(0, 1) for x in (q, k, v)]
        expected, _ = plain(*one, np.tri(j - i, dtype=bool))
        np.testing.assert_allclose(found[i:j], expected.swapaxes(0, 1), atol=1e-12)


def test_sageattn_refuses_what_it_cannot_mean():
    x = np.ones((1, 2, 3, 4))
    with pytest.raises(ValueError, match='"HND" or "NHD"; got \'LHD\''):
        sageattention.sageattn(x, x, x, "LHD")
    with pytest.raises(ValueError, match="got L = 2 and S = 3"):
        sageattention.sageattn(x[:, :, :2], x, x, is_causal=True)


@pytest.mark.parametrize("batch", [(), (2,), (2, 3)])
@pytest.mark.parametrize("library", ["numpy", "jax"])
def test_tokamax(batch, library):
    q, k, v = normal(*batch, 6, 4, 8), normal(*batch, 9, 2, 8), normal(*batch, 9, 2, 5)
    i, j = np.ogrid[:6, :9]
    first = [x.swapaxes(-2, -3) for x in (q, k, v)]
    to = np.asarray if library == "numpy" else jax.numpy.asarray
    given = [to(x.astype("float32") if library == "jax" else x) for x in (q, k, v)]
    atol = 2e-6 if library == "jax" else 1e-12
    expected, _ = plain(*first, (j <= i) & (j >= i - 2) & (j <= i + 1), 0.3, 1.5)
    found = tokamax.dot_product_attention(
        *given, is_causal=True, local_window_size=(2, 1), scale=0.3, logits_soft_cap=1.5
    )
    np.testing.assert_allclose(found, expected.swapaxes(-2, -3), atol=atol)
    bias = normal(4, 6, 9)
    lengths = RNG.integers(1, 10, batch or (1,))
    seen = j < (lengths if batch else lengths[0])[..., None, None, None]
    expected, _ = plain(*first, seen, bias=bias)
    found = tokamax.dot_product_attention(
        *given, to(bias.astype(str(np.asarray(given[0]).dtype))), key_value_seq_lengths=to(lengths)
    )
    np.testing.assert_allclose(found, expected.swapaxes(-2, -3), atol=atol)
    with pytest.raises(NotImplementedError, match="with the bias added"):
        tokamax.dot_product_attention(q, k, v, bias, logits_soft_cap=1.0)
