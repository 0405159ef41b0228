"""Run a repeated call by its glance, without describing it again."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

from polyattn.call.describe import describe
from polyattn.call.glance import glance
from polyattn.call.operands import Operands
from polyattn.dispatch.plans import recall_repeat, remember_repeat
from polyattn.dispatch.request import request

__all__ = ["with_repeats"]

_F = TypeVar("_F", bound=Callable[..., Any])


def with_repeats(function: _F) -> _F:
    """Let `attention` run a call at once if one that was the same at a glance has run.

    What was checked then holds now: whatever a check looks at is in the glance. A call whose
    description converts an argument is described each time.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        seen = glance(args, kwargs)
        if seen is None:
            return function(*args, **kwargs)
        requested = request(kwargs.get("backend"))
        repeat = recall_repeat(seen, requested)
        given = _operands(args, kwargs)
        if repeat is not None:
            return repeat.run(given)
        result = function(*args, **kwargs)
        options = {name: kwargs[name] for name in kwargs if name not in ("backend", "kernel")}
        described, operands = describe(*args, **options)
        if all(map(operator.is_, given, operands)):
            remember_repeat(seen, requested, described, kwargs.get("kernel"))
        return result

    return cast(_F, call)


def _operands(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Operands:
    query, key, value = args
    # By `__new__`, in half the time, which each repeated call spends.
    if not kwargs:
        return Operands.__new__(Operands, query=query, key=key, value=value)
    given = kwargs.get
    return Operands.__new__(
        Operands, query=query, key=key, value=value, mask=given("mask"), bias=given("bias"),
        query_offset=given("query_offset"), sinks=given("sinks"),
    )  # fmt: skip
