"""In NumPy, layers work on blocks of rows and on threads; what they compute is the same."""

import numpy as np
import pytest
import scipy.special
import scipy.stats
from optional import torch

import polyattn
from polyattn import nn
from polyattn.nn.passes import BLOCK_ROWS, affine

RNG = np.random.default_rng(0)
# More than a block of rows, and no whole number of blocks.
ROWS = 3 * BLOCK_ROWS + 7


def numbers(*shape, dtype=np.float32):
    return RNG.standard_normal(shape).astype(dtype)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("shape", [(3, ROWS, 24), (5, 24), (24,), (0, 24)])
def test_a_map_in_blocks_is_the_product(threads, shape):
    x, weight, bias = numbers(*shape), numbers(24, 16), numbers(16)
    for offset in (None, bias):
        with polyattn.use_threads(threads):
            found = affine(x, weight, offset)
        expected = x.astype(np.float64) @ weight + (0 if offset is None else offset)
        assert found.shape == expected.shape
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
        assert found.dtype == np.float32


def test_a_map_of_rows_that_are_not_side_by_side_is_the_product():
    x, weight = numbers(24, ROWS).T, numbers(24, 16)
    np.testing.assert_allclose(affine(x, weight, None), x @ weight, rtol=0, atol=1e-5)
    assert affine(x, weight.astype(np.float64), None).dtype == np.float64  # as NumPy promotes


@pytest.mark.parametrize("make", [nn.LayerNorm.init, nn.RMSNorm.init])
def test_a_norm_of_many_rows_is_that_of_each(make):
    x = numbers(ROWS, 200)
    norm = make(200, like=x)
    np.testing.assert_array_equal(norm(x)[::97], np.stack([norm(row) for row in x[::97]]))


def test_both_derivatives_of_gelu_are_right_in_torch():
    numbers = np.linspace(-8, 8, 1001)
    x = torch.from_numpy(numbers).requires_grad_()
    nn.layers.ACTIVATIONS["gelu"](x).sum().backward()
    slope = scipy.special.ndtr(numbers) + numbers * scipy.stats.norm.pdf(numbers)
    np.testing.assert_allclose(x.grad.numpy(), slope, rtol=0, atol=1e-15)
    assert torch.autograd.gradgradcheck(nn.erf.gelu, x[::200].detach().requires_grad_())
