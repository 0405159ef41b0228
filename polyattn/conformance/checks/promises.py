"""Check what a kernel and its plugin declare, other than results.

These are the features, sizes, determinism, batch invariance, threads and imports. A check returns
if the promise holds. Otherwise it raises AssertionError, which names the fault.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from polyattn import attention_partial, masks, merge
from polyattn._base.arrays import facts_of
from polyattn._dispatch import registry
from polyattn.conformance.cases.cache_cases import CACHES, OF_256, of_item
from polyattn.conformance.cases.case import Case, bits, make_case
from polyattn.conformance.cases.catalogue import CASES, ESSENTIAL, size_cases
from polyattn.conformance.cases.topics import PAIRED
from polyattn.conformance.checks import cases as checks
from polyattn.conformance.checks import gradients, quantized
from polyattn.conformance.checks.cuts import check_cut_invariance
from polyattn.conformance.checks.lazy import is_lazy
from polyattn.conformance.checks.poison import check_poison, has_safe_gradients
from polyattn.conformance.checks.target import KernelVariant, Target
from polyattn.conformance.reference.gradients import gradient_yardsticks
from polyattn.conformance.selection import why_few
from polyattn.plugin import PROMISES as DECLARED
from polyattn.plugin import Kernel


class Promise(NamedTuple):
    """A promise of a kernel other than its results."""

    row: str  # of a report
    meaning: str
    check: Callable[[Target, KernelVariant], None]
    applies: Callable[[Target, KernelVariant], bool] = lambda *_: True
    otherwise: str = "not checked"  # what a report says of a kernel that it does not apply to


#: The essential ones first: they show most.
_ALL = ESSENTIAL | CASES


def check_declarations(
    target: Target, variant: KernelVariant, cases: Mapping[str, Case] = _ALL
) -> None:
    """Check that a kernel supports some case, and one for each feature that it declares."""
    is_taken, idle = False, set(target.declared(variant.kernel))
    for case in checks.cases_for(target, variant, cases):
        if is_taken and not idle - gradients.DERIVATIVES.keys():
            break
        shows_more = not is_taken or idle & {"logsumexp", *case.features}
        if shows_more and checks.takes(target, variant, case):
            is_taken, idle = True, idle - case.features
            if "logsumexp" in idle and checks.has_logsumexp(target, variant.for_case(case), case):
                idle -= {"logsumexp"}
    assert is_taken, f"{variant} supports no case"
    for feature in idle & gradients.DERIVATIVES.keys():
        others = checks.cases_for(target, variant, gradients.DERIVATIVES[feature].cases)
        if any(gradients.DERIVATIVES[feature].is_taken(target, variant, case) for case in others):
            idle -= {feature}
    assert not idle, f"no case that {variant} supports needs {', '.join(sorted(idle))}"


# ---- sizes -------------------------------------------------------------------------------------


def check_sizes(target: Target, variant: KernelVariant, dtype: str) -> None:
    """Check results and gradients for every size: some are multiples of a processor's units."""
    for case in size_cases(dtype):
        checks.check_case(target, variant, replace(case, rows=(0, case.L // 2, case.L - 1)))
        if gradients.differentiates("backward", target, variant, case):
            arguments = target.arguments(case)
            computed = gradients.backward(target, variant.for_case(case), case, arguments)
            gradients.compare(case, {name: computed[name][0] for name in gradient_yardsticks(case)})


def swept(target: Target, variant: KernelVariant) -> list[str]:
    """Return the dtypes in which every size is tried: with kernels that no call compiles."""
    if is_lazy(target) or why_few(target, variant, "case"):
        return []
    return [dtype for dtype in ("float32", "float64") if dtype in target.dtypes]


# ---- determinism and batch invariance ----------------------------------------------------------

BATCH = 5
_ITEMS: dict[str, dict[str, Any]] = {
    "plain": {},
    **{name: PAIRED[name] for name in ("causal", "window", "softcap", "grouped heads")},
    "long keys": {"L": 3, "S": 257},
    "long": {"L": 65, "S": 65, "D": 64},
    "selected keys": {"mask": masks.selected(np.arange(44).reshape(11, 4) * 7 % 11)},
    **{name: CACHES[name] for name in CACHES if name.endswith(("new rows", "unlike lengths"))},
    "pages of 256": OF_256,
}


def _batch_cases(dtypes: Iterable[str]) -> Iterator[Case]:
    """Yield cases with a batch whose items can also be computed one at a time."""
    for (name, fields), dtype in product(_ITEMS.items(), dtypes):
        if dtype == fields.get("dtype", "float32") or name == "plain":
            own = fields | {"batch": (BATCH,), "dtype": dtype}
            yield make_case(f"batch of {BATCH}, {name}, {dtype}", **own)


def check_determinism(target: Target, variant: KernelVariant, *, thorough: bool = True) -> None:
    """Check that the same call twice gives the same bits."""
    for case, kernel in _supported(target, variant)[: None if thorough else 1]:
        once, twice = (np.array(target.back(target.call(case, kernel))) for _ in range(2))
        assert bits(once) == bits(twice), f"{case}: the same call twice gives different bits"


def check_batch_invariance(target: Target, variant: KernelVariant) -> None:
    """Check that a batch item has the same bits with and without the others."""
    for case, kernel in _supported(target, variant):
        together = target.back(target.call(case, kernel))
        for n in range(BATCH):
            one = target.placed(of_item(case.arguments(), n))
            output = target.back(target.call(case, kernel, arguments=one))
            same = bits(output[0]) == bits(together[n])
            assert same, f"{case}: item {n} has different bits without the others"


def _supported(target: Target, variant: KernelVariant) -> list[tuple[Case, Any]]:
    runs = [(case, variant.for_case(case)) for case in _batch_cases(target.dtypes)]
    runs = [run for run in runs if target.explain(*run).chosen is not None]
    assert runs, "it supports no call to check this with"
    return runs[:1] if variant.kernel.compiles else runs


# ---- pages in any order ------------------------------------------------------------------------


def has_partials(target: Target, variant: KernelVariant) -> bool:
    """Return whether a kernel declares what partial results of variable-length keys need."""
    declares = target.declared(variant.kernel) >= {"logsumexp", "mask_expression"}
    # One that gathers the keys of a mask takes no other call.
    return declares and checks.takes(target, variant, CASES["plain"])


def check_pages_in_any_order(target: Target, variant: KernelVariant) -> None:
    """Check that partial results of one page each, merged in any order, are those of all keys."""
    case, kernel, calls = next(_calls_of_pages(target, variant))
    with checks.name_case(str(case), kernel):
        parts = [target.call(case, kernel, attention_partial, call) for call in calls]
        whole = merge(*parts[1:], parts[0])
    checks.check_partial(target, case, whole, calls[0])


def _calls_of_pages(target: Target, variant: KernelVariant) -> Iterator[tuple[Case, Kernel, Any]]:
    """Yield cases that the kernel takes, each with a call for one page after another."""
    for name, fields in (("", CACHES["pages, unlike lengths"]), (" of 256", OF_256)):
        case = make_case(f"pages{name} in any order", **fields)
        if case.dtype in target.dtypes:
            kernel, calls = variant.for_case(case), list(_one_page_each(target, variant, case))
            if checks.has_logsumexp(target, kernel, case, calls[0]):
                yield case, kernel, calls
    raise AssertionError("it declares logsumexp and mask_expression, but supports no case of pages")


def _one_page_each(target: Target, variant: KernelVariant, case: Case) -> Iterator[Any]:
    (query, key, value), options = case.arguments()
    table, size = options["block_table"], key.shape[-2]
    for n in range(table.shape[1]):
        lengths = np.clip(options["key_lengths"] - n * size, 0, size)
        if "block_table" in variant.kernel.features:
            arrays, own = (query, key, value), {"block_table": table[:, n : n + 1]}
        else:
            arrays, own = (query, key[table[:, n]], value[table[:, n]]), {}
        yield target.placed((arrays, own | {"key_lengths": lengths}))


# ---- in a new interpreter ----------------------------------------------------------------------

_HYGIENE = """
import sys
import polyattn.plugin
from polyattn._dispatch.entries import entries
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
for n, result in enumerate([np.array(result) for result in results]):
    x = array(n)
    alone = attention(x, x, x, **{options!r})
    same = np.array_equal(np.asarray(result), np.asarray(alone))
    assert same, "eight threads at once have different results from one"
"""


def check_import_hygiene(name: str) -> None:
    """Check that loading the spec of a plugin imports no array library."""
    loaded = _in_a_new_interpreter(_HYGIENE.format(name=name)).split()
    assert not loaded, f"loading the spec of {name!r} imports {', '.join(loaded)}"


def check_dtypes_are_kept(name: str) -> None:
    """Check that a plugin makes arrays of each dtype of its spec, or says why not in `lacks`."""
    registry.load(name)
    backend, lost = registry.loaded(name), []
    for dtype in registry.spec_of(name).dtypes:
        if backend.lacks(dtype) is None:
            try:
                made = facts_of(backend.place(np.ones((1, 2), dtype), None)).dtype
            except Exception as error:
                made = f"an error, {error!r}"
            if made != dtype:
                lost.append(f"{dtype} becomes {made}")
    assert not lost, f"{'; '.join(lost)}: the spec declares it, and lacks() gives no reason"


def check_first_call_from_threads(target: Target, variant: KernelVariant) -> None:
    """Check that eight threads can make the first calls of a process at once."""
    library = target.library if target.backend == registry.ARRAY_API else "numpy"
    native = [dtype for dtype in ("float32", "float64", "float16") if dtype in target.dtypes]
    for dtype, is_causal in product(native, (True, False)):
        case = make_case("threads", L=6, S=6, D=64, dtype=dtype, is_causal=is_causal)
        if checks.takes(target, variant, case):
            name = variant.kernel.name
            options = {"is_causal": is_causal, "backend": target.backend, "kernel": name}
            code = _THREADS.format(library=library, options=options, dtype=dtype)
            _in_a_new_interpreter(code)
            return


def _in_a_new_interpreter(code: str) -> str:
    # -P: else a module in the current folder would run in place of an installed one.
    command = [sys.executable, "-P", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    last = (done.stderr.strip().splitlines() or [""])[-1]
    assert done.returncode == 0, f"{last}\n{done.stderr}"
    return done.stdout


def _declared(name: str, check: Callable[[Target, KernelVariant], None]) -> Promise:
    """Return one of the promises that only some kernels make."""
    row, meaning = name.replace("_", " "), DECLARED[name]
    return Promise(row, meaning, check, lambda _, x: name in x.kernel.promises, "not declared")


#: The promises by the name of their test in the suite.
PROMISES = {
    "every_declared_feature_is_exercised": Promise(
        "declared features",
        "the kernel supports a case that needs each feature which it declares",
        check_declarations,
    ),
    "sizes": Promise(
        "sizes",
        "results and gradients are right for every size of vectors to 72, every length to 130",
        lambda target, variant: check_sizes(target, variant, "float32"),
        lambda target, variant: not variant.small_tiles and "float32" in swept(target, variant),
    ),
    "deterministic": Promise(
        "deterministic", "the same call twice gives the same bits", check_determinism
    ),
    "batch_invariant": _declared("batch_invariant", check_batch_invariance),
    "cut_invariant": _declared("cut_invariant", check_cut_invariance),
    "pages_in_any_order": Promise(
        "pages in any order",
        "partial results of one page each, merged in any order, are those of all",
        check_pages_in_any_order,
        has_partials,
    ),
    "poison": Promise(
        "hidden NaN in gradients",
        "what a hidden key or value holds changes no gradient that the library takes",
        check_poison,
        has_safe_gradients,
        "not declared",
    ),
    "quantized": Promise(
        "quantized keys",
        "attention over integers is that over what they stand for",
        quantized.check_quantized,
        quantized.reads_integers,
        "not declared",
    ),
    "first_call_from_eight_threads": Promise(
        "eight threads at once",
        "the first calls of a process give the same results in threads",
        check_first_call_from_threads,
        # Small tiles show nothing more, and compilers are slow.
        lambda _, variant: not (variant.small_tiles or variant.kernel.compiles),
    ),
}
