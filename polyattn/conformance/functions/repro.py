"""Write a failing case as a script of the library's own calls, made as small as it still fails."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

import polyattn
from polyattn.conformance.cases.case import Case, bits
from polyattn.conformance.cases.catalogue import CASES
from polyattn.conformance.checks.target import Target
from polyattn.conformance.functions.check import RAISES, check_callable, run_function
from polyattn.conformance.functions.report import all_sizes
from polyattn.conformance.functions.signatures import Function, in_our_words
from polyattn.conformance.reference.oracle import Array
from polyattn.conformance.reference.tolerance import output_yardstick
from polyattn.conformance.report.report import Report

_SCRIPT = '''"""{name} {how}.

This is the case {case!r} of polyattn {version}, as small as it still fails.
"""

import {module}
import {library}
import numpy as np
from numpy import inf, nan

{arrays}output = {name}({given})
'''
_JUDGED = """output = output[0] if isinstance(output, (tuple, list)) else output
output = np.asarray(output.cpu() if hasattr(output, "cpu") else output).astype("float64")
exact = {exact}
limit = {limit}  # of the error by rounding
print("output", output, "exact", exact, sep="\\n")
assert output.shape == exact.shape, f"the output has the shape {{output.shape}}"
right = (output == exact) | (np.isnan(output) & np.isnan(exact)) | (abs(output - exact) <= limit)
assert right.all(), f"{{np.sum(~right)}} of {{right.size}} numbers are wrong"
"""


class Subject(NamedTuple):
    """A function that fails, its name as ``module:function``, and the maker of its arrays."""

    function: Function
    name: str
    target: Target


def of_report(report: Report) -> str | None:
    """Return the script of a case in which the output of a kernel fails; None if there is none."""
    kernels = [(x, kernel) for x in report.sections for kernel in {y.kernel: 0 for y in x.failures}]
    for section, kernel in kernels:
        where: Any = {"backend": section.target.backend, "kernel": kernel.partition(",")[0]}
        call = functools.partial(polyattn.attention, **where)
        names = [x.text.partition(": ")[0] for x in section.failures if x.kernel == kernel]
        if made := script(Subject(call, "polyattn:attention", section.target), names):
            return made
    return None


def script(subject: Subject, names: Iterable[str]) -> str | None:
    """Return the script of the simplest named case that fails and that one can be made of."""
    known = CASES | {case.name: case for case in all_sizes()}
    cases = [replace(known[name], rows=None) for name in names if name in known]
    failing = [(how, case) for case in cases if (how := _failure(subject, case)) is not None]

    def order(failure: tuple[str, Case]) -> tuple[bool, bool, int]:
        how, case = failure  # a wrong result before an exception: nothing else shows it
        return how.startswith("raises"), case.dtype != "float32", len(case.options)

    for how, case in sorted(failing, key=order):
        while smaller := next((x for x in _smaller(case) if _failure(subject, x) == how), None):
            case = smaller
        if made := _made(subject, case, how):
            return made
    return None


def _failure(subject: Subject, case: Case) -> str | None:
    """Return how a case fails; None if it does not, or if its fields do not fit together."""
    try:
        found = check_callable(subject.function, case, subject.target.to, subject.target.back)
    except Exception:
        return None
    if found.status == RAISES:
        return f"raises {found.error.partition(':')[0]}"
    if found.deviation is None or found.deviation.fault is None:
        return None
    return f"differs: {found.interpretation or 'no other meaning explains it'}"


def _smaller(case: Case) -> Iterator[Case]:
    """Yield copies of a case, each with one thing less."""
    for n in range(len(case.options)):
        yield replace(case, options=case.options[:n] + case.options[n + 1 :])
    if any(n > 1 for n in case.batch):
        yield replace(case, batch=(1,) * len(case.batch))
    for field in ("G", "E", "H", "D", "L", "S"):
        now = getattr(case, field) or 0
        lengths: list[dict[str, Any]] = [{field: n} for n in (1, 2, 3, now // 2) if 0 < n < now]
        yield from (replace(case, **length) for length in lengths)


def _made(subject: Subject, case: Case, how: str) -> str | None:
    """Return the script of a case; None if it takes other than one call of arrays and literals."""
    calls: list[tuple[Any, ...]] = []
    returned: list[Any] = []

    @functools.wraps(subject.function)
    def recording(*arrays: Any, **options: Any) -> Any:
        calls.append((arrays, options))
        returned.append(subject.function(*arrays, **options))
        return returned[-1]

    to, back = subject.target.to, subject.target.back
    ran: Any = run_function(in_our_words(recording), case, case.arguments(), to, back)
    if len(calls) != 1:
        return None
    (arrays, options), name = calls[0], subject.name.replace(":", ".")
    options |= getattr(subject.function, "keywords", {})
    names = ["query", "key", "value", *(f"argument_{n}" for n in range(3, len(arrays)))]
    given = dict(zip(names, arrays, strict=False)) | options
    try:
        held = [f"{n} = {_code(x, subject.target)}\n" for n, x in given.items()]
    except ValueError:
        return None
    passed = [*names[: len(arrays)], *(f"{n}={n}" for n in options)]
    text = _SCRIPT.format(
        **{"name": name, "how": how, "case": case.name, "version": polyattn.__version__},
        **{"module": subject.name.partition(":")[0], "library": subject.target.library},
        **{"arrays": "".join(held), "given": ", ".join(passed)},
    )
    if not returned:
        return text
    raw = back(returned[0][0] if isinstance(returned[0], (tuple, list)) else returned[0])
    yard, is_same = output_yardstick(case), raw.shape == ran.output.shape
    exact, limit = yard.exact, yard.allowed
    if not (is_same and bits(raw) == bits(ran.output)):  # heads after the length, perhaps packed
        exact, limit = (np.swapaxes(x, 1, 2).reshape(raw.shape) for x in (exact, limit))
    return text + _JUDGED.format(exact=_array(exact), limit=_array(limit))


def _code(x: Any, target: Target) -> str:
    """Return the code of an argument; raise ValueError if it has none."""
    if not hasattr(x, "shape"):
        ast.literal_eval(repr(x))
        return repr(x)
    text, device = _array(target.back(x)), f", device={target.device!r}" if target.device else ""
    return text if target.library == "numpy" else f"{target.library}.asarray({text}{device})"


def _array(x: Array) -> str:
    """Return the code of an array of NumPy; raise ValueError for bfloat16."""
    if x.dtype.kind not in "fiub":
        raise ValueError(f"NumPy has no {x.dtype}")
    x = x.astype("float64") if x.dtype == np.longdouble else x
    return f"np.array([{', '.join(map(str, x.ravel()))}], {x.dtype.name!r}).reshape{x.shape}"
