"""Gradients: the formula for them is right, the kernels agree with it, and a failure says where."""

from typing import ClassVar

import numpy as np
import pytest
from optional import torch

from polyattn._kernels.dense_kernel import Dense
from polyattn.conformance import CASES, KernelVariant, Target
from polyattn.conformance.cases.gradient_cases import BACKWARD_CASES, POISONED_GRADIENT_CASES
from polyattn.conformance.checks.gradients import check_gradients
from polyattn.conformance.reference import differences
from polyattn.conformance.reference.differences import direction, slopes, tangent
from polyattn.conformance.reference.gradients import cotangent, gradients, has_formula

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

TORCH = torch and Target("torch")


@pytest.mark.parametrize("case", POISONED_GRADIENT_CASES.values(), ids=str)
@pytest.mark.parametrize("name", ["dense", "tiled"])
def test_what_is_hidden_changes_no_gradient(name, case):
    variant = next(c for c in TORCH.kernels if c.kernel.name == name)
    assert check_gradients(TORCH, variant, case)


class Detached(Dense):
    """Computes the right output, and no gradient by the keys."""

    differentiates: ClassVar = {"jvp": Dense.differentiates["jvp"]}

    def __call__(self, problem, operands, backend):
        return super().__call__(problem, operands._replace(key=operands.key.detach()), backend)


def test_a_failure_says_what_and_how_much():
    fault = r"^plain: gradient of key\[\d, \d, \d+, \d\] is 0, .* units, limit .* textbook"
    with pytest.raises(AssertionError, match=fault):
        check_gradients(TORCH, KernelVariant(Detached()), CASES["plain"])
