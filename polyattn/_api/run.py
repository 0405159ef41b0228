"""Plan a described call and run it, or run a call by its key without describing it again."""

from __future__ import annotations

import functools
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from polyattn._base.arrays import Array, ArrayFacts, as_facts, library_of
from polyattn._base.autocast import autocast
from polyattn._core.call.describe import describe, operands_of
from polyattn._core.call.facts import Call
from polyattn._core.call.key import call_key
from polyattn._core.call.layout import as_called, heads_first
from polyattn._core.call.operands import Operands
from polyattn._core.call.options import AUTOCAST, OPTIONS
from polyattn._core.call.pages import on_used_pages
from polyattn._core.call.parts import arrays_in
from polyattn._dispatch.cache import CachedCall, cached_call, cached_plan
from polyattn._dispatch.plan import Plan
from polyattn._dispatch.request import parse_kernel, request
from polyattn.plugin import Kernel

_F = TypeVar("_F", bound=Callable[..., Any])
_OPERANDS = frozenset(Operands._fields[3:])


class PlannedCall(NamedTuple):
    """A described call, and the whole decision about it."""

    call: Call
    operands: Operands
    plan: Plan

    @property
    def reads_pages(self) -> bool:
        """True if the kernel reads keys and values in pages, in place."""
        return "block_table" in self.plan.placement.problem.features

    def run(self) -> tuple[Array, Array | None]:
        """Return the output and the logsumexp in the layout of the call."""
        given = heads_first(self.call, self.operands, reads_pages=self.reads_pages)
        return as_called(self.call, *self.plan.run(given))


def planned_call(
    call: Call,
    operands: Operands,
    backend: str | Sequence[str] | None,
    kernel: str | Sequence[str] | Kernel | None,
) -> PlannedCall:
    """Examine a described call and select a kernel, over used pages only where the host knows."""
    plan = plan_of(call, operands.query, backend, kernel)
    at, problem = plan.placement.backend, plan.placement.problem
    is_copied = call.block_table is not None and "block_table" not in problem.features
    # A kernel whose bits do not depend on the batch gets no other keys by its longest item.
    if is_copied and at and not (plan.placement.moved or "batch_invariant" in plan.kernel.promises):
        numbers = operands.key_lengths, operands.block_table
        if at.is_eager(operands.query) and at.is_plain(*numbers):
            cut, operands = on_used_pages(call, operands)
            if cut is not call:
                call, plan = cut, plan_of(cut, operands.query, backend, kernel)
    return PlannedCall(call, operands, plan)


def check_ahead(
    query: Array, key: ArrayFacts, value: ArrayFacts, *, logsumexp: bool, **options: Any
) -> None:
    """Check and plan a call before its keys and values exist."""
    arguments = autocast({"query": query, "key": key, "value": value, **options}, AUTOCAST)
    planned_call(*describe(**arguments, logsumexp=logsumexp, facts=as_facts), None, None)


def is_known(query: Array, key: Array, value: Array, *, logsumexp: bool, **options: Any) -> bool:
    """Return whether a call like this one has run, so that its arguments are right."""
    of_call = call_key((query, key, value), options)
    requested = request(options.get("backend"), query)
    return of_call is not None and bool(cached_call(of_call, requested, logsumexp))


def plan_of(
    call: Call,
    query: Array,
    backend: str | Sequence[str] | None,
    kernel: str | Sequence[str] | Kernel | None,
) -> Plan:
    """Return the plan of a described call."""
    kernels = parse_kernel(kernel)
    return cached_plan(call, request(backend, query), kernels, library_of(query).xp)


def kind_of(*arrays: Array, **options: Any) -> tuple[Any, ...] | None:
    """Return what the plan of a call depends on, None if it cannot be a key."""
    key = call_key(arrays, options)
    return None if key is None else (key, request(None, arrays[0]))


def kernel_for(*arrays: Array, layout: str, **options: Any) -> Kernel:
    """Return the kernel that runs a call of `attention`."""
    call, operands = describe(*arrays, layout=layout, **options)
    return plan_of(call, operands.query, None, None).kernel


def run_planned(result: Callable[..., Any], *, logsumexp: bool = False) -> Callable[[_F], _F]:
    """Let a function that plans a call return a result made of its output and logsumexp.

    It may plan none, and then returns None. A call with the key of an earlier call reuses its plan.
    The earlier checks still hold: the key has all that they look at, but for the numbers in arrays
    of the host and dropout's seed. Where the description makes an operand of these, each call makes
    its own.
    """

    def decorate(function: _F) -> _F:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            key = call_key(args, kwargs)
            if key is not None:
                earlier = cached_call(key, request(kwargs.get("backend"), args[0]), logsumexp)
                if earlier:
                    known = earlier[0]
                    return result(known.run(_operands(args, kwargs, known.fixed)))
            new: PlannedCall | None = function(*args, **kwargs)
            if new is None:
                return None
            results = new.run()
            # Pages that are gathered are those that the lengths of the call use.
            if key is not None and (new.call.block_table is None or new.reads_pages):
                fixed = _fixed(new.operands, args, kwargs)
                earlier.append(CachedCall.of(new.call, new.plan, fixed))
            return result(results)

        return typing.cast(_F, call)

    return decorate


def _fixed(made: Operands, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the operands that all calls of a key share, None if some follow from its arrays."""
    given = _operands(args, kwargs, {})
    fixed = {
        name: new
        for name, new, old in zip(Operands._fields, made, given, strict=True)
        if new is not old
    }
    return None if "dropout" in kwargs or any(map(arrays_in, fixed.values())) else fixed


def _operands(
    args: Sequence[Any], kwargs: Mapping[str, Any], fixed: dict[str, Any] | None
) -> Operands:
    if fixed is None:
        options = {name: kwargs[name] for name in kwargs if name in OPTIONS}
        query, key, value = args
        return operands_of(query, key, value, options, kwargs.get("layout", "...HLD"))
    if not fixed and _OPERANDS.isdisjoint(kwargs):
        return Operands(*args)  # in 0.67 of the time of the next line
    given = {name: kwargs[name] for name in kwargs if name in _OPERANDS}
    return Operands(*args, **(given | fixed if fixed else given))
