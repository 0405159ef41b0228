"""From a call to the kernel that runs it.

An argument wins over the innermost context, which wins over the environment variable, read at call
time; they mean the same: names in order, of which the first that is here and able runs, and nothing
outside them. Where nobody named a backend, the arrays' own library decides and nothing is moved.
Static facts decide, so a decision is remembered by them.
"""

from __future__ import annotations

import difflib
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import replace
from typing import NamedTuple
from weakref import WeakKeyDictionary

from polyattn import registry
from polyattn.arrays import Array, is_compiling
from polyattn.call import Call
from polyattn.errors import (
    BackendError,
    BackendUnavailableError,
    UnknownBackendError,
    UnsupportedError,
)
from polyattn.explain import Candidate, Explanation
from polyattn.kernels.weights import Weights
from polyattn.placement import Plan, Refusal, Site, open_site
from polyattn.plugin import Kernel
from polyattn.problem import Problem, examine
from polyattn.recent import Recent

__all__ = ["VARIABLE", "decide", "default_device", "plan", "use_backend"]

VARIABLE = "POLYATTN_BACKEND"
AUTO = "auto"

Names = tuple[str, ...]


class Request(NamedTuple):
    """The backends asked for, in order, and by which channel; no names where nobody asked."""

    names: Names
    channel: str = "arrays"

    @property
    def may_move(self) -> bool:
        """Whether some backend is named, rather than left to the arrays."""
        return any(name != AUTO for name in self.names)

    def __str__(self) -> str:
        names = ",".join(self.names)
        return {
            "argument": f"backend={names!r}",
            "context": f"use_backend({names!r})",
            "environment": f"{VARIABLE}={names}",
            "arrays": "the arrays' own library",
        }[self.channel]


# ---- who asks ----------------------------------------------------------------------------------

_context: ContextVar[Names] = ContextVar("polyattn_backend", default=())
# torch.compile cannot trace ContextVar.get (pytorch#186449), but reads and guards an attribute of
# a thread-local: what it sees is the innermost block that this thread has entered.
_traced_context = threading.local()
_blocks_open = 0
_any_block_open = False  # what torch.compile guards on, rather than their number
_blocks_lock = threading.Lock()


@contextmanager
def use_backend(*names: str) -> Iterator[None]:
    """Choose the backend of every call made inside the block, by this thread or task.

    Inside a function that torch.compile traces, pass ``backend=`` instead. Around a call of a
    compiled function this works, in the same thread.

    Parameters
    ----------
    *names : str
        Backends in order, as ``name`` or ``name:device``; one string may hold several with commas.
        ``auto`` is the arrays' own library, as where nothing is chosen.

    Yields
    ------
    None
        Nothing; the choice ends with the block.

    Raises
    ------
    UnknownBackendError
        If no plugin has one of the names.

    Examples
    --------
    >>> import numpy as np
    >>> import polyattn
    >>> x = np.ones((2, 5, 8), dtype=np.float32)
    >>> with polyattn.use_backend("numpy"):
    ...     polyattn.attention(x, x, x).shape
    (2, 5, 8)
    """
    global _any_block_open, _blocks_open
    parsed = parse(names, "use_backend")
    _refuse_unknown(Request(parsed, "context"))
    token = _context.set(parsed)
    _traced_context.names = parsed
    with _blocks_lock:
        _blocks_open += 1
        _any_block_open = True
    try:
        yield
    finally:
        with _blocks_lock:
            _blocks_open -= 1
            _any_block_open = _blocks_open > 0
        # A generator may be closed in another context, where there is nothing to undo.
        with suppress(ValueError):
            _context.reset(token)
        _traced_context.names = _context.get()


def request(backend: str | Sequence[str] | None) -> Request:
    """Return which backends are asked for, by argument, context or environment."""
    if backend is not None:
        return Request(parse(backend), "argument")
    if _any_block_open:
        names = getattr(_traced_context, "names", ()) if is_compiling() else _context.get()
        if names:
            return Request(names, "context")
    variable = os.environ.get(VARIABLE)
    if variable:
        return Request(parse(variable, f"{VARIABLE}="), "environment")
    return Request(())


def parse(backend: str | Sequence[str], source: str = "backend=") -> Names:
    """Split a choice into its names; `source` is what an error calls it."""
    given = [backend] if isinstance(backend, str) else backend
    if not isinstance(given, Sequence) or not all(isinstance(item, str) for item in given):
        raise TypeError(
            f"a backend is named by a string such as 'numpy' or 'torch:cuda'; got {backend!r}"
        )
    names = tuple(name.strip() for item in given for name in item.split(","))
    if not names or "" in names:
        raise ValueError(f"a backend's name is missing in {source}{backend!r}")
    return names


def _refuse_unknown(asked: Request) -> None:
    known = (*registry.names(), registry.ARRAY_API, AUTO)
    for name in asked.names:
        stem, _, device = name.partition(":")
        if stem == AUTO and device:
            raise UnknownBackendError(
                f"{AUTO} leaves the arrays where they are and takes no device; got {name!r}"
            )
        if stem not in known:
            near = difflib.get_close_matches(stem, known, n=1)
            meant = f"; did you mean {near[0]!r}?" if near else "."
            having = [f"{one}:{stem}" for one in _having(stem)]
            if having:
                meant = f": it is a kind of device, as in {' or '.join(having)}."
            raise UnknownBackendError(
                f"no plugin provides the backend {stem!r}{meant} The names here are"
                f" {', '.join(known)}; `polyattn backends` shows what each needs"
                + (f" (asked for by {asked})" if asked.channel == "environment" else "")
            )


def _having(device: str) -> list[str]:
    """Return the backends of several kinds of device, this one among them."""
    return [s.name for s in registry.specs() if device in s.devices and len(s.devices) > 1]


# ---- what runs ---------------------------------------------------------------------------------

# Keys and plans hold facts in place of arrays, functions and tables, so that they keep nothing of
# the caller's alive. A kernel that the caller gave is no such fact: where it runs is remembered as
# long as the kernel lives.
_plans: Recent[tuple[Call, Request, str | Kernel | None], Plan] = Recent(4096)
_sites: WeakKeyDictionary[Kernel, Recent[tuple[Call, Request], Site]] = WeakKeyDictionary()
_MOST_SITES = 256


def plan(
    call: Call, query: Array, backend: str | Sequence[str] | None, kernel: str | Kernel | None
) -> Plan:
    """Return how to run the call, or raise with every candidate and its reasons.

    Parameters
    ----------
    call : Call
        The facts of the call.
    query : Array
        The query itself, for its library.
    backend : str, sequence of str, or None
        The argument of the call.
    kernel : str, Kernel or None
        The kernel insisted on.
    """
    _check_kernel(kernel)
    asked = request(backend)
    if is_compiling():
        return _plan(call, query, asked, kernel)
    if isinstance(kernel, Kernel) and not isinstance(kernel, Weights):
        return _plan_of_given(kernel, call, query, asked)
    key = (call, asked, kernel)
    try:
        found = _plans.get(key)
    except TypeError:  # lengths that are symbols cannot be remembered by
        return _plan(call, query, asked, kernel)
    if found is None:
        found = _plans[key] = _plan(call, query, asked, kernel)
    return found


def _plan_of_given(kernel: Kernel, call: Call, query: Array, asked: Request) -> Plan:
    """Return how to run the call by a kernel that the caller gave."""
    key = (call, asked)
    try:
        sites = _sites.get(kernel)
        if sites is None:
            sites = _sites.setdefault(kernel, Recent(_MOST_SITES))
        site = sites.get(key)
    except TypeError:  # nor by a kernel without a hash
        return _plan(call, query, asked, kernel)
    if site is None:
        site = sites[key] = _plan(call, query, asked, kernel).site
    return Plan(kernel, site, call.query.device)


def _check_kernel(kernel: str | Kernel | None) -> None:
    if isinstance(kernel, Kernel):
        flaw = registry.flaw(kernel)
        if flaw is not None:
            raise TypeError(f"the kernel given {flaw}")
    elif kernel is not None and not isinstance(kernel, str):
        raise TypeError(
            f"a kernel is named by a string such as 'dense', or is an instance of Kernel; got"
            f" {kernel!r}"
        )


def _plan(call: Call, query: Array, asked: Request, kernel: str | Kernel | None) -> Plan:
    problem = examine(call, conversion=asked.may_move)
    chosen, candidates = _weigh(call, problem, query, asked, kernel)
    if chosen is None:
        raise _error(Explanation(call, problem, str(asked), tuple(candidates)), kernel, asked)
    return chosen


def decide(
    call: Call,
    query: Array | None,
    backend: str | Sequence[str] | None,
    kernel: str | Kernel | None,
) -> Explanation:
    """Return the whole decision; `query` is None where only shapes were given."""
    _check_kernel(kernel)
    asked = request(backend)
    if query is None:
        _refuse_imaginary(call.query.library, call.query.device)
    problem = examine(call, conversion=asked.may_move)
    _, candidates = _weigh(call, problem, query, asked, kernel, whole=True)
    return Explanation(call, problem, str(asked), tuple(candidates))


def default_device(library: str) -> str:
    """Return where arrays of a library are if nothing else is said."""
    for name in registry.serving(library):
        if registry.load(name) is None and registry.devices_of(name):
            return registry.devices_of(name)[0]
    return "cpu"


def _refuse_imaginary(library: str, device: str) -> None:
    """Refuse to explain a call with arrays that cannot be."""
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
    _refuse_unknown(asked)
    chosen: Plan | None = None
    candidates: list[Candidate] = []
    for name, closing in _expanded(asked.names or (AUTO,), problem.library):
        if closing and chosen is not None:
            continue
        site = open_site(call, problem, query, name)
        if isinstance(site, Refusal):
            candidates.append(Candidate(name, None, site.status, (site.reason,)))
            continue
        offered = _offered(site.kernels, insisted)
        for kernel in offered:
            candidate = _judge(name, kernel, site.problem, insisted is not None, chosen is not None)
            if whole and candidate.status in ("chosen", "next"):
                candidate = replace(candidate, remark=kernel.remark(site.problem))
            candidates.append(candidate)
            if candidate.status == "chosen":
                chosen = Plan(kernel, site, call.query.device)
                if not whole:
                    return chosen, candidates
        if not offered:
            its_own = ", ".join(kernel.name for kernel in site.kernels)
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
