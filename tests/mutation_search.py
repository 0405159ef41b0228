"""Find a case that fails in the package at hand, for ``mutations.py``."""

from polyattn.conformance import CASES, ESSENTIAL, Target
from polyattn.conformance.checks.cases import cases_for, check_case
from polyattn.conformance.checks.gradients import DERIVATIVES

#: The tests of each backend's suite.
SUITES = {
    "array-api": "tests/conformance/test_backends.py::TestArrayApi",
    "numpy": "polyattn/conformance/test_backend.py::TestBackend",
}


def failing_case(backends, hint, in_gradients, cheap):
    """Return the test of the first case that fails, or None: the hint first, then cheap tests."""
    checks = {"case": (check_case, CASES)}
    if in_gradients:
        checks = {name: (one.check, one.cases) for name, one in DERIVATIVES.items()}
    kernels = [
        (target, variant, name)
        for backend in backends
        for target in [Target(backend, "numpy")]
        for name in checks
        for variant in target.kernels
    ]
    runs = [
        (name, target, variant, case)
        for target, variant, name in kernels
        for case in cases_for(target, variant, checks[name][1])
    ]
    tests = {test_of(*run): run for run in runs}

    def fails(test):
        name, *run = tests[test]
        try:
            checks[name][0](*run)
        except Exception:
            return True
        return False

    if hint in tests and fails(hint):
        return hint
    # Each case runs on all kernels in turn: an error in one of them is found early.
    ordered = sorted(tests, key=lambda test: (test not in cheap, cost_of(*tests[test])))
    return next(filter(fails, ordered), None)


def test_of(name, target, variant, case):
    """Return the test of a case: the suite may leave it out."""
    return f"{SUITES[target.backend]}::test_{name}[{variant}-{case}]"


def cost_of(name, target, variant, case):
    """Return how late to try a case: its exact result takes long, or it adds little to others."""
    late = 3 * (case.dtype == "float64") + 2 * (case.topic == "lengths") + (" x " in case.name)
    return case.name not in ESSENTIAL, late, len(case.features), case.name
