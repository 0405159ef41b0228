"""Select the kernel that runs a call.

The requested backends are tried in order. The first that is installed and supports the call runs;
no other is tried. If no backend is named, the arrays' own library runs and no array moves. Only
static facts decide: shapes, dtypes, devices and options, never the values of an array.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from polyattn._base.arguments import did_you_mean
from polyattn._base.arrays import is_namespace
from polyattn._base.tracing import is_compiling
from polyattn._core.call.facts import Call
from polyattn._core.call.features import DERIVATIVES
from polyattn._core.call.narrowed import banded
from polyattn._core.call.problem import Problem
from polyattn._core.expressions.scores import Chain, Function
from polyattn._core.expressions.selections import selection_of
from polyattn._dispatch import extensions, registry
from polyattn._dispatch.contract import is_installed
from polyattn._dispatch.entries import not_allowed
from polyattn._dispatch.errors import BackendError, BackendUnavailableError, UnsupportedError
from polyattn._dispatch.explanation import Candidate, Explanation, arrays_of, needs_of
from polyattn._dispatch.placement import Placement, Refusal, check_one_place, find_placement
from polyattn._dispatch.plan import Plan, reasons_against
from polyattn._dispatch.request import AUTO, Kernels, Names, Request, check_known, is_open
from polyattn._kernels.gathered import Gathered, dense_note, why_many
from polyattn.plugin import Backend, Kernel, undeclared

_log = logging.getLogger("polyattn")

# What errors and `explain` say.
_IN_SAME_BITS = (
    "In same_bits() only kernels run that declare cut_invariant, as polyattn-native does on the"
    " CPU: drop the options that it does not compute, or make the call outside of the block"
)
_NO_DERIVATIVE = (
    "it differentiates no function: give the derivative of score_mod, as in"
    " scores.function(f, derivative=g)"
)
_COPIES_PAGES = "it gets gathered, contiguous copies of the pages"
_KEEPS_BITS = "a row has the same bits for each cut of its sequence"


def select(call: Call, problem: Problem, requested: Request, kernels: Kernels, xp: Any) -> Plan:
    """Return the plan of a call, with a query of the namespace `xp`, or raise with all reasons."""
    problem = _with_bits(problem, requested)
    chosen, candidates = _try_candidates(call, problem, requested, kernels, xp)
    if chosen is None:
        explanation = Explanation(call, problem, _source(requested, kernels), tuple(candidates))
        raise _error(explanation, kernels, requested)
    plan = Plan(*chosen, call.query.device, set())
    if not is_compiling() and _log.isEnabledFor(logging.DEBUG):
        *others, runs = candidates
        before = "; ".join(f"{one.kernel or one.backend}: {one.text}" for one in others)
        facts = f"{arrays_of(call, problem)}, needs {needs_of(problem)}"
        after = before and f", after {before}"
        _log.debug("new plan: %s: %s %s%s", facts, runs.backend, runs.kernel, after)
    for one in () if requested.may_move else candidates:
        if one.status == "unavailable":
            source = f"the kernels {one.kernel} for {one.backend}" if one.kernel else one.backend
            registry.warn_once(source, one.reasons[0], plan.kernel.name)
    return plan


def explain_selection(
    call: Call, problem: Problem, requested: Request, kernels: Kernels, xp: Any
) -> Explanation:
    """Return the decision with all candidates; `xp` is None if only shapes are known."""
    problem = _with_bits(problem, requested)
    _, candidates = _try_candidates(call, problem, requested, kernels, xp, explains=True)
    candidates.sort(key=lambda candidate: candidate.status == "not allowed")
    return Explanation(call, problem, _source(requested, kernels), tuple(candidates))


def _with_bits(problem: Problem, requested: Request) -> Problem:
    """Return the problem as the kernels get it, who may have to keep the bits of each row."""
    return problem._replace(same_bits=True) if requested.same_bits else problem


def default_device(library: str) -> str:
    """Return the default device of a library."""
    for name in registry.serving(library):
        if registry.load(name) is None and registry.devices_of(name):
            return registry.devices_of(name)[0]
    return "cpu"


def check_possible(library: str, device: str) -> None:
    """Raise if a library is not installed or has no arrays, or none on a device."""
    serving = registry.serving(library)
    if not is_installed(library):
        reason = "; ".join(filter(None, map(registry.load, serving))) or "it is not installed"
        raise ValueError(f"library {library!r} is not usable: {reason}")
    if not serving and not is_namespace(library):
        raise ValueError(
            f"library {library!r} is not usable: its arrays do not follow the array API standard;"
            f" name a library such as {', '.join(registry.names()[:3])}"
        )
    specs = [registry.spec_of(name) for name in serving if registry.load(name) is None]
    if specs and not any(device.partition(":")[0] in spec.devices for spec in specs):
        raise ValueError(f"library {library!r} is not usable on {device!r}")


def _source(requested: Request, kernels: Kernels) -> str:
    """Return what chose the backends and the kernels, in words."""
    named = _named(kernels)
    return f"{requested}, {named}" if named else str(requested)


def _named(kernels: Kernels) -> str:
    """Return the argument that names the kernels, nothing if the choice is automatic."""
    if isinstance(kernels, Kernel):
        return f"kernel={kernels.name}"
    names = ",".join(kernels)
    return "" if names == AUTO else f"kernel={names!r}"


def _error(explanation: Explanation, kernels: Kernels, requested: Request) -> BackendError:
    kind = BackendUnavailableError if explanation.unavailable else UnsupportedError
    subject = f"no backend {'that was asked for' if requested.names else 'here'}"
    subject = f"{_named(kernels) or subject} can"
    if kernels != (AUTO,):
        subject += "not"
    hint = [_IN_SAME_BITS] if requested.same_bits else []
    # Line by line, since torch.compile cannot trace the text of a value inside a string.
    error = kind("\n".join([f"{subject} take this call", *explanation.lines(), *hint]))
    error.explanation = explanation
    return error


def _try_candidates(
    call: Call,
    problem: Problem,
    requested: Request,
    choice: Kernels,
    xp: Any,
    *,
    explains: bool = False,
) -> tuple[tuple[Kernel, Placement] | None, list[Candidate]]:
    """Return the kernel that runs and its placement, if there is one, and the candidates in order.

    No candidate after the one that runs is tried, unless for `explain`.
    """
    check_known(requested)
    backends = _expanded(requested.names or (AUTO,), problem.library)
    _check_kernels(choice, [name for name, _ in backends], requested)
    if not requested.may_move:
        check_one_place(call)
    chosen: tuple[Kernel, Placement] | None = None
    candidates: list[Candidate] = []
    for name, is_fallback in backends:
        if is_fallback and chosen is not None:
            continue
        placement = _placement(call, problem, requested, name, xp)
        if isinstance(placement, Candidate):
            candidates.append(placement)
            continue
        absent, tries = _in_order(name, placement.kernels, choice, problem)
        candidates += absent
        withheld = dict(extensions.withheld(name.partition(":")[0]))
        for kernel, is_named in tries:
            own = _for_kernel(kernel, placement.problem)
            why = None if is_named else withheld.get(kernel.name)
            band = banded(own) if kernel.takes_band else None
            seen = own if band is None else band.problem
            candidate = _judge(name, kernel, seen, why, is_named=is_named, explains=explains)
            runs = chosen is None and candidate.status == "chosen"
            if runs:
                others = [k for k, _ in tries if k.name not in withheld and k is not choice]
                at = placement._replace(problem=own, kernels=tuple(others), band=band)
                chosen = kernel, at
            if explains:
                notes: list[str | None] = [_COPIES_PAGES] if own is not placement.problem else []
                notes += [] if band is None else [band.note]
                reads = "reads_selections" in kernel.promises
                notes.append(None if reads else dense_note(problem))
                candidate = _described(candidate, kernel, seen, notes, runs=runs)
            candidates.append(candidate)
            if runs and not explains:
                return chosen, candidates
    return chosen, candidates


def _check_kernels(choice: Kernels, backends: list[str], requested: Request) -> None:
    """Raise if a list names a kernel that no backend has; load only what that needs."""
    if isinstance(choice, Kernel) or not is_open(choice):  # the error of one name lists candidates
        return
    known = [AUTO, *extensions.names()]
    for name in backends:
        if all(one in known for one in choice):
            return
        stem = name.partition(":")[0]
        backend = None
        if stem != registry.ARRAY_API:
            if not _is_allowed(name, requested):
                continue
            if registry.load(stem) is not None:  # nobody knows its kernels
                return
            backend = registry.loaded(stem)
        known += [kernel.name for kernel in registry.kernels_of(backend)]
    for one in choice:
        if one not in known:
            hint = did_you_mean(one, known) or "."
            raise ValueError(
                f"{_named(choice)}: no backend of this call has a kernel {one!r}{hint} The names"
                f" here are {', '.join(dict.fromkeys(known))}"
            )


def _is_allowed(name: str, requested: Request) -> bool:
    """Return whether a backend may run."""
    return name in requested.names or registry.is_allowed(name.partition(":")[0])


def _placement(
    call: Call, problem: Problem, requested: Request, name: str, xp: Any
) -> Placement | Candidate:
    """Return where a backend would run a call, or the backend as a candidate that cannot."""
    if not _is_allowed(name, requested):
        return Candidate(name, None, "not allowed", (not_allowed(name.partition(":")[0]),))
    placement = find_placement(call, problem, name, xp)
    if isinstance(placement, Refusal):
        return Candidate(name, None, placement.status, (placement.reason,))
    if _lacks_derivative(call, problem, placement):
        return Candidate(name, None, "refused", (_NO_DERIVATIVE,))
    return placement


def _lacks_derivative(call: Call, problem: Problem, placement: Placement) -> bool:
    """Return whether the derivative of a score function is needed and cannot be had."""
    if problem.features.isdisjoint(DERIVATIVES) or "score_mod" not in problem.features:
        return False
    backend, score = placement.backend, call.score_mod
    parts = score.parts if isinstance(score, Chain) else (score,)
    given = all(part.derivative is not None for part in parts if isinstance(part, Function))
    differentiates = backend is not None and type(backend).pullback is not Backend.pullback
    return not differentiates and (isinstance(score, str) or not given)


def _absent(name: str, kernel: str | None = None) -> list[Candidate]:
    """Return the kernels of other distributions that are for a backend and did not join it."""
    if name == registry.ARRAY_API:  # which none can join
        return []
    return [
        Candidate(name, one, "unavailable" if kernel or is_allowed else "not allowed", (reason,))
        for one, is_allowed, reason in extensions.absent(name.partition(":")[0], kernel)
    ]


def _described(
    candidate: Candidate, kernel: Kernel, problem: Problem, notes: list[str | None], *, runs: bool
) -> Candidate:
    """Return a candidate with what only `explain` shows of its kernel."""
    status = candidate.status if runs or candidate.status != "chosen" else "next"
    origin = extensions.origins(candidate.backend.partition(":")[0]).get(kernel.name)
    remarks: list[str | None] = []
    if status in ("chosen", "next"):
        remarks = [*notes, _KEEPS_BITS if problem.same_bits else None, kernel.remark(problem)]
    remark = "; ".join(filter(None, remarks)) or None
    return candidate._replace(status=status, origin=origin, remark=remark)


def _in_order(
    name: str, kernels: Sequence[Kernel], choice: Kernels, problem: Problem
) -> tuple[list[Candidate], list[tuple[Kernel, bool]]]:
    """Return what a backend lacks, and its kernels as they are tried, each with if it is named."""
    if isinstance(choice, Kernel):
        return [], [(choice, True)]
    absent: list[Candidate] = []
    tries: list[tuple[Kernel, bool]] = []
    for one in choice:
        if one == AUTO:
            absent += [c for c in _absent(name) if c.kernel not in choice]
            tries += [(k, False) for k in _automatic(kernels, problem) if k.name not in choice]
            continue
        own = [(k, True) for k in kernels if k.name == one]
        tries += own
        if not own:
            reason = f"it has no kernel of that name; it has {', '.join([k.name for k in kernels])}"
            absent += _absent(name, one) or [Candidate(name, one, "refused", (reason,))]
    return absent, tries


def _automatic(kernels: Sequence[Kernel], problem: Problem) -> Sequence[Kernel]:
    """Return the kernels in the order in which they are tried if none is named."""
    if selection_of(problem.mask_spec)[0] is None:
        return [kernel for kernel in kernels if not isinstance(kernel, Gathered)]
    if why_many(problem) is not None:
        return kernels
    reads = [kernel for kernel in kernels if "reads_selections" in kernel.promises]
    return [*reads, *(kernel for kernel in kernels if kernel not in reads)]


def _expanded(names: Names, library: str) -> list[tuple[str, bool]]:
    """Return the backends in order, each with whether it is tried only if no other can run."""
    expanded: list[tuple[str, bool]] = []
    for name in names:
        if name == AUTO:
            expanded += [(serving, False) for serving in registry.serving(library)]
            expanded.append((registry.ARRAY_API, True))
        else:
            expanded.append((name, False))
    return expanded


def _for_kernel(kernel: Kernel, problem: Problem) -> Problem:
    """Return the problem that a kernel gets: without pages unless it reads them in place."""
    # It then gets gathered keys. So do all derivatives. Chunks of dask are not gathered.
    features = problem.features
    has_gradients = not features.isdisjoint(DERIVATIVES)
    has_gradients = has_gradients or problem.requires_grad or bool(problem.transforms)
    reads = "block_table" in kernel.features and not has_gradients
    if reads or "block_table" not in features or problem.library == "dask":
        return problem
    return problem._replace(features=features - {"block_table"})


def _judge(
    backend: str, kernel: Kernel, problem: Problem, withheld: str | None, *,
    is_named: bool, explains: bool,
) -> Candidate:  # fmt: skip
    if withheld is not None:
        return Candidate(backend, kernel.name, "not allowed", (withheld,))
    reasons = reasons_against(kernel, problem)
    # Whether another is better is asked where it decides, and for `explain` where it can be told.
    asks = not (reasons or is_named or problem.same_bits)
    if explains:
        asks = not undeclared(kernel, problem.features) and not problem.same_bits
        asks = asks and not (reasons and problem.is_symbolic)
    slower = kernel.only_on_request(problem) if asks else None
    status = "refused" if reasons else "chosen" if is_named or not slower else "on request"
    return Candidate(backend, kernel.name, status, tuple(reasons), slower)
