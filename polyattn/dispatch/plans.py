"""Cache plans by the facts of a call, so that a similar call skips selection.

Keys and plans hold facts in place of arrays, functions and tables, so the cache does not keep
objects of the caller alive. If the caller passes a kernel object, its placements are cached as long
as it lives. A plain call is also cached by its glance, which takes less time than its description.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from polyattn.arrays import Array
from polyattn.call.facts import Call
from polyattn.call.glance import Glance
from polyattn.call.layout import as_called, heads_first, keeps_axes
from polyattn.call.operands import Operands
from polyattn.dispatch.request import Request
from polyattn.dispatch.transfer import Placement, Plan
from polyattn.plugin import Backend, Kernel, Problem
from polyattn.recent import Recent
from polyattn.tracing import is_compiling

__all__ = ["Repeat", "recall", "recall_repeat", "remember", "remember_repeat"]


class Repeat(NamedTuple):
    """A call that has run, and its plan."""

    call: Call
    plan: Plan
    #: Backend, kernel and problem, if the kernel takes and returns the arrays of the caller.
    direct: tuple[Backend, Kernel, Problem] | None

    def run(self, operands: Operands) -> Array:
        """Return the output of the call with other arrays of the same classes."""
        if self.direct is not None:
            backend, kernel, problem = self.direct
            return backend.run(kernel, problem, operands)[0]
        return as_called(self.call, *self.plan.run(heads_first(self.call, operands)))[0]


# The values are plans, by the facts of a call, and repeats, by its glance.
_plans: Recent[tuple[Hashable, ...], Any] = Recent(4096)
# A plan would keep its kernel alive: its placement, and whether it was tried.
_Placements = Recent[tuple[Call, Request], tuple[Placement, bool]]
_placements: WeakKeyDictionary[Kernel, _Placements] = WeakKeyDictionary()


def recall(call: Call, requested: Request, kernel: str | Kernel | None) -> Plan | None:
    """Return the plan of an earlier call with the same facts, or None."""
    if is_compiling():
        return None
    try:
        if not isinstance(kernel, Kernel):
            plan: Plan | None = _plans.get((call, requested, kernel))
            return plan
        placements = _placements.get(kernel)
        found = None if placements is None else placements.get((call, requested))
    except TypeError:  # a symbolic length or a kernel that is not hashable
        return None
    if found is None:
        return None
    placement, tried = found
    return Plan(kernel, placement, call.query.device, tried)


def remember(call: Call, requested: Request, kernel: str | Kernel | None, plan: Plan) -> None:
    """Keep a plan for later calls with the same facts."""
    if is_compiling():
        return
    try:
        if isinstance(kernel, Kernel):
            placements = _placements.setdefault(kernel, Recent(256))
            placements[call, requested] = plan.placement, plan.tried
        else:
            _plans[call, requested, kernel] = plan
    except TypeError:
        pass


def recall_repeat(seen: Glance, requested: Request) -> Repeat | None:
    """Return an earlier call with the same glance, or None."""
    repeat: Repeat | None = _plans.get((seen, requested))
    return repeat


def remember_repeat(
    seen: Glance, requested: Request, call: Call, kernel: str | Kernel | None
) -> None:
    """Keep a call that has just run for later ones with the same glance."""
    plan = recall(call, requested, kernel)
    if plan is not None:
        direct = None
        backend, _, problem, moved = plan.placement
        if backend is not None and not moved and keeps_axes(call):
            direct = backend, plan.kernel, problem
        _plans[seen, requested] = Repeat(call, plan, direct)
