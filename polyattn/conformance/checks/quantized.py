"""Check kernels that read keys and values as integers, and the steps to multiply them by."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from polyattn import same_bits
from polyattn._base.arrays import library_of
from polyattn._core.call.describe import describe
from polyattn._core.call.operands import Operands
from polyattn._dispatch.cache import cached_plan
from polyattn._dispatch.errors import BackendError
from polyattn._dispatch.plan import Plan
from polyattn._dispatch.request import request
from polyattn.conformance.cases.cache_cases import ends
from polyattn.conformance.cases.case import BLOCK, Case, make_case, quantized
from polyattn.conformance.cases.generators import normal, random_mask
from polyattn.conformance.checks import cases as checks
from polyattn.conformance.checks.target import KernelVariant, Target
from polyattn.plugin import Kernel, Quantized

_FIELDS: dict[str, dict[str, Any]] = {
    "rows": {"S": 3 * BLOCK},
    "a step of decoding": {"L": 1, "S": 5 * BLOCK, "H": 4, "G": 2, "is_causal": True},
    "many keys": {"batch": (1,), "H": 6, "G": 2, "L": 3, "S": 40 * BLOCK, "D": 20, "E": 9},
    "a mask": {"S": 3 * BLOCK, "mask": random_mask()},
    "a bias": {"S": 3 * BLOCK, "bias": normal()},
    "options together": {
        **{"S": 4 * BLOCK, "is_causal": True, "window": (11, 0), "softcap": 1.5, "scale": 0.7},
        "sinks": normal("H"),
    },
    "NaN in unused blocks": {
        **{"S": 3 * BLOCK, "L": 1, "poison": float("nan")},
        "key_lengths": ends(2 * BLOCK, BLOCK),
    },
}
_CASES = [
    make_case(f"integers, {name}, {dtype}", values="integers", dtype=dtype, **fields)
    for name, fields in _FIELDS.items()
    for dtype in ("float32", "float64")
    if dtype == "float32" or name == "many keys"
]


#: A case, the plan of it, and what it is given, in floats.
_Call = tuple[Case, Plan, Operands, dict[str, Any]]


def reads_integers(target: Target, variant: KernelVariant) -> bool:
    """Return whether a kernel says that it reads integers."""
    is_own = type(variant.kernel).reads_quantized is not Kernel.reads_quantized
    return is_own and any(True for _ in _calls(target, variant))


def check_quantized(target: Target, variant: KernelVariant) -> None:
    """Check that attention over integers is that over what they stand for.

    Of a kernel that declares `cut_invariant` bit for bit, so that each cut has these bits too.
    """
    for case, plan, operands, options in _calls(target, variant):
        key, value = _integers(target, case)
        arguments = [operands.query, key, value], options
        before = checks.bits_of(target, arguments)
        with checks.name_case(str(case), plan.kernel):
            partial = plan.run(operands._replace(key=key, value=value))
        checks.check_partial(target, case, partial, arguments)
        checks.check_unwritten(target, case, arguments, before)
    if "cut_invariant" not in variant.kernel.promises:
        return
    with same_bits():
        for case, plan, operands, _ in _calls(target, variant):
            key, value = _integers(target, case)
            pair = plan.run(operands._replace(key=key, value=value)), plan.run(operands)
            for one, other in zip(*pair, strict=True):
                same = np.array_equal(target.back(one), target.back(other), equal_nan=True)
                assert same, f"{case}: it has other bits than over what the integers stand for"


def _integers(target: Target, case: Case) -> list[Quantized]:
    """Return keys and values as integers, with their steps."""
    return [Quantized(*map(target.to, pair)) for pair in quantized(*case.arguments()[0][1:])]


def _calls(target: Target, variant: KernelVariant) -> Iterator[_Call]:
    """Yield the calls that a kernel reads as integers."""
    for case in checks.cases_for(target, variant, {case.name: case for case in _CASES}):
        arrays, options = target.arguments(case)
        call, operands = describe(*arrays, **options, logsumexp=True)
        xp, kernel = library_of(operands.query).xp, variant.for_case(case)
        try:
            plan = cached_plan(call, request(target.backend), kernel, xp)
        except BackendError:  # the kernel does not compute the case
            continue
        if kernel.reads_quantized(plan.placement.problem):
            yield case, plan, operands, options
