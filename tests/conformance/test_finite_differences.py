"""`check_gradient`: a gradient in arrays of any library, by differences in random directions."""

import math

import numpy as np
import pytest
from arrays import draw
from optional import jnp, torch

from polyattn import attention, attention_vjp
from polyattn.conformance import check_gradient


@pytest.mark.parametrize(
    ("library", "dtype"),
    [("numpy", "float64"), ("torch", "float64"), ("jax", "float32")],
)
def test_a_gradient_is_checked_on_any_library(library, dtype):
    to = {"numpy": np.asarray, "torch": lambda x: torch.asarray(x), "jax": lambda x: jnp.asarray(x)}
    arrays = draw(*[(2, 5, 4)] * 3, to=to[library], dtype=dtype)
    output, pullback = attention_vjp(*arrays, is_causal=True)
    found = pullback(output)

    def loss(*arrays):
        return (attention(*arrays, is_causal=True) ** 2).sum() / 2

    check_gradient(loss, arrays, found[:3])
    check_gradient(loss, arrays, [None, None, found.value])
    for factor in (1.05, math.nan, math.inf):
        with pytest.raises(AssertionError, match=r"gradients\[1\] is wrong: in a random direction"):
            check_gradient(loss, arrays, (found.query, found.key * factor, found.value))
    with pytest.raises(ValueError, match=r"each of the 3 arguments; got 9: .* gradients\[:3\]"):
        check_gradient(loss, arrays, found)
    with pytest.raises(ValueError, match=r"gradients\[0\] must have the shape \(2, 5, 4\)"):
        check_gradient(loss, arrays, (found.query[0], None, None))


@pytest.mark.parametrize(
    ("loss", "slope", "x"),
    [
        (np.square, lambda x: 2 * x, np.array([3e6, 2.0], np.float32)),
        (np.square, lambda x: 2 * x, np.array(-1e9)),
        (np.sin, np.cos, np.array([3e6, 0.5])),  # a relative step passes over no waves
    ],
)
def test_a_gradient_is_checked_at_large_arguments(loss, slope, x):
    check_gradient(lambda x: loss(x).sum(), [x], [slope(x)])
    with pytest.raises(AssertionError, match="is wrong"):
        check_gradient(lambda x: loss(x).sum(), [x], [1.05 * slope(x)])


def test_a_gradient_is_checked_beside_minus_infinity():
    arrays, bias = np.random.default_rng(0).normal(size=(3, 2, 5, 4)), np.zeros((5, 5))
    bias[0, 3] = -math.inf
    output, pullback = attention_vjp(*arrays, bias=bias)
    found = pullback(output).bias

    def loss(bias):
        return (attention(*arrays, bias=bias) ** 2).sum() / 2

    check_gradient(loss, [bias], [found])
    found[0, 3] = 1
    with pytest.raises(AssertionError, match="is wrong"):
        check_gradient(loss, [bias], [found])


@pytest.mark.parametrize(
    ("argument", "gradient", "says"),
    [
        ([1.0], np.ones(1), r"arguments\[0\] is of type list"),
        (np.ones(1), [1.0], r"gradients\[0\] is of type list"),
        (np.ones(1, int), np.ones(1), r"arguments\[0\] must be of floats; got int64"),
        (np.ones(2), np.ones(2), r"loss must return one number; got the shape \(2,\)"),
    ],
)
def test_what_has_no_gradient_is_refused(argument, gradient, says):
    with pytest.raises(TypeError, match=says):
        check_gradient(lambda x: x, [argument], [gradient])
