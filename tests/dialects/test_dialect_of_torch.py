"""torch's convention through ours, with its function by its side."""

import numpy as np
import pytest
import torch
from optional import jnp
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

from polyattn import attention, use_backend
from polyattn.dialects import onnx_attention, scaled_dot_product_attention

RNG = torch.Generator().manual_seed(0)
Q, K, V = (torch.randn(2, h, n, 8, generator=RNG) for h, n in ((4, 6), (4, 9), (4, 9)))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True},
        {"scale": 0.3},
        {"scale": torch.tensor(0.3)},
        {"attn_mask": torch.rand(6, 9, generator=RNG) > 0.5},
        {"attn_mask": torch.rand(4, 6, 9, generator=RNG) > 0.5},
        {"attn_mask": torch.randn(2, 1, 6, 9, generator=RNG)},
        {"attn_mask": torch.zeros(6, 9, dtype=torch.bool)},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
@pytest.mark.parametrize("heads", [4, 2])
def test_torch(options, heads):
    k, v, gqa = K[:, :heads], V[:, :heads], {"enable_gqa": heads != 4}
    expected = torch.nn.functional.scaled_dot_product_attention(Q, k, v, **options, **gqa)
    torch.testing.assert_close(scaled_dot_product_attention(Q, k, v, **options, **gqa), expected)
    on_numpy = {n: x.numpy() if isinstance(x, torch.Tensor) else x for n, x in options.items()}
    output = scaled_dot_product_attention(*(x.numpy() for x in (Q, k, v)), **on_numpy, **gqa)
    np.testing.assert_allclose(output, expected, atol=2e-6)


@pytest.mark.parametrize("mask", [torch.rand(6, 9) > 0.5, torch.randn(2, 1, 6, 9)])
def test_a_mask_and_causal_both_count_as_in_the_fused_kernel_of_torch(mask):
    mask[..., 0] = True  # no row is empty
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        expected = torch.nn.functional.scaled_dot_product_attention(Q, K, V, mask, 0.0, True)
    found = scaled_dot_product_attention(Q, K, V, mask, is_causal=True)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    "bias",
    [causal_upper_left(6, 9), causal_lower_right(6, 9), causal_lower_right(9, 9)],
    ids=["upper left", "lower right", "square"],
)
def test_torch_takes_a_causal_bias_for_what_it_describes(bias):
    expected = torch.nn.functional.scaled_dot_product_attention(Q, K, V, bias)
    for backend in ("torch", "numpy"):
        with use_backend(backend):
            output = scaled_dot_product_attention(Q, K, V, bias)
        torch.testing.assert_close(output, expected, atol=2e-6, rtol=0)
    output = scaled_dot_product_attention(*(x.numpy() for x in (Q, K, V)), bias)
    np.testing.assert_allclose(output, expected, atol=2e-6)


def test_a_causal_bias_of_other_lengths_or_for_others_is_refused():
    with pytest.raises(ValueError, match=r"lower_right\(5, 9\), but the scores are \(6, 9\)"):
        scaled_dot_product_attention(Q, K, V, causal_lower_right(5, 9))
    with pytest.raises(TypeError, match="attn_mask is torch's CausalBias"):
        onnx_attention(Q, K, V, causal_lower_right(6, 7))


def test_what_torch_refuses_or_only_torch_can_do():
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
