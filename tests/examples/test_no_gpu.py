"""The models of `examples/no_gpu`, which import flash_attn and xformers, run on a CPU."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch

from polyattn.dialects import flash_attn

FILE = Path(__file__).resolve().parents[2] / "examples" / "no_gpu" / "models.py"


@pytest.fixture(scope="module")
def models():
    spec = importlib.util.spec_from_file_location("no_gpu_models", FILE)
    module = importlib.util.module_from_spec(spec)
    with flash_attn.install("flash_attn", "xformers"):
        spec.loader.exec_module(module)
    return module


def test_a_packed_batch_is_each_of_its_sequences_and_each_of_its_steps(models):
    torch.manual_seed(0)
    layer = models.CausalAttention()
    x, mask = torch.randn(2, 7, models.WIDTH), torch.ones(2, 7, dtype=int)
    mask[1, 4:] = 0
    output = layer(x, mask)
    assert (output[1, 4:] == 0).all()
    short = layer(x[1:, :4], mask[1:, :4])
    torch.testing.assert_close(output[1, :4], short[0])
    caches = torch.zeros(2, 2, models.LONGEST, models.HEADS, models.SIZE)
    for n in range(7):
        lengths = torch.full((2,), n, dtype=torch.int32)
        step = layer.step(x[:, n : n + 1], *caches, lengths)
        torch.testing.assert_close(step[0, 0], output[0, n])
    layer.qkv.weight.grad = None
    output.sum().backward()
    assert layer.qkv.weight.grad.abs().sum() > 0


def test_images_of_several_sizes_are_apart(models):
    layer = models.ImageAttention()
    images = [torch.randn(2, 4, models.WIDTH), torch.randn(1, 9, models.WIDTH)]
    for x, found in zip(images, layer(images), strict=True):
        torch.testing.assert_close(found, layer([x])[0])


def test_its_attention_runs_on_numpy(models):
    x, ends = np.random.default_rng(0).standard_normal((9, 4, 16)), np.array([0, 4, 9])
    found = models.flash_attn_varlen_func(x, x, x, ends, ends, 5, 5, causal=True)
    tensors = torch.from_numpy(x), torch.from_numpy(ends)
    other = models.flash_attn_varlen_func(*[tensors[0]] * 3, *[tensors[1]] * 2, 5, 5, causal=True)
    np.testing.assert_allclose(found, other, atol=1e-12)
