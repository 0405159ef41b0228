"""Cache plans by the facts of a call, and plain calls by their keys.

Keys and plans hold facts in place of arrays, functions and tables, so the caches do not keep
objects of the caller alive. A kernel object is referred to weakly. A call is found by its key in
less time than its description takes.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple
from weakref import ref

from polyattn._base.arrays import Array
from polyattn._base.tracing import is_compiling
from polyattn._core.call.checks import examine
from polyattn._core.call.facts import Call
from polyattn._core.call.key import CallKey
from polyattn._core.call.layout import as_called, has_all_axes, heads_first, keeps_axes, swapped
from polyattn._core.call.operands import Operands
from polyattn._core.call.problem import Problem
from polyattn._dispatch.plan import Plan
from polyattn._dispatch.request import Kernels, Names, Request
from polyattn._dispatch.select import select
from polyattn.plugin import Backend, Kernel

_CAPACITY = 4096


class CachedCall(NamedTuple):
    """A call that has run, and its plan."""

    call: Call
    plan: Plan
    #: Backend, kernel and problem, if the kernel takes and returns the arrays of the caller, or
    #: views of them.
    direct: tuple[Backend, Kernel, Problem] | None
    keeps_axes: bool
    #: The operands that are no arrays and are not as the caller gives them, such as a mask without
    #: its causal part; None if those of each call follow from its arguments.
    fixed: dict[str, Any] | None

    def run(self, operands: Operands) -> tuple[Array, Array | None]:
        """Return output and logsumexp of the call with other arrays of the same classes."""
        if self.direct is None:
            given = heads_first(self.call, operands, reads_pages=self.call.block_table is not None)
            return as_called(self.call, *self.plan.run(given))
        backend, kernel, problem = self.direct
        if self.keeps_axes:
            return backend.run(kernel, problem, operands)
        return as_called(self.call, *backend.run(kernel, problem, swapped(self.call, operands)))

    @classmethod
    def of(cls, call: Call, plan: Plan, fixed: dict[str, Any] | None) -> CachedCall:
        """Return the record of a call that has just run."""
        backend, _, problem, moved, band = plan.placement
        direct = None
        if backend is not None and not (moved or band) and has_all_axes(call):
            direct = backend, plan.kernel, problem
        return cls(call, plan, direct, keeps_axes(call), fixed)


def cached_plan(call: Call, requested: Request, kernels: Kernels, xp: Any) -> Plan:
    """Examine a described call and select a kernel, unless an equal call was planned before."""
    if not is_compiling():  # which would trace through a cache, and ignore it
        try:
            if isinstance(kernels, Kernel):
                return Plan(kernels, *_without_kernel(call, requested, ref(kernels), xp))
            return _plan(call, requested, kernels, xp)
        except TypeError:
            if _is_hashable(call, kernels):
                raise  # it is about the call
    return select(call, examine(call), requested, kernels, xp)


def _is_hashable(*things: Any) -> bool:
    """Return whether things can be a key: symbolic lengths and some kernels cannot."""
    try:
        hash(things)
    except TypeError:
        return False
    return True


@lru_cache(_CAPACITY)
def _plan(call: Call, requested: Request, kernels: Names, xp: Any) -> Plan:
    return select(call, examine(call), requested, kernels, xp)


@lru_cache(_CAPACITY)
def _without_kernel(call: Call, requested: Request, kernel: ref[Kernel], xp: Any) -> Any:
    """Return a plan with a kernel object, without the kernel, which it would keep alive."""
    held = kernel()
    assert held is not None  # by the caller
    return select(call, examine(call), requested, held, xp)[1:]


@lru_cache(_CAPACITY)
def cached_call(key: CallKey, requested: Request, logsumexp: bool) -> list[CachedCall]:
    """Return a list for the call of a key, which is empty until the call has run."""
    return []


def forget() -> None:
    """Drop all plans and calls; needed when other backends are registered."""
    for cached in (_plan, _without_kernel, cached_call):
        cached.cache_clear()
