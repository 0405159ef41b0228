"""Cache plans by the facts of a call, so that a similar call skips selection.

Keys and plans hold facts in place of arrays, functions and tables, so the cache does not keep
objects of the caller alive. If the caller passes a kernel object, its placements are cached as long
as it lives.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

from polyattn.arrays import is_compiling
from polyattn.call.describe import Call
from polyattn.dispatch.request import Request
from polyattn.dispatch.transfer import Placement, Plan
from polyattn.plugin import Kernel
from polyattn.recent import Recent

__all__ = ["recall", "remember"]

_plans: Recent[tuple[Call, Request, str | None], Plan] = Recent(4096)
_Placements = Recent[tuple[Call, Request], Placement]
_placements: WeakKeyDictionary[Kernel, _Placements] = WeakKeyDictionary()


def recall(call: Call, requested: Request, kernel: str | Kernel | None) -> Plan | None:
    """Return the plan of an earlier call with the same facts, or None."""
    if is_compiling():
        return None
    try:
        if not isinstance(kernel, Kernel):
            return _plans.get((call, requested, kernel))
        placements = _placements.get(kernel)
        placement = None if placements is None else placements.get((call, requested))
    except TypeError:  # a symbolic length or a kernel that is not hashable
        return None
    return None if placement is None else Plan(kernel, placement, call.query.device)


def remember(call: Call, requested: Request, kernel: str | Kernel | None, plan: Plan) -> None:
    """Keep a plan for later calls with the same facts."""
    if is_compiling():
        return
    try:
        if isinstance(kernel, Kernel):
            placements = _placements.setdefault(kernel, Recent(256))
            placements[call, requested] = plan.placement
        else:
            _plans[call, requested, kernel] = plan
    except TypeError:
        pass
