"""Find a case that fails in the package at hand, for ``mutations.py``."""

from polyattn.conformance import CASES, ESSENTIAL, Target
from polyattn.conformance.checks.cases import cases_for, check_case
from polyattn.conformance.checks.gradients import DERIVATIVES


def search(backends, hint, in_gradients):
    """Return the first case that fails in the package at hand, the hint before all others."""
    kinds = gradient_checks() if in_gradients else output_checks()
    runs = [
        (f"{backend}: {kind}{variant}-{case}", cost, check, target, variant, case)
        for backend in backends
        for target in [Target(backend, "numpy")]
        for kind, check, costs in kinds
        for variant in target.kernels
        for case, cost in costs(target, variant)
    ]
    # Each case runs on all kernels in turn: an error in one of them is found early.
    for name, _, check, *run in sorted(runs, key=lambda run: (run[0] != hint, run[1])):
        try:
            check(*run)
        except Exception:
            return name
    return None


def output_checks():
    """Return the check of results: what it is called, the check, and the cases with their cost."""
    return [("", check_case, with_costs(CASES, ESSENTIAL))]


def gradient_checks():
    """Return the checks of derivatives that kernels compute, as `output_checks` does."""
    return [
        (f"{one.name} of ", one.check, with_costs(one.cases, ())) for one in DERIVATIVES.values()
    ]


def with_costs(cases, essential):
    """Return a function of a kernel that gives its cases, each with its place in the order."""
    # What takes longest to compute exactly comes last, and pairs of features before that.
    ordered = sorted(cases, key=lambda name: (cost_of(cases[name]), name not in essential))
    places = {name: number for number, name in enumerate(ordered)}
    return lambda target, variant: [
        (case, places[case.name]) for case in cases_for(target, variant, cases)
    ]


def cost_of(case):
    """Return how late to try a case: its exact result takes long, or it adds little to others."""
    return 3 * (case.dtype == "float64") + 2 * (case.topic == "lengths") + (" x " in case.name)
