"""torch's convention through ours, with its function by its side."""

from inspect import signature
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from optional import jnp
from pairs import normal, ours, spans
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.nn.attention.varlen import varlen_attn as original

from polyattn import attention, use_backend
from polyattn.dialects import onnx_attention, scaled_dot_product_attention
from polyattn.dialects import torch as dialect
from polyattn.dialects.torch import varlen_attn

RNG = torch.Generator().manual_seed(0)
Q, K, V = (torch.randn(2, h, n, 8, generator=RNG) for h, n in ((4, 6), (4, 9), (4, 9)))


OPTIONS = {
    "plain": {},
    "causal": {"is_causal": True},
    "scale": {"scale": torch.tensor(0.3)},
    "mask of heads": {"attn_mask": torch.rand(4, 6, 9, generator=RNG) > 0.5},
    "bias": {"attn_mask": torch.randn(2, 1, 6, 9, generator=RNG)},
    "no keys": {"attn_mask": torch.zeros(6, 9, dtype=torch.bool)},
    "upper left": {"attn_mask": causal_upper_left(6, 9)},
    "lower right": {"attn_mask": causal_lower_right(6, 9)},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_torch(name):
    k, v, options = K[:, :2], V[:, :2], {**OPTIONS[name], "enable_gqa": True}
    expected = torch.nn.functional.scaled_dot_product_attention(Q, k, v, **options)
    found = scaled_dot_product_attention(Q, k, v, **options)
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-5)
    if not name.endswith(("left", "right")):
        options = {
            n: np.asarray(x) if isinstance(x, torch.Tensor) else x for n, x in options.items()
        }
    output = scaled_dot_product_attention(*(x.numpy() for x in (Q, k, v)), **options)
    np.testing.assert_allclose(output, expected, atol=2e-6)
    with use_backend("numpy"):
        output = scaled_dot_product_attention(Q, k, v, **OPTIONS[name], enable_gqa=True)
    torch.testing.assert_close(output, expected, atol=2e-6, rtol=0)


@pytest.mark.parametrize("mask", [torch.rand(6, 9) > 0.5, torch.randn(2, 1, 6, 9)])
def test_a_mask_and_causal_both_count_as_in_the_fused_kernel_of_torch(mask):
    mask[..., 0] = True  # no row is empty
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        expected = torch.nn.functional.scaled_dot_product_attention(Q, K, V, mask, 0.0, True)
    found = scaled_dot_product_attention(Q, K, V, mask, is_causal=True)
    torch.testing.assert_close(found, expected)


def test_what_torch_refuses_or_only_torch_can_do():
    with pytest.raises(ValueError, match=r"lower_right\(5, 9\), but the scores are \(6, 9\)"):
        scaled_dot_product_attention(Q, K, V, causal_lower_right(5, 9))
    with pytest.raises(TypeError, match="attn_mask is torch's CausalBias"):
        onnx_attention(Q, K, V, causal_lower_right(6, 7))
    with pytest.raises(ValueError, match="enable_gqa=True"):
        scaled_dot_product_attention(Q, K[:, :2], V[:, :2])
    with pytest.raises(ValueError, match="CausalBias as attn_mask or is_causal, not both"):
        scaled_dot_product_attention(Q, K, V, causal_upper_left(6, 9), is_causal=True)
    with pytest.raises(NotImplementedError, match=r"query is of jax.*dropout=\(0\.1, seed\)"):
        scaled_dot_product_attention(*(jnp.asarray(x) for x in (Q, K, V)), dropout_p=0.1)
    state = torch.get_rng_state()
    with pytest.raises(ValueError, match=r"dropout_p must be at least 0 and below 1; got 1\.0"):
        scaled_dot_product_attention(Q, K, V, dropout_p=1.0)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("compiles", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_torch_drops_with_a_seed_of_its_generator(compiles):
    """A drop-in for training: other weights at each step, the same after manual_seed."""

    def train(q, rate):
        return scaled_dot_product_attention(q, K, V, dropout_p=rate, is_causal=True)

    step = torch.compile(train, fullgraph=True, backend="eager") if compiles else train
    state = torch.random.get_rng_state()
    leaf = Q.clone().requires_grad_()
    torch.manual_seed(3)
    first, second = step(leaf, 0.25), step(leaf, 0.25)
    torch.manual_seed(3)
    torch.testing.assert_close(step(leaf, 0.25), first, rtol=0, atol=0)
    torch.manual_seed(3)
    seed = int(torch.randint(2**62, ()))
    torch.random.set_rng_state(state)
    same = {"dropout": (0.25, seed), "is_causal": True, "query_offset": 0}
    torch.testing.assert_close(first, attention(Q, K, V, **same))
    assert not torch.equal(first, second)
    first.sum().backward()
    assert leaf.grad.abs().sum() > 0
    step(leaf, 0.0)
    assert torch.equal(torch.random.get_rng_state(), state)


# ---- varlen_attn -------------------------------------------------------------------------------

ENDS_Q, ENDS_K = torch.tensor([0, 2, 6], dtype=torch.int32), torch.tensor([0, 5, 9])


@pytest.mark.parametrize(
    ("window", "own"), [((-1, 0), {"is_causal": True}), ((2, 0), {"window": (2, 0)})]
)
def test_varlen_attn(window, own):
    q, k, v = (torch.asarray(normal(*x)) for x in ((6, 4, 8), (9, 2, 8), (9, 2, 8)))
    aux = SimpleNamespace(lse=True)
    output, lse = varlen_attn(
        q, k, v, ENDS_Q, ENDS_K, 4, 5, window_size=window, scale=0.4, enable_gqa=True,
        return_aux=aux, num_splits=1,
    )  # fmt: skip
    for rows, keys in zip(spans(ENDS_Q), spans(ENDS_K), strict=True):
        expected, total = ours(q[rows], k[keys], v[keys], scale=0.4, **own)
        np.testing.assert_allclose(output[rows], expected, atol=1e-12)
        np.testing.assert_allclose(lse[:, rows], total, atol=1e-12)
    assert list(signature(varlen_attn).parameters) == list(signature(original).parameters)
    assert set(dialect.__all__) == {"scaled_dot_product_attention", "varlen_attn"}


def test_varlen_attn_over_used_keys_and_pages():
    q, k = (torch.asarray(normal(*x)) for x in ((6, 2, 8), (9, 2, 8)))
    options = {"seqused_k": torch.tensor([3, 4], dtype=torch.int32), "window_size": (-1, 0)}
    output = varlen_attn(q, k, k, ENDS_Q, ENDS_K, 4, 5, **options)
    own = torch.cat([k[:3], k[5:9]])
    for rows, keys in zip(spans(ENDS_Q), spans([0, 3, 7]), strict=True):
        expected = ours(q[rows], own[keys], own[keys], is_causal=True)[0]
        np.testing.assert_allclose(output[rows], expected, atol=1e-12)
    table = torch.tensor([[4, 1, 0], [2, 3, 0]], dtype=torch.int32)
    pool = torch.zeros(5, 2, 2, 8, dtype=torch.float64)
    pool[[4, 1]], pool[[2, 3]] = own[[0, 1, 2, 2]].reshape(2, 2, 2, 8), own[3:].reshape(2, 2, 2, 8)
    paged = varlen_attn(q, pool, pool, ENDS_Q, None, 4, 5, block_table=table, **options)
    torch.testing.assert_close(paged, output)

    q, k = normal(6, 2, 8), normal(9, 1, 8)
    with pytest.raises(ValueError, match="2 heads and key 1: pass enable_gqa=True"):
        varlen_attn(q, k, k, ENDS_Q, ENDS_K, 4, 5)
    with pytest.raises(ValueError, match="block_table needs seqused_k"):
        varlen_attn(q, k[None], k[None], ENDS_Q, None, 4, 5, block_table=ENDS_Q, enable_gqa=True)
    with pytest.raises(ValueError, match="cu_seq_k is missing"):
        varlen_attn(q, k, k, ENDS_Q, None, 4, 5, enable_gqa=True)
