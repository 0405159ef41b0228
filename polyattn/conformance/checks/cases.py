"""Check a kernel with a case: which cases apply to it, and whether its results are right.

A check returns if the kernel is right. Otherwise it raises AssertionError, which names the fault.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from polyattn import attention_partial
from polyattn._base.arrays import facts_of
from polyattn._core.call.parts import arrays_in
from polyattn._dispatch.errors import BackendError
from polyattn.conformance.cases.case import ARRAYS, Case, Generated, bits
from polyattn.conformance.cases.catalogue import CASES
from polyattn.conformance.checks.lazy import is_lazy
from polyattn.conformance.checks.target import Arguments, KernelVariant, Target
from polyattn.conformance.reference.tolerance import (
    Deviation,
    Yardstick,
    accumulation_dtype,
    deviation,
    logsumexp_yardstick,
    output_yardstick,
)
from polyattn.plugin import Kernel


class Outcome(NamedTuple):
    """The result of a case on a kernel."""

    output: Deviation | None  # None if the kernel refuses the call
    logsumexp: Deviation | None = None  # None if the kernel does not compute it
    refusal: str | None = None  # why it refuses


def cases_for(target: Target, variant: KernelVariant, cases: Mapping[str, Case]) -> list[Case]:
    """Return the cases that apply to a kernel.

    Cases in float32 are given in another dtype if the backend or the kernel refuses float32.
    """
    plain = CASES["plain"]
    supported = [
        dtype
        for dtype in ("float32", "float64", "float16", "bfloat16")
        if dtype in target.dtypes and takes(target, variant, replace(plain, dtype=dtype))
    ]
    asked = dict(cases)
    if supported and supported[0] != "float32":
        dtype = supported[0]
        retyped = {
            f"{name}, {dtype}": replace(case, name=f"{name}, {dtype}", dtype=dtype)
            for name, case in cases.items()
            if case.dtype == "float32"
        }
        asked = retyped | asked
    found = [case for case in asked.values() if is_applicable(target, variant, case)]
    return found if target.has("int64") else [x for x in found if not _has_wide_integers(x)]


def _has_wide_integers(case: Case) -> bool:
    """Return whether an option is an array with integers that JAX has only with jax_enable_x64."""
    arrays = [x for option in case.arguments()[1].values() for x in arrays_in(option)]
    return any(x.dtype.kind in "iu" and np.abs(x).max(initial=0) >= 2**31 for x in arrays)


def is_applicable(target: Target, variant: KernelVariant, case: Case) -> bool:
    """Return whether the library has the dtypes of a case, and the kernel makes its promises."""
    others = {x.dtype for _, x in case.options if isinstance(x, Generated) and x.dtype}
    has_dtypes = case.dtype in target.dtypes and all(map(target.has, others))
    promises = variant.kernel.promises
    is_safe = case.poison is None or "poison_safe" in promises
    return has_dtypes and is_safe and (not case.rounded_once or "rounds_once" in promises)


def takes(target: Target, variant: KernelVariant, case: Case) -> bool:
    """Return whether a kernel supports the call of a case."""
    return target.explain(case, variant.for_case(case)).chosen is not None


def check_case(target: Target, variant: KernelVariant, case: Case) -> Outcome:
    """Check that a kernel agrees with the oracle, or raises if it does not support the case."""
    kernel = variant.for_case(case)
    arguments = target.arguments(case)
    explanation = target.explain(case, kernel, arguments)
    if explanation.chosen is None:
        reasons = "; ".join(r for c in explanation.candidates for r in c.reasons)
        try:
            target.call(case, kernel, arguments=arguments)
        except BackendError:
            return Outcome(None, None, reasons or "it gives no reason")
        raise AssertionError(f"{case}: refused ({reasons}), but it ran")
    before = bits_of(target, arguments)
    what = f"{case}: output"
    with name_case(what, kernel):
        output = target.call(case, kernel, arguments=arguments)
    off = _check_result(target, what, output, case.dtype, output_yardstick(case), arguments)
    logsumexp = None
    if has_logsumexp(target, kernel, case, arguments):
        with name_case(f"{case}: logsumexp", kernel):
            partial = target.call(case, kernel, attention_partial, arguments)
        logsumexp = check_partial(target, case, partial, arguments)
    check_unwritten(target, case, arguments, before)
    return Outcome(off, logsumexp)


def has_logsumexp(target: Target, kernel: Kernel, case: Case, arguments: Any = None) -> bool:
    """Return whether the kernel computes the logsumexp of a case."""
    if "normalizer" in case.features:  # only softmax has one
        return False
    return target.explain(case, kernel, arguments, logsumexp=True).chosen is not None


def check_partial(target: Target, case: Case, partial: Any, arguments: Any) -> Deviation:
    """Check output and logsumexp of a partial result, and return the error of the logsumexp."""
    output, logsumexp = partial
    what, yard = f"{case}: output of the partial", output_yardstick(case)
    _check_result(target, what, output, case.dtype, yard, arguments)
    what, yard = f"{case}: logsumexp", logsumexp_yardstick(case)
    dtype = accumulation_dtype(case.dtype)
    return _check_result(target, what, logsumexp, dtype, yard, arguments)


def _check_result(
    target: Target, what: str, result: Any, dtype: str, yard: Yardstick, arguments: Any
) -> Deviation:
    check_like(what, result, arguments[0][0], dtype)
    check_own(target, what, result, arguments)
    # Some kernels compute products of float32 there as sums of TF32 products, without two bits.
    if dtype == "float32" and facts_of(result).device.startswith("cuda"):
        yard = yard._replace(times=4)
    off = deviation(target.back(result), yard, what)
    assert off.fault is None, off.fault
    return off


def check_like(what: str, result: Any, query: Any, dtype: str) -> None:
    """Check that a result has the library and device of the query, and a dtype."""
    got, wanted = facts_of(result), facts_of(query)
    assert got.library == wanted.library, f"{what} is of {got.library}, not {wanted.library}"
    assert got.device == wanted.device, f"{what} is on {got.device}, not {wanted.device}"
    assert got.dtype == dtype, f"{what} has dtype {got.dtype}, not {dtype}"


def check_own(target: Target, what: str, result: Any, arguments: Any) -> None:
    """Check that a result is writable and shares no memory with an argument."""
    if is_lazy(target):
        return
    on_host = target.back(result)
    if isinstance(result, np.ndarray):
        assert on_host.flags.writeable, f"{what} is read-only"
    arrays, options = arguments
    for option in (*arrays, *options.values()):
        for x in arrays_in(option):
            shared = np.may_share_memory(on_host, target.back(x))
            assert not shared, f"{what} shares its memory with an argument"


@contextmanager
def name_case(what: str, kernel: Kernel) -> Iterator[None]:
    """Add the case, the result and the line of the kernel to an error."""
    try:
        yield
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        file = getattr(sys.modules.get(type(kernel).__module__), "__file__", None)
        last = ([frame for frame in frames if frame.filename == file] or frames)[-1]
        where = f"{Path(last.filename).name}:{last.lineno}"
        raise AssertionError(f"{what}: raised {error!r} at {where}") from error


def check_unwritten(target: Target, case: Case, arguments: Arguments, before: Any) -> None:
    """Check that the arguments have the bits that `bits_of` returned before."""
    after = bits_of(target, arguments)
    written = [name for name, bits in before.items() if after[name] != bits]
    assert not written, f"{case}: {', '.join(written)} was written to"


def bits_of(target: Target, arguments: Arguments) -> dict[str, bytes]:
    """Return the bits of each argument."""
    arrays, options = arguments
    everything = dict(zip(ARRAYS, arrays, strict=True)) | options
    own = {name: arrays_in(option) for name, option in everything.items()}
    return {name: b"".join(bits(target.back(x)) for x in some) for name, some in own.items()}


def aspects(case: Case) -> frozenset[str]:
    """Return what a case is about: its features or "plain", its dtype and its topic."""
    return (case.features or frozenset({"plain"})) | {case.dtype, case.topic}
