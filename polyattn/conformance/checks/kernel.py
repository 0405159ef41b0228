"""The checks themselves, one function each, for the pytest suite and for the report.

Each returns if what it checks holds and raises AssertionError, with what is wrong, if not.
"""

from __future__ import annotations

import subprocess
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from polyattn import attention_partial
from polyattn.arrays import facts_of
from polyattn.conformance.cases.case import Case, Generated, arrays_in, make_case
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
from polyattn.dispatch import registry
from polyattn.dispatch.errors import BackendError
from polyattn.plugin import Kernel

__all__ = [
    "Outcome",
    "cases_for",
    "check_batch_invariance",
    "check_case",
    "check_declarations",
    "check_determinism",
    "check_first_call_from_threads",
    "check_import_hygiene",
    "covering",
    "is_promised",
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


# ---- a case ------------------------------------------------------------------------------------


def cases_for(target: Target, variant: KernelVariant, cases: Mapping[str, Case]) -> list[Case]:
    """Return the cases that can be asked of a kernel.

    Those of float32 are asked in another dtype where the backend or the kernel refuses that one.

    Parameters
    ----------
    target : Target
        The backend.
    variant : KernelVariant
        Its kernel.
    cases : mapping of str to Case
        Where to choose from.
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
    return [case for case in asked.values() if is_promised(target, variant, case)]


def is_promised(target: Target, variant: KernelVariant, case: Case) -> bool:
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
    """Hold a kernel to a case: it agrees with the oracle, or refuses when it is insisted on.

    Parameters
    ----------
    target : Target
        The backend.
    variant : KernelVariant
        Its kernel.
    case : Case
        The call.
    """
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
    if _has_logsumexp(target, kernel, case):
        logsumexp = _check_partial(target, kernel, case, given)
    after = _bits(target, given)
    written = [name for name, bits in before.items() if after[name] != bits]
    assert not written, f"{case}: {', '.join(written)} was written to"
    return Outcome(off, logsumexp)


def _has_logsumexp(target: Target, kernel: Kernel, case: Case) -> bool:
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


def check_declarations(target: Target, variant: KernelVariant, cases: Mapping[str, Case]) -> None:
    """A kernel takes some of the cases, and of each feature that it declares one that needs it.

    Parameters
    ----------
    target : Target
        The backend.
    variant : KernelVariant
        Its kernel.
    cases : mapping of str to Case
        All of them.
    """
    taken = [c for c in cases_for(target, variant, cases) if takes(target, variant, c)]
    assert taken, f"no case is taken by {variant}"
    idle = set(target.declared(variant.kernel)).difference(*(case.features for case in taken))
    kernels = {case: variant.for_case(case) for case in taken}
    if any(_has_logsumexp(target, kernel, case) for case, kernel in kernels.items()):
        idle -= {"logsumexp"}
    assert not idle, f"no case that {variant} takes needs {', '.join(sorted(idle))}"


# ---- what a kernel declares of itself ----------------------------------------------------------

BATCH = 5
_ITEMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "window": {"window": (5, 0)},
    "softcap": {"softcap": 1.5},
    "grouped heads": {"H": 4, "G": 2},
    "long keys": {"L": 3, "S": 257},
    "long": {"L": 65, "S": 65, "D": 64},
}


def items(dtypes: Iterable[str]) -> list[Case]:
    """Return cases whose batch can be taken apart."""
    return [
        make_case(f"batch of {BATCH}, {name}, {dtype}", batch=(BATCH,), dtype=dtype, **fields)
        for name, fields in _ITEMS.items()
        for dtype in dtypes
        if dtype == "float32" or name == "plain"
    ]


def check_determinism(target: Target, variant: KernelVariant, *, thorough: bool = True) -> None:
    """The same call twice gives the same bits."""
    for case, kernel in _taken(target, variant, "deterministic")[: None if thorough else 1]:
        once, twice = (np.array(target.back(target.call(case, kernel))) for _ in range(2))
        assert _equal(once, twice), f"{case}: the same call twice gives other bits"


def check_batch_invariance(target: Target, variant: KernelVariant) -> None:
    """One batch item alone, or among others, has the same bits."""
    for case, kernel in _taken(target, variant, "batch_invariant"):
        together = target.back(target.call(case, kernel))
        arrays, options = case.arguments()
        for n in range(BATCH):
            alone = [target.to(np.ascontiguousarray(x[n : n + 1])) for x in arrays]
            output = target.back(target.call(case, kernel, given=(alone, options)))
            assert _equal(output[0], together[n]), f"{case}: item {n} alone has other bits"


def _taken(target: Target, variant: KernelVariant, declared: str) -> list[tuple[Case, Any]]:
    cases = items(target.dtypes)
    if variant.kernel.compiles:
        cases = cases[:1]
    runs = [(case, variant.for_case(case)) for case in cases]
    runs = [run for run in runs if target.explain(*run).chosen is not None]
    assert runs, f"it declares {declared}, and takes no call that would show it"
    return runs


def _equal(one: Any, other: Any) -> bool:
    return np.ascontiguousarray(one).tobytes() == np.ascontiguousarray(other).tobytes()


# ---- what a plugin must not do -----------------------------------------------------------------

_HYGIENE = """
import sys
import polyattn.plugin
from polyattn.dispatch.entries import entries
before = set(sys.modules)
spec = next(e for e in entries() if e.name == {name!r} and e.flaw is None).load()
loaded = set(sys.modules) - before
print(*sorted(loaded & {{*spec.requires, *spec.namespaces}}))
"""

_THREADS = """
import importlib, threading
import numpy as np
from polyattn import attention

asarray = importlib.import_module({library!r}).asarray

def array(n):  # another for each thread
    x = np.linspace(-1, 1, 1536, dtype={dtype!r}) * (1 + n)
    return asarray(x.reshape(2, 2, 6, 64))

results, errors, barrier = [None] * 8, [], threading.Barrier(8)

def call(n):
    x = array(n)
    barrier.wait()
    try:
        results[n] = attention(x, x, x, **{options!r})
    except BaseException as error:
        errors.append(repr(error))

threads = [threading.Thread(target=call, args=(n,)) for n in range(8)]
[t.start() for t in threads]
[t.join() for t in threads]
assert not errors, errors
if {deterministic!r}:
    for n, result in enumerate([np.array(result) for result in results]):
        x = array(n)
        alone = attention(x, x, x, **{options!r})
        same = np.array_equal(np.asarray(result), np.asarray(alone))
        assert same, "eight threads at once have other results than one"
"""


def check_import_hygiene(name: str) -> None:
    """Finding a plugin imports no array library: its spec is data."""
    loaded = _in_a_new_interpreter(_HYGIENE.format(name=name)).split()
    assert not loaded, f"loading the spec of {name!r} imports {', '.join(loaded)}"


def is_worth_threads(variant: KernelVariant) -> bool:
    """Say whether threads are worth a check: small tiles show nothing new, a compiler takes long.

    Parameters
    ----------
    variant : KernelVariant
        The kernel.
    """
    return not (variant.small_tiles or variant.kernel.compiles)


def check_first_call_from_threads(target: Target, variant: KernelVariant) -> None:
    """Eight threads may make the first calls of a process at once, each with arrays of its own."""
    library = target.library if target.backend == registry.ARRAY_API else "numpy"
    native = [dtype for dtype in ("float32", "float64", "float16") if dtype in target.dtypes]
    for dtype, is_causal in product(native, (True, False)):
        case = make_case("threads", L=6, S=6, D=64, dtype=dtype, is_causal=is_causal)
        if takes(target, variant, case):
            name = variant.kernel.name
            code = _THREADS.format(
                library=library,
                dtype=dtype,
                options={"is_causal": is_causal, "backend": target.backend, "kernel": name},
                deterministic=variant.kernel.deterministic,
            )
            _in_a_new_interpreter(code)
            return


def _in_a_new_interpreter(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False
    )
    last = (done.stderr.strip().splitlines() or [""])[-1]
    assert done.returncode == 0, f"{last}\n{done.stderr}"
    return done.stdout
