"""Check that kernels compute attention as it is defined.

An oracle evaluates the semantics exactly, cases cover every sentence of them, and tolerances are
measured from the textbook formula. A backend is checked on the arrays of a library: by pytest
(`suite`), or by ``polyattn check``, which prints a table and needs no test runner.

It needs ``pip install "polyattn[testing]"``.
"""

try:
    from polyattn.conformance.cases.case import Case, make_case
    from polyattn.conformance.cases.catalogue import CASES, ESSENTIAL
    from polyattn.conformance.checks.target import KernelVariant, Target
    from polyattn.conformance.finite_differences import check_gradient
    from polyattn.conformance.reference.oracle import Oracle, oracle
    from polyattn.conformance.reference.tolerance import Deviation, assert_accurate, deviation
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f'polyattn.conformance needs {error.name}: pip install "polyattn[testing]"', name=error.name
    ) from error

__all__ = [
    "CASES",
    "ESSENTIAL",
    "Case",
    "Deviation",
    "KernelVariant",
    "Oracle",
    "Target",
    "assert_accurate",
    "check_gradient",
    "deviation",
    "make_case",
    "oracle",
]
__dir__ = __all__.copy
