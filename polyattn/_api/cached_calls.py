"""Run a call by its key, without describing it again."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

from polyattn._api.names import BESIDE
from polyattn._api.run import plan_of, run
from polyattn._core.call.describe import describe
from polyattn._core.call.key import call_key
from polyattn._core.call.operands import Operands
from polyattn._core.call.options import OPTIONS
from polyattn._dispatch.cache import CachedCall, cached_call
from polyattn._dispatch.request import request

_F = TypeVar("_F", bound=Callable[..., Any])
_OPTIONS = frozenset((*OPTIONS, *BESIDE))
_OPERANDS = frozenset(Operands._fields[3:])


def with_cached_calls(function: _F) -> _F:
    """Let `attention` run a call at once if one of the same key has run.

    What was checked then holds now: whatever a check looks at is in the key. A call whose
    description converts an argument is described each time.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        key = call_key(args, kwargs)
        if key is None:
            return function(*args, **kwargs)
        found = cached_call(key, request(kwargs.get("backend")))
        given = _operands(args, kwargs)
        if found:
            return found[0].run(given)
        if not kwargs.keys() <= _OPTIONS:
            return function(*args, **kwargs)  # which names the argument that it does not take
        backend, kernel = kwargs.pop("backend", None), kwargs.pop("kernel", None)
        described, operands = describe(*args, **kwargs)
        plan = plan_of(described, operands.query, backend, kernel)
        output, _ = run(described, operands, plan)
        if all(map(operator.is_, given, operands)):
            found.append(CachedCall.of(described, plan))
        return output

    return cast(_F, call)


def _operands(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Operands:
    if _OPERANDS.isdisjoint(kwargs):
        return Operands(*args)  # in 0.67 of the time of the next line
    return Operands(*args, **{name: kwargs[name] for name in kwargs if name in _OPERANDS})
