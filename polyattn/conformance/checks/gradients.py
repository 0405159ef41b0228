"""Check gradients and directional derivatives: by the library's own differentiation, or a kernel's.

The formula for gradients judges each element, in every dtype. In float64 differences of the
textbook judge the rest: the steps that the formula leaves out, arrays in expressions, `scale`,
`softcap` and the gradient of the logsumexp.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from polyattn import (
    Gradients,
    Partial,
    attention,
    attention_backward,
    attention_jvp,
    attention_partial,
    merge,
)
from polyattn._base.arrays import facts_of, library_of
from polyattn._core.call.checks import examine
from polyattn._core.call.options import GRADIENT_ARRAYS
from polyattn._core.call.parts import arrays_in
from polyattn._core.expressions.expression import Expression
from polyattn._dispatch.request import request
from polyattn._dispatch.select import explain_selection
from polyattn.conformance.cases.case import ARRAYS, Case
from polyattn.conformance.cases.gradient_cases import BACKWARD_CASES, GRADIENT_CASES, JVP_CASES
from polyattn.conformance.checks import cases as checks
from polyattn.conformance.checks.autodiff import VJP, by_library
from polyattn.conformance.checks.target import Arguments, KernelVariant, Target
from polyattn.conformance.reference import differences
from polyattn.conformance.reference import gradients as formula
from polyattn.conformance.reference.oracle import lift
from polyattn.conformance.reference.tolerance import Deviation, accumulation_dtype, deviation
from polyattn.plugin import Kernel

#: The error of each quantity.
Deviations = dict[str, Deviation]


def has_gradients(target: Target) -> bool:
    """Return whether this module can differentiate in the library of the target."""
    return target.library.partition(".")[0] in VJP


def check_gradients(target: Target, variant: KernelVariant, case: Case) -> Deviations | None:
    """Check that the gradients are as accurate as the textbook's; None if the call is refused."""
    kernel, arguments = variant.for_case(case), target.arguments(case)
    gradients = by_library(target, case, kernel, arguments) if has_gradients(target) else None
    if gradients is None:
        return None
    return compare(case, {n: target.back(gradients[n]) for n in formula.gradient_yardsticks(case)})


# ---- by the kernel itself ----------------------------------------------------------------------


def differentiates(feature: str, target: Target, variant: KernelVariant, case: Case) -> bool:
    """Return whether a kernel supports the derivative of a case: ``"backward"`` or ``"jvp"``."""
    kernel = variant.for_case(case)
    if feature not in target.declared(kernel):
        return False
    arguments = target.arguments(case)
    explanation = target.explain(case, kernel, arguments)
    if explanation.chosen is None:
        return False
    own = is_without_logsumexp(case) or checks.has_logsumexp(target, kernel, case, arguments)
    if feature == "jvp" and not own:
        return False  # its own forward pass comes first
    problem = examine(explanation.call)
    problem = problem._replace(features=problem.features | {feature})
    requested, xp = request(target.backend), library_of(arguments[0][0]).xp
    return explain_selection(explanation.call, problem, requested, kernel, xp).chosen is not None


def is_without_logsumexp(case: Case) -> bool:
    """Return whether a case has no logsumexp."""
    return "normalizer" in case.features


def check_backward(target: Target, variant: KernelVariant, case: Case) -> Deviations | None:
    """Check the gradients that a kernel computes itself; None if the call is refused.

    Those of query, key, value, bias and sinks are as accurate as the textbook's. In float64 all are
    compared with differences, with a gradient of the logsumexp as well. If the keys of a plain call
    are given in two parts, with the logsumexp of both, the shares of the parts add up.
    """
    kernel = variant.for_case(case)
    if not differentiates("backward", target, variant, case):
        return None
    arguments = target.arguments(case)
    before = checks.bits_of(target, arguments)
    deviations: Deviations = {}
    if formula.has_formula(case):
        names = formula.gradient_yardsticks(case)
        computed = backward(target, kernel, case, arguments)
        deviations |= compare(case, {name: computed[name][0] for name in names})
    if case.dtype == "float64":
        computed = backward(target, kernel, case, arguments, of_logsumexp=True)
        deviations |= compare_slopes(case, computed)
    # `merge` has an error of its own, by the rounding of the logsumexp.
    is_plain = not case.features and case.layout == "...HLD" and not case.rounded_once
    if is_plain and case.S > 1:
        compare(case, add_shares(target, kernel, case, arguments))
    checks.check_unwritten(target, case, arguments, before)
    return deviations


def backward(
    target: Target,
    kernel: Kernel,
    case: Case,
    arguments: Arguments,
    *,
    of_logsumexp: bool = False,
) -> dict[str, list[Any]]:
    """Return the gradients of each argument, in NumPy, as a list of those of its arrays."""
    arrays, given = arguments
    along, weights = target.to(formula.cotangent(case)), None
    if of_logsumexp and not is_without_logsumexp(case):
        weights = target.to(differences.logsumexp_cotangent(case))
    # Any kernel may compute the result, if this one has no logsumexp.
    own = is_without_logsumexp(case) or checks.has_logsumexp(target, kernel, case, arguments)

    def run(*arrays: Any, **options: Any) -> dict[str, list[Any]]:
        forward = options if own else options | {"kernel": None}
        partial = residuals(case, *arrays, **forward, unrounded="rounds_once" in kernel.promises)
        (query, key, value), options["logsumexp_gradient"] = arrays, weights
        computed = attention_backward(query, key, value, partial, along, **options)
        return {name: leaves(x) for name, x in computed._asdict().items()}

    with checks.name_case(f"{case}: backward", kernel):
        computed: dict[str, list[Any]] = target.call(case, kernel, run, arguments)
    everything = dict(zip(ARRAYS, arrays, strict=True)) | given
    for name, directions in differences.direction(case).items():
        what = f"{case}: gradient of {name}"
        assert len(computed[name]) == len(directions), f"{what} is missing"
        for x, like in zip(computed[name], arrays_in(everything.get(name)), strict=False):
            checks.check_like(what, x, arrays[0], facts_of(like).dtype)
            checks.check_own(target, what, x, arguments)
    return {name: [target.back(x) for x in some] for name, some in computed.items()}


def residuals(case: Case, *arrays: Any, unrounded: bool, **options: Any) -> Partial:
    """Return the output of a case, rounded or not, with the logsumexp if it has one."""
    if is_without_logsumexp(case):
        return Partial(attention(*arrays, **options), None)
    dtype = accumulation_dtype(case.dtype) if unrounded else None
    return attention_partial(*arrays, dtype=dtype, **options)


def leaves(gradient: Any) -> list[Any]:
    """Return the arrays of a gradient: those of an expression, the array itself, or none."""
    if isinstance(gradient, Expression):
        return arrays_in(gradient)
    return [] if gradient is None else [gradient]


def compare(case: Case, computed: dict[str, Any]) -> Deviations:
    """Check gradients against their yardsticks."""
    deviations, yards = {}, formula.gradient_yardsticks(case)
    for name, gradient in computed.items():
        off = deviation(gradient, yards[name], f"{case}: gradient of {name}")
        assert off.fault is None, off.fault
        deviations[name] = off
    return deviations


def compare_slopes(case: Case, computed: dict[str, list[Any]]) -> Deviations:
    """Check gradients against differences of the textbook in the direction of each argument."""
    deviations = {}
    for name, slope in differences.slopes(case).items():
        pairs = zip(computed[name], differences.direction(case)[name], strict=True)
        terms = [lift(x) * t for x, t in pairs]
        result, size = (float(sum(np.sum(f(x)) for x in terms)) for f in (np.asarray, np.abs))
        share = abs(result - slope) / (differences.TOLERANCE * max(1.0, size))
        found = f"in a direction is {result:.9g}, by differences {slope:.9g}"
        assert share <= 1, f"{case}: gradient of {name} {found}"
        deviations[f"{name} by differences"] = Deviation(0.0, share, None)
    return deviations


def add_shares(target: Target, kernel: Kernel, case: Case, arguments: Arguments) -> dict[str, Any]:
    """Return the gradients of a plain call by two parts of its keys."""
    if not checks.has_logsumexp(target, kernel, case, arguments):
        return {}
    along, half = target.to(formula.cotangent(case)), case.S // 2
    halves = (slice(0, half), slice(half, case.S))

    def run(query: Any, key: Any, value: Any, **options: Any) -> tuple[Gradients, ...]:
        parts = [[x[..., some, :] for x in (key, value)] for some in halves]
        whole = merge(*(attention_partial(query, *part, **options) for part in parts))
        shares = [Gradients()]
        for one, other in parts:
            into = Gradients(query=shares[-1].query)
            share = attention_backward(query, one, other, whole, along, into=into, **options)
            shares.append(share)
        return tuple(shares[1:])

    with checks.name_case(f"{case}: backward of two parts of the keys", kernel):
        shares = target.call(case, kernel, run, arguments)
    pairs = {name: [lift(target.back(getattr(x, name))) for x in shares] for name in ARRAYS}
    joined = {name: np.concatenate(pairs[name], axis=-2) for name in ("key", "value")}
    return {"query": pairs["query"][1]} | joined


def check_jvp(target: Target, variant: KernelVariant, case: Case) -> Deviations | None:
    """Check the directional derivative that a kernel computes; None if the call is refused.

    Its sum with the cotangent is as accurate as that of the textbook's gradients with the
    direction. In float64 each element is compared with differences.
    """
    kernel = variant.for_case(case)
    if not differentiates("jvp", target, variant, case):
        return None
    arguments, along = target.arguments(case), differences.direction(case)
    before = checks.bits_of(target, arguments)
    tangents = {name: target.to(along[name][0]) for name in GRADIENT_ARRAYS if name in along}

    def run(*arrays: Any, **options: Any) -> Any:
        return attention_jvp(arrays, tangents, **options)[1]

    what = f"{case}: tangent of the output"
    with checks.name_case(what, kernel):
        result = target.call(case, kernel, run, arguments)
    checks.check_like(what, result, arguments[0][0], case.dtype)
    checks.check_own(target, what, result, arguments)
    checks.check_unwritten(target, case, arguments, before)
    return compare_tangent(case, what, lift(target.back(result)))


def compare_tangent(case: Case, what: str, result: Any) -> Deviations:
    """Check a tangent against the gradients, and in float64 against differences."""
    deviations, along = {}, formula.cotangent(case)
    if formula.has_formula(case):
        direction = differences.direction(case)
        arrays = {name: direction[name][0] for name in GRADIENT_ARRAYS if name in direction}
        yard = formula.adjoint_yardstick(case, arrays)
        off = deviation(np.sum(result * lift(along)), yard, f"{what}, times the cotangent,")
        assert off.fault is None, off.fault
        deviations["tangent"] = off
    if case.dtype == "float64":
        exact = differences.tangent(case)
        assert result.shape == exact.shape, f"{what}: {result.shape} is not {exact.shape}"
        limit = differences.TOLERANCE * max(1.0, np.max(np.abs(exact), initial=0))
        share = float(np.max(np.abs(result - exact), initial=0) / limit)
        assert share <= 1, f"{what} is off by {share * limit:.3g}, by differences"
        deviations["tangent by differences"] = Deviation(0.0, share, None)
    return deviations


#: Says whether a kernel supports a case.
Taken = Callable[[Target, KernelVariant, Case], bool]


class Derivative(NamedTuple):
    """A derivative of calls, by the library's own differentiation or by a kernel."""

    name: str  # that of the kernel's method and feature, if it is the kernel's
    cases: Mapping[str, Case]  # the calls that it is checked with
    check: Callable[[Target, KernelVariant, Case], dict[str, Deviation] | None]
    is_taken: Taken
    is_offered: Callable[[Target, KernelVariant], bool]
    otherwise: str  # what a report says where it is not offered


def _of_kernel(feature: str, cases: Mapping[str, Case], check: Any) -> Derivative:
    def is_declared(target: Target, variant: KernelVariant) -> bool:
        return feature in target.declared(variant.kernel)

    is_taken = partial(differentiates, feature)
    return Derivative(feature, cases, check, is_taken, is_declared, "not declared")


#: The features that `attention` has no argument for, by name.
DERIVATIVES = {
    "backward": _of_kernel("backward", BACKWARD_CASES, check_backward),
    "jvp": _of_kernel("jvp", JVP_CASES, check_jvp),
}
BY_LIBRARY = Derivative(
    "gradients",
    GRADIENT_CASES,
    check_gradients,
    checks.takes,
    lambda target, variant: has_gradients(target),
    "library has none",
)
ALL_DERIVATIVES = {"gradients": BY_LIBRARY, **DERIVATIVES}
