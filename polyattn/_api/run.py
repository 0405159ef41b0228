"""Plan a described call and run it."""

from __future__ import annotations

from collections.abc import Sequence

from polyattn._base.arrays import Array, library_of
from polyattn._core.call.facts import Call
from polyattn._core.call.layout import as_called, heads_first
from polyattn._core.call.operands import Operands
from polyattn._dispatch.cache import planned
from polyattn._dispatch.plan import Plan
from polyattn._dispatch.request import request
from polyattn._dispatch.select import check_kernel
from polyattn.plugin import Kernel


def compute(
    call: Call,
    operands: Operands,
    backend: str | Sequence[str] | None,
    kernel: str | Kernel | None,
) -> tuple[Array, Array | None]:
    """Examine a described call, select a kernel, and run it."""
    return run(call, operands, plan_of(call, operands.query, backend, kernel))


def plan_of(
    call: Call, query: Array, backend: str | Sequence[str] | None, kernel: str | Kernel | None
) -> Plan:
    """Return the plan of a described call by what is asked for."""
    check_kernel(kernel)
    return planned(call, request(backend), kernel, library_of(query).xp)


def run(call: Call, operands: Operands, plan: Plan) -> tuple[Array, Array | None]:
    """Run a plan; return the output and the logsumexp in the layout of the call."""
    return as_called(call, *plan.run(heads_first(call, operands)))
