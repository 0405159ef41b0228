"""Select the kernel that runs a call.

The backends asked for are tried in order. The first that is installed and supports the call runs;
no other is tried. Where no backend is named, the arrays' own library runs and nothing is moved.
Only static facts decide: shapes, dtypes, devices and options, never the values of an array.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from polyattn.arrays import Array
from polyattn.call.describe import Call
from polyattn.call.problem import Problem
from polyattn.dispatch import registry
from polyattn.dispatch.errors import (
    BackendError,
    BackendUnavailableError,
    UnsupportedError,
)
from polyattn.dispatch.explanation import Candidate, Explanation
from polyattn.dispatch.placement import check_one_place, find_placement
from polyattn.dispatch.request import AUTO, Names, Request, check_known
from polyattn.dispatch.transfer import Plan, Refusal
from polyattn.plugin import Kernel

__all__ = ["check_kernel", "check_possible", "default_device", "explain_selection", "select"]


def select(
    call: Call, problem: Problem, query: Array, asked: Request, kernel: str | Kernel | None
) -> Plan:
    """Return how to run the call, or raise with every candidate and its reasons.

    Parameters
    ----------
    call, problem : Call, Problem
        What the caller gave, and its facts.
    query : Array
        The query itself, for its library.
    asked : Request
        The backends asked for.
    kernel : str, Kernel or None
        The kernel insisted on.
    """
    chosen, candidates = _weigh(call, problem, query, asked, kernel)
    if chosen is None:
        raise _error(Explanation(call, problem, str(asked), tuple(candidates)), kernel, asked)
    return chosen


def explain_selection(
    call: Call,
    problem: Problem,
    query: Array | None,
    asked: Request,
    kernel: str | Kernel | None,
) -> Explanation:
    """Return the whole decision; `query` is None where only shapes were given."""
    _, candidates = _weigh(call, problem, query, asked, kernel, whole=True)
    return Explanation(call, problem, str(asked), tuple(candidates))


def check_kernel(kernel: str | Kernel | None) -> None:
    """Raise if what the caller insists on is neither the name of a kernel nor a kernel."""
    if isinstance(kernel, Kernel):
        flaw = registry.flaw(kernel)
        if flaw is not None:
            raise TypeError(f"the kernel given {flaw}")
    elif kernel is not None and not isinstance(kernel, str):
        raise TypeError(
            f"a kernel is named by a string such as 'dense', or is an instance of Kernel; got"
            f" {kernel!r}"
        )


def default_device(library: str) -> str:
    """Return where arrays of a library are if nothing else is said."""
    for name in registry.serving(library):
        if registry.load(name) is None and registry.devices_of(name):
            return registry.devices_of(name)[0]
    return "cpu"


def check_possible(library: str, device: str) -> None:
    """Raise if a library that is here has no arrays on a device."""
    serving = registry.serving(library)
    if not registry.is_installed(library):
        reason = "; ".join(filter(None, map(registry.load, serving))) or "it is not installed"
        raise ValueError(f"there can be no array of {library!r}: {reason}")
    specs = [registry.spec_of(name) for name in serving if registry.load(name) is None]
    if specs and not any(device.partition(":")[0] in spec.devices for spec in specs):
        raise ValueError(f"there can be no array of {library} on {device!r}")


def _error(explanation: Explanation, kernel: str | Kernel | None, asked: Request) -> BackendError:
    kind = BackendUnavailableError if explanation.unavailable else UnsupportedError
    what = f"kernel={kernel.name if isinstance(kernel, Kernel) else kernel!r} cannot"
    if kernel is None:
        what = f"no backend {'that was asked for' if asked.names else 'here'} can"
    # Line by line, since torch.compile cannot trace the text of a value inside a string.
    error = kind("\n".join([f"{what} take this call", *explanation.lines()]))
    error.explanation = explanation
    return error


def _weigh(
    call: Call,
    problem: Problem,
    query: Array | None,
    asked: Request,
    insisted: str | Kernel | None,
    *,
    whole: bool = False,
) -> tuple[Plan | None, list[Candidate]]:
    """Ask the candidates in order; stop at the first that can, or with `whole` ask them all."""
    check_known(asked)
    if not asked.may_move:
        check_one_place(call)
    chosen: Plan | None = None
    candidates: list[Candidate] = []
    for name, closing in _expanded(asked.names or (AUTO,), problem.library):
        if closing and chosen is not None:
            continue
        placement = find_placement(call, problem, query, name)
        if isinstance(placement, Refusal):
            candidates.append(Candidate(name, None, placement.status, (placement.reason,)))
            continue
        offered = _offered(placement.kernels, insisted)
        for kernel in offered:
            candidate = _judge(
                name, kernel, placement.problem, insisted is not None, chosen is not None
            )
            if whole and candidate.status in ("chosen", "next"):
                candidate = replace(candidate, remark=kernel.remark(placement.problem))
            candidates.append(candidate)
            if candidate.status == "chosen":
                chosen = Plan(kernel, placement, call.query.device)
                if not whole:
                    return chosen, candidates
        if not offered:
            its_own = ", ".join(kernel.name for kernel in placement.kernels)
            reason = f"it has no kernel of that name; it has {its_own}"
            candidates.append(Candidate(name, str(insisted), "refused", (reason,)))
    return chosen, candidates


def _offered(kernels: Sequence[Kernel], insisted: str | Kernel | None) -> Sequence[Kernel]:
    if isinstance(insisted, Kernel):
        return (insisted,)
    return [kernel for kernel in kernels if insisted in (None, kernel.name)]


def _expanded(names: Names, library: str) -> list[tuple[str, bool]]:
    """Return the backends in order; with True, one that is asked only where no other can."""
    expanded: list[tuple[str, bool]] = []
    for name in names:
        if name == AUTO:
            expanded += [(own, False) for own in registry.serving(library)]
            expanded.append((registry.ARRAY_API, True))
        else:
            expanded.append((name, False))
    return expanded


def _judge(
    backend: str, kernel: Kernel, problem: Problem, insisted: bool, taken: bool
) -> Candidate:
    missing = sorted(problem.features - kernel.features)
    if missing:
        reasons = [f"it does not compute {', '.join(missing)}"]
    else:
        reasons = _out_of_place(kernel, problem) or kernel.reasons_against(problem)
        if not isinstance(reasons, list):
            raise TypeError(
                f"reasons_against of the kernel {kernel.name} must return a list of strings; it"
                f" returned {reasons!r}"
            )
    if reasons:
        return Candidate(backend, kernel.name, "refused", tuple(reasons))
    waits = None if insisted else kernel.only_on_request(problem)
    if waits is not None:
        return Candidate(backend, kernel.name, "on request", (waits,))
    return Candidate(backend, kernel.name, "next" if taken else "chosen")


def _out_of_place(kernel: Kernel, problem: Problem) -> list[str]:
    """Return why a kernel is not for the device of a problem, where that is known."""
    here = problem.device_kind
    only = {"": kernel.devices} | {f: kernel.only_on.get(f) for f in sorted(problem.features)}
    return [
        f"it {f'computes {what}' if what else 'runs'} on {', '.join(sorted(kinds))} alone, and this"
        f" is on {here}"
        for what, kinds in only.items()
        if here and kinds is not None and here not in kinds
    ]
