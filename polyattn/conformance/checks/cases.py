"""Hold a kernel to a case: which cases apply to it, and whether its results are right.

A check returns if the kernel is right and raises AssertionError, with what is wrong, if not.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from polyattn import attention_partial
from polyattn.arrays import facts_of
from polyattn.conformance.cases.case import Case, Generated, arrays_in
from polyattn.conformance.cases.catalogue import CASES
from polyattn.conformance.checks.lazy import is_lazy
from polyattn.conformance.checks.target import KernelVariant, Target
from polyattn.conformance.reference.tolerance import (
    Deviation,
    accumulation_dtype,
    deviation,
    logsumexp_yardstick,
    output_yardstick,
)
from polyattn.dispatch.errors import BackendError
from polyattn.plugin import Kernel

__all__ = [
    "Outcome",
    "cases_for",
    "check_case",
    "covering",
    "has_logsumexp",
    "is_applicable",
    "takes",
]


class Outcome(NamedTuple):
    """What became of a case on a kernel.

    Attributes
    ----------
    output : Deviation or None
        How far the output is off; None if the kernel refuses the call.
    logsumexp : Deviation or None
        The same of the logsumexp; None if the kernel does not compute it.
    refusal : str or None
        Why it refuses.
    """

    output: Deviation | None
    logsumexp: Deviation | None = None
    refusal: str | None = None


def cases_for(target: Target, variant: KernelVariant, cases: Mapping[str, Case]) -> list[Case]:
    """Return the cases that can be asked of a kernel.

    Those of float32 are asked in another dtype where the backend or the kernel refuses that one.
    """
    plain = CASES["plain"]
    able = [
        dtype
        for dtype in ("float32", "float64", "float16", "bfloat16")
        if dtype in target.dtypes and takes(target, variant, replace(plain, dtype=dtype))
    ]
    asked = dict(cases)
    if able and able[0] != "float32":
        retyped = {
            f"{name}, {able[0]}": replace(case, name=f"{name}, {able[0]}", dtype=able[0])
            for name, case in cases.items()
            if case.dtype == "float32"
        }
        asked = retyped | asked
    return [case for case in asked.values() if is_applicable(target, variant, case)]


def is_applicable(target: Target, variant: KernelVariant, case: Case) -> bool:
    """Whether a case can be asked of a kernel: its library has the dtypes, and it bears poison."""
    dtypes = {
        case.dtype,
        *(x.dtype for _, x in case.options if isinstance(x, Generated) and x.dtype),
    }
    has_dtypes = case.dtype in target.dtypes and all(map(target.has, dtypes))
    return has_dtypes and (case.poison is None or variant.kernel.poison_safe)


def takes(target: Target, variant: KernelVariant, case: Case) -> bool:
    """Whether a kernel can take a case's call."""
    return target.explain(case, variant.for_case(case)).chosen is not None


def check_case(target: Target, variant: KernelVariant, case: Case) -> Outcome:
    """Hold a kernel to a case: it agrees with the oracle, or refuses when it is insisted on."""
    kernel = variant.for_case(case)
    explanation = target.explain(case, kernel)
    if explanation.chosen is None:
        reasons = "; ".join(r for c in explanation.candidates for r in c.reasons)
        try:
            target.call(case, kernel)
        except BackendError:
            return Outcome(None, None, reasons or "it gives no reason")
        raise AssertionError(f"{case}: refused ({reasons}), and yet it ran")
    given = target.arguments(case)
    before = _bits(target, given)
    what = f"{case}: output"
    with _telling(what, kernel):
        output = target.call(case, kernel, given=given)
    _check_like_query(what, output, given[0][0], case.dtype)
    _check_own(target, what, output, given)
    off = deviation(target.back(output), output_yardstick(case), what)
    assert off.fault is None, off.fault
    logsumexp = None
    if has_logsumexp(target, kernel, case):
        logsumexp = _check_partial(target, kernel, case, given)
    after = _bits(target, given)
    written = [name for name, bits in before.items() if after[name] != bits]
    assert not written, f"{case}: {', '.join(written)} was written to"
    return Outcome(off, logsumexp)


def has_logsumexp(target: Target, kernel: Kernel, case: Case) -> bool:
    """Whether a call can be asked for its logsumexp, and the kernel computes it."""
    if "normalizer" in case.features:  # it is of softmax alone
        return False
    return target.explain(case, kernel, logsumexp=True).chosen is not None


def _check_partial(target: Target, kernel: Kernel, case: Case, given: Any) -> Deviation:
    with _telling(f"{case}: logsumexp", kernel):
        output, logsumexp = target.call(case, kernel, attention_partial, given)
    what = f"{case}: output of the partial"
    _check_like_query(what, output, given[0][0], case.dtype)
    _check_own(target, what, output, given)
    off = deviation(target.back(output), output_yardstick(case), what)
    assert off.fault is None, off.fault
    what = f"{case}: logsumexp"
    _check_like_query(what, logsumexp, given[0][0], accumulation_dtype(case.dtype))
    _check_own(target, what, logsumexp, given)
    off = deviation(target.back(logsumexp), logsumexp_yardstick(case), what)
    assert off.fault is None, off.fault
    return off


def _check_like_query(what: str, result: Any, query: Any, dtype: str) -> None:
    got, given = facts_of(result), facts_of(query)
    assert got.library == given.library, f"{what} is of {got.library}, the query of {given.library}"
    assert got.device == given.device, f"{what} is on {got.device}, the query on {given.device}"
    assert got.dtype == dtype, f"{what} is {got.dtype}, must be {dtype}"


def _check_own(target: Target, what: str, result: Any, given: Any) -> None:
    """A result is the caller's to write to, where arrays can be written to at all."""
    if is_lazy(target):
        return
    here = target.back(result)
    if isinstance(result, np.ndarray):
        assert here.flags.writeable, f"{what} is read-only"
    arrays, options = given
    for option in (*arrays, *options.values()):
        for x in arrays_in(option):
            shared = np.may_share_memory(here, target.back(x))
            assert not shared, f"{what} shares its memory with an argument"


@contextmanager
def _telling(what: str, kernel: Kernel) -> Iterator[None]:
    """Say of an error which result of which case it came from, and from where in the kernel."""
    try:
        yield
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        file = getattr(sys.modules.get(type(kernel).__module__), "__file__", None)
        last = ([frame for frame in frames if frame.filename == file] or frames)[-1]
        where = f"{Path(last.filename).name}:{last.lineno}"
        raise AssertionError(f"{what}: raised {error!r} at {where}") from error


def _bits(target: Target, given: tuple[list[Any], Mapping[str, Any]]) -> dict[str, bytes]:
    arrays, options = given
    everything = dict(zip(("query", "key", "value"), arrays, strict=True)) | dict(options)
    return {
        name: b"".join(np.ascontiguousarray(target.back(x)).tobytes() for x in arrays_in(option))
        for name, option in everything.items()
    }


def covering(target: Target, variant: KernelVariant, cases: Iterable[Case]) -> list[Case]:
    """Choose few of the cases that a kernel takes so that each feature and topic is in one.

    For kernels that take seconds to compile for each.
    """
    able = {
        case: (case.features or {"plain"}) | {case.dtype, case.topic}
        for case in cases
        if takes(target, variant, case)
    }
    wanted = set().union(*able.values()) if able else set()
    chosen = []
    while wanted:
        best = max(able, key=lambda case: len(able[case] & wanted))
        chosen.append(best)
        wanted -= able[best]
    return chosen
