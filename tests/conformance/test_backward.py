"""Gradients: the formula for them is right, and mistakes of kernels are refused."""

import math
import re

import numpy as np
import pytest
from optional import torch

from polyattn._dispatch.transfer import backend_of
from polyattn._kernels.dense_kernel import Dense
from polyattn.conformance import CASES, KernelVariant, Target
from polyattn.conformance.cases.gradient_cases import (
    BACKWARD_CASES,
    JVP_CASES,
    POISONED_GRADIENT_CASES,
)
from polyattn.conformance.checks.gradients import check_backward, check_gradients, check_jvp
from polyattn.conformance.checks.promises import check_declarations
from polyattn.conformance.reference.differences import direction, tangent
from polyattn.conformance.reference.gradients import cotangent, gradients, has_formula
from polyattn.plugin import Kernel

NUMPY, TORCH = Target("numpy"), torch and Target("torch")
FORMULAS = [x for x in BACKWARD_CASES.values() if x.dtype == "float64" and has_formula(x)]


@pytest.mark.parametrize("case", FORMULAS, ids=str)
def test_the_formula_is_the_transpose_of_the_tangent(case):
    found, along = gradients(case, np.longdouble), direction(case)
    expected = sum(np.sum(found[name] * along[name][0]) for name in found)
    assert np.sum(tangent(case) * cotangent(case)) == pytest.approx(float(expected), rel=1e-9)


class Mistaken(Dense):
    """The formula, with a mistake in what it is given or in the gradients."""

    name = "mistaken"

    def __init__(self, *, given=None, found=None):
        self.given, self.found = given, found

    def backward(self, problem, *records_and_backend):
        *records, backend = records_and_backend
        if self.given is not None:
            records = self.given(problem, *records)
        gradients = super().backward(problem, *records, backend)
        return self.found(gradients, records[0]) if self.found else gradients

    def jvp(self, problem, *records_and_backend):
        *records, backend = records_and_backend
        return super().jvp(problem, *self.given(problem, *records), backend)


def times(factor, name):
    """Multiply the gradients of an argument by a number."""

    def found(gradients, operands):
        x = getattr(gradients, name)
        changed = [factor * y for y in x] if isinstance(x, list) else factor * x
        return gradients._replace(**{name: changed})

    return {"found": found}


def put(name, change):
    """Replace the gradient of an argument."""
    return {"found": lambda g, x: g._replace(**{name: change(getattr(g, name), x)})}


def own_logsumexp(problem, x, residuals, cotangents):
    problem = problem._replace(features=problem.features | {"logsumexp"})
    _, logsumexp = Dense()(problem, x, backend_of(x.query))
    return x, residuals._replace(logsumexp=logsumexp), cotangents


def scribbled(problem, x, *others):
    x.query[...] = 0
    return x, *others


BY_DIFFERENCES = "gradient of {} in a direction is .*, by differences"
#: A mistake, the case that it is found in, and what is said of it.
MISTAKES = [
    (times(-1, "key"), "plain", r"gradient of key\[.* error .* units, limit"),
    (times(1.01, "value"), "many with a derivative, float16", "gradient of value"),
    (times(1.00001, "sinks"), "sinks", "gradient of sinks"),
    (put("sinks", lambda g, x: None), "sinks", "gradient of sinks .* it returned None"),
    (put("bias", lambda g, x: g[0]), "bias", r"\(2, 2, 11, 11\) float32; it returned .*\(2, 11"),
    (put("value", lambda g, x: x.value), "plain", "shares its memory with an argument"),
    (put("query", lambda g, x: g + math.nan), "nan under mask array", "query.* is nan, must be"),
    (times(2, "softcap"), "softcap and bias, float64", BY_DIFFERENCES.format("softcap")),
    (times(-1, "score_mod"), "alibi value, float64", BY_DIFFERENCES.format("score_mod")),
    (times(-1, "similarity"), "additive, float64", BY_DIFFERENCES.format("similarity")),
    (
        {"given": lambda p, x, r, cotangents: (x, r, cotangents._replace(logsumexp=None))},
        "plain, float64",
        BY_DIFFERENCES.format("query"),
    ),
    ({"given": own_logsumexp}, "plain", "gradient of query"),  # by a part of the keys
    ({"given": scribbled}, "mask hides all", "query was written to"),
]


@pytest.mark.parametrize(("mistake", "case", "message"), MISTAKES)
def test_a_wrong_gradient_is_refused(mistake, case, message):
    case = BACKWARD_CASES[case]
    assert check_backward(NUMPY, KernelVariant(Dense()), case)
    with pytest.raises(AssertionError, match=f"^{re.escape(str(case))}: .*{message}"):
        check_backward(NUMPY, KernelVariant(Mistaken(**mistake)), case)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("plain", "tangent of the output, times the cotangent,.* is .*, exact"),
        ("similarity, float64", "tangent of the output is off by .*, by differences"),
    ],
)
def test_a_wrong_tangent_is_refused(case, message):
    case = JVP_CASES[case]
    wrong = Mistaken(given=lambda p, x, r, tangents: (x, r, tangents._replace(key=-tangents.key)))
    assert check_jvp(NUMPY, KernelVariant(Dense()), case)
    with pytest.raises(AssertionError, match=f"^{case}: {message}"):
        check_jvp(NUMPY, KernelVariant(wrong), case)


class Lacking(Kernel):
    """Declares derivatives, and has no method for them."""

    name = "lacking"

    def __call__(self, problem, operands, backend):
        return Dense()(problem, operands, backend)


class Unwilling(Dense):
    """Declares derivatives, and refuses each."""

    name = "unwilling"

    def reasons_against(self, problem):
        return ["it forgets"] if problem.features & {"backward", "jvp"} else []


@pytest.mark.parametrize(("check", "name"), [(check_backward, "backward"), (check_jvp, "jvp")])
def test_a_derivative_that_is_declared_must_be_there(check, name):
    plain, cases = CASES["plain"], {"plain": CASES["plain"]}
    lacking, unwilling, dense = Lacking(), Unwilling(), Dense()
    for kernel in (lacking, unwilling, dense):
        kernel.features, kernel.differentiates = frozenset({"logsumexp"}), {name: frozenset()}
    check_declarations(NUMPY, KernelVariant(dense), cases)
    with pytest.raises(TypeError, match=f"has no method {name}"):
        check(NUMPY, KernelVariant(lacking), plain)
    assert check(NUMPY, KernelVariant(unwilling), plain) is None
    with pytest.raises(AssertionError, match=f"no case that unwilling supports needs {name}"):
        check_declarations(NUMPY, KernelVariant(unwilling), cases)


# ---- by automatic differentiation ----


@pytest.mark.parametrize("case", POISONED_GRADIENT_CASES.values(), ids=str)
@pytest.mark.parametrize("name", ["dense", "tiled"])
def test_what_is_hidden_changes_no_gradient(name, case):
    variant = next(c for c in TORCH.kernels if c.kernel.name == name)
    assert check_gradients(TORCH, variant, case)


class Detached(Dense):
    """Computes the right output, and no gradient by the keys."""

    differentiates = {"jvp": Dense.differentiates["jvp"]}  # noqa: RUF012

    def __call__(self, problem, operands, backend):
        return super().__call__(problem, operands._replace(key=operands.key.detach()), backend)


def test_a_gradient_that_a_library_finds_to_be_wrong_is_said():
    fault = r"^plain: gradient of key\[\d, \d, \d+, \d\] is 0, .* units, limit .* textbook"
    with pytest.raises(AssertionError, match=fault):
        check_gradients(TORCH, KernelVariant(Detached()), CASES["plain"])
