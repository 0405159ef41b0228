"""Gradients: the formula for them is right, the kernels agree with it, and a failure says where."""

import math
from typing import ClassVar

import numpy as np
import pytest
from optional import jax, jnp, torch

from polyattn import attention, attention_vjp
from polyattn._kernels.dense_kernel import Dense
from polyattn.conformance import CASES, KernelVariant, Target, check_gradient
from polyattn.conformance.cases.gradient_cases import (
    BACKWARD_CASES,
    GRADIENT_CASES,
    POISONED_GRADIENT_CASES,
)
from polyattn.conformance.checks.gradients import check_gradients
from polyattn.conformance.reference import differences
from polyattn.conformance.reference.differences import direction, slopes, tangent
from polyattn.conformance.reference.gradients import (
    cotangent,
    gradients,
    has_formula,
)


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("mask hides some rows, sinks", slice(None, None, 3)),
        ("bias hides some rows", slice(None, None, 3)),
        ("causal, L > S", slice(0, 10)),
        ("S = 0", slice(None)),
    ],
)
def test_a_row_that_sees_nothing_has_gradients_of_zero(name, rows):
    found = gradients(GRADIENT_CASES[name], np.longdouble)
    assert all(np.isfinite(x).all() for x in found.values())
    assert not found["query"][..., rows, :].any()


DIFFERENTIATED = [case for case in BACKWARD_CASES.values() if case.dtype == "float64"]


@pytest.mark.slow
def test_no_difference_depends_on_its_step(monkeypatch):
    """That of a distance or sparsemax does if it crosses a point where that is not smooth."""
    first = [slopes(case) for case in DIFFERENTIATED]
    monkeypatch.setattr(differences, "STEP", differences.STEP / 4)
    for case, once in zip(DIFFERENTIATED, first, strict=True):
        assert slopes.__wrapped__(case) == pytest.approx(once, rel=1e-9, abs=1e-9), case


@pytest.mark.parametrize("case", [case for case in DIFFERENTIATED if has_formula(case)], ids=str)
def test_the_formula_is_the_transpose_of_the_tangent(case):
    found, along = gradients(case, np.longdouble), direction(case)
    expected = sum(np.sum(found[name] * along[name][0]) for name in found)
    assert np.sum(tangent(case) * cotangent(case)) == pytest.approx(float(expected), rel=1e-9)


# ---- kernels ----

TORCH, JAX = torch and Target("torch"), jax and Target("jax", "jax.numpy", jax.jit)
TORCH_KERNELS = [v for v in TORCH.kernels if v.kernel.name != "flex"] if torch else [torch]


@pytest.mark.parametrize("variant", TORCH_KERNELS, ids=str)
def test_torch_differentiates_every_kernel_that_takes_the_call(variant):
    """How exact the gradients are, the suite of torch checks."""
    for case in (CASES["plain"], CASES["many"], CASES["score value"]):
        refused = not case.features <= variant.kernel.features
        assert (check_gradients(TORCH, variant, case) is None) == refused


COMPILED = pytest.mark.slow  # once for each case


@pytest.mark.parametrize("case", POISONED_GRADIENT_CASES.values(), ids=str)
@pytest.mark.parametrize(
    ("target", "name"),
    [
        pytest.param(TORCH, "dense", id="torch-dense"),
        pytest.param(TORCH, "tiled", id="torch-tiled"),
        pytest.param(JAX, "dense", id="jax-dense", marks=COMPILED),
        pytest.param(JAX, "tiled", id="jax-tiled", marks=COMPILED),
        pytest.param(JAX, "xla", id="jax-xla", marks=COMPILED),
    ],
)
def test_what_is_hidden_changes_no_gradient(target, name, case):
    variant = next(c for c in target.kernels if c.kernel.name == name)
    assert check_gradients(target, variant, case)


def test_what_has_no_gradients_is_passed_over():
    case = CASES["plain"]
    (flex,) = (c for c in TORCH.kernels if c.kernel.name == "flex")
    assert check_gradients(TORCH, flex, case) is None
    for library in ("numpy", "torch", "jax.numpy"):
        target = Target("numpy", library)
        assert check_gradients(target, target.kernels[0], case) is None


class Detached(Dense):
    """Computes the right output, and no gradient by the keys."""

    name = "detached"
    differentiates: ClassVar = {"jvp": Dense.differentiates["jvp"]}

    def __call__(self, problem, operands, backend):
        return super().__call__(problem, operands._replace(key=operands.key.detach()), backend)


def test_a_failure_says_what_and_how_much():
    fault = r"^plain: gradient of key\[\d, \d, \d+, \d\] is 0, .* units, limit .* textbook"
    with pytest.raises(AssertionError, match=fault):
        check_gradients(TORCH, KernelVariant(Detached()), CASES["plain"])


@pytest.mark.parametrize(
    ("library", "dtype"),
    [("numpy", "float64"), ("numpy", "float32"), ("torch", "float64"), ("jax", "float32")],
)
def test_a_gradient_is_checked_on_any_library(library, dtype):
    to = {"numpy": np.asarray, "torch": lambda x: torch.asarray(x), "jax": lambda x: jnp.asarray(x)}
    rng = np.random.default_rng(0)
    arrays = [to[library](rng.normal(size=(2, 5, 4)).astype(dtype)) for _ in range(3)]
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


@pytest.mark.parametrize("x", [np.array([3e6, 2.0], np.float32), np.array(-1e9)], ids=str)
def test_a_gradient_is_checked_at_large_arguments(x):
    check_gradient(lambda x: (x * x).sum(), [x], [2 * x])
    with pytest.raises(AssertionError, match="is wrong"):
        check_gradient(lambda x: (x * x).sum(), [x], [2.1 * x])


@pytest.mark.parametrize("x", [np.array([1e4, 0.5]), np.array([3e6, 0.5])], ids=str)
def test_a_relative_step_passes_over_no_waves(x):
    check_gradient(lambda x: np.sin(x).sum(), [x], [np.cos(x)])
    with pytest.raises(AssertionError, match="is wrong"):
        check_gradient(lambda x: np.sin(x).sum(), [x], [np.cos(x) + np.array([0, 0.001])])


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
        ([1.0], np.ones(1), r"arguments\[0\] is a list"),
        (np.ones(1), [1.0], r"gradients\[0\] is a list"),
        (np.ones(1, int), np.ones(1), r"arguments\[0\] must be of floats; got int64"),
        (np.ones(2), np.ones(2), r"loss must return one number; got the shape \(2,\)"),
    ],
)
def test_what_has_no_gradient_is_refused(argument, gradient, says):
    with pytest.raises(TypeError, match=says):
        check_gradient(lambda x: x, [argument], [gradient])
