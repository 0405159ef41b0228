"""Plan a call that torch.compile traces by a function that it does not trace.

A program checks each function, class and table that was traced, in each run: those of a plan are
half of them, 70 µs of a small call.
"""

from __future__ import annotations

from typing import Any

from polyattn._base.arrays import ArrayFacts
from polyattn._base.tracing import constant_when_traced, is_compiling, known_length
from polyattn._core.call.facts import Call
from polyattn._core.call.problem import Problem, examine
from polyattn._core.expressions.expression import Expression
from polyattn._dispatch import registry
from polyattn._dispatch.placement import Placement
from polyattn._dispatch.plan import Plan
from polyattn._dispatch.request import Request
from polyattn._dispatch.select import select
from polyattn._dispatch.trace import is_traced
from polyattn.plugin import Kernel


def constant_plan(
    call: Call, requested: Request, kernel: str | Kernel | None, xp: Any
) -> Plan | None:
    """Return the plan of a call with fixed lengths and without expressions that moves no arrays.

    None where it must be traced: other calls, those with an error, and in older versions of torch.
    """
    if isinstance(kernel, Kernel) or is_traced() or not _is_constant(call):
        return None
    # torch makes no constants of named tuples, and cannot look into a constant set.
    facts = [tuple(one) if isinstance(one, ArrayFacts) else None for one in call]
    rest = [None if isinstance(one, ArrayFacts) else one for one in call]
    found = _plan(facts, rest, tuple(requested), kernel, xp)
    if found is None:
        return None
    name, runs, others, fields, kind = found
    backend = registry.loaded(name)
    kernels = registry.kernels_of(backend)
    values: list[Any] = [frozenset(x) if isinstance(x, list) else x for x in fields]
    problem = Problem(*values)
    placement = Placement(backend, tuple([kernels[n] for n in others]), problem, frozenset())
    return Plan(kernels[runs], placement, call.query.device, kind, set())


def _is_constant(call: Call) -> bool:
    """Return whether a program leaves no number of a call open, and it has no expressions."""
    if call.residuals is not None:
        return False
    for one in call:
        if isinstance(one, Expression):
            return False
        numbers = one.shape if isinstance(one, ArrayFacts) else one
        for number in numbers if isinstance(numbers, tuple) else (numbers,):
            if isinstance(number, (int, float)) and known_length(number) is None:  # type: ignore[arg-type]
                return False
    return True


@constant_when_traced
def _plan(
    facts: list[Any], rest: list[Any], requested: Any, kernel: str | None, xp: Any
) -> list[Any] | None:
    """Return what a plan is made of: kernels by number, and lists in place of sets."""
    fields: list[Any] = [
        one if of is None else ArrayFacts(*of) for one, of in zip(rest, facts, strict=True)
    ]
    call = Call(*fields)
    if not is_compiling():  # so older versions of torch say here
        return None
    try:
        plan = select(call, examine(call), Request(*requested), kernel, xp)
    except Exception:  # which the traced selection raises again
        return None
    _, _, problem, moved, band = plan.placement
    name = plan.kind.backend.partition(":")[0]
    if moved or band is not None or name == registry.ARRAY_API:
        return None
    kernels = registry.kernels_of(registry.loaded(name))
    runs, *others = [kernels.index(one) for one in (plan.kernel, *plan.placement.kernels)]
    return [
        name,
        runs,
        others,
        [[*x] if isinstance(x, frozenset) else x for x in problem],
        plan.kind,
    ]
