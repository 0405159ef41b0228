"""Move arrays to the chosen backend, run the kernel, and move the result back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from polyattn.arrays import Array, ArrayFacts, facts_of, is_array, library_of
from polyattn.call.describe import Operands
from polyattn.call.problem import Problem
from polyattn.dispatch import registry
from polyattn.dispatch.errors import UnsupportedError
from polyattn.expressions.expression import Expression
from polyattn.plugin import Backend, Kernel

__all__ = ["FURTHEST", "Placement", "Plan", "Refusal", "backend_of", "convert_like"]

# The last integer of 32 bits: a library may have no others.
FURTHEST = 2**31 - 1


class Placement(NamedTuple):
    """Where a call could be computed: a backend, and what of the arrays must be brought there."""

    backend: Backend | None  # None for the array-API kernels where only shapes are known
    kernels: tuple[Kernel, ...]
    problem: Problem  # as it stands there
    moved: frozenset[str]  # which operands come from elsewhere


class Refusal(NamedTuple):
    """Why there is no placement: the backend cannot be loaded here, or cannot take this call."""

    status: str  # "unavailable" or "refused"
    reason: str


class Plan(NamedTuple):
    """A kernel on a placement: all that is decided of a call."""

    kernel: Kernel
    placement: Placement
    home: str  # the device of the query

    def run(self, operands: Operands) -> tuple[Array, Array | None]:
        """Run the kernel on the operands, and hand the result back where the query lives."""
        backend, problem, moved = (
            self.placement.backend,
            self.placement.problem,
            self.placement.moved,
        )
        if backend is None:
            raise RuntimeError("a plan made from shapes alone cannot run")
        if not moved:
            return self._checked(backend.run(self.kernel, problem, operands))
        query = operands.query
        output, logsumexp = self._checked(
            backend.run(self.kernel, problem, self._bring(operands, backend))
        )
        if "query" not in moved:
            return output, logsumexp
        back = mover(backend, backend_of(query), self.home)
        output = _to_device_of(query, back(output))
        return output, None if logsumexp is None else _to_device_of(query, back(logsumexp))

    def _checked(self, result: Any) -> tuple[Array, Array | None]:
        """Refuse what a kernel may not return, of which unpacking would make something else."""
        if not isinstance(result, tuple) or len(result) != 2:
            raise TypeError(
                f"the kernel {self.kernel.name} must return (output, logsumexp); it returned"
                f" a {type(result).__name__}"
            )
        if result[1] is None and "logsumexp" in self.placement.problem.features:
            raise TypeError(f"the kernel {self.kernel.name} declares logsumexp and returned None")
        return result

    def _bring(self, operands: Operands, backend: Backend) -> Operands:
        device = self.placement.problem.device
        convert_like: dict[str, Any] = {}
        for name in self.placement.moved:
            given = getattr(operands, name)
            if name == "seed":
                convert_like[name] = int(given)  # all 64 bits of it, which not every library has
            elif not isinstance(given, Expression):
                if name == "query_offset":
                    given = _in_reach(given, self.placement.problem)
                convert_like[name] = mover(backend_of(given), backend, device)(given)
        for name in ("mask", "score_mod", "similarity"):
            given = getattr(operands, name)
            if isinstance(given, Expression):
                convert_like[name] = given.map(lambda _, thing: self._bring_one(thing, operands))
            elif callable(given):
                convert_like[name] = self._bring_one(given, operands)
        return operands._replace(**convert_like)

    def _bring_one(self, thing: Any, operands: Operands) -> Any:
        """Bring an array to the backend, or let a function be called from there."""
        backend, problem = self.placement.backend, self.placement.problem
        assert backend is not None
        if is_array(thing):
            return mover(backend_of(thing), backend, problem.device)(thing)
        if "query" not in self.placement.moved:
            return thing
        back = mover(backend, backend_of(operands.query), self.home)
        return _wrap_callback(thing, back, backend, problem.device, problem.transforms)


def _in_reach(offset: Array, problem: Problem) -> Array:
    """Limit query offsets to 32 bits, unless a window is so wide that it would change a result."""
    facts = facts_of(offset)
    is_wide = any(end is not None and end > FURTHEST // 2 for end in problem.window)
    if is_wide or facts.dtype not in ("int64", "uint64", "uint32"):
        return offset
    least = 0 if facts.dtype.startswith("u") else -FURTHEST
    return library_of(offset).xp.clip(offset, least, FURTHEST)


def _wrap_callback(
    rule: Callable[..., Any],
    back: _Move,
    backend: Backend,
    device: str,
    transforms: frozenset[str],
) -> Callable[..., Any]:
    """Let a function see arrays of the caller's own library although it is called elsewhere."""

    def rule_abroad(*indices: Array) -> Any:
        result = rule(*map(back, indices))
        if isinstance(result, bool):
            return result
        facts = facts_of(result, "what the function returned")
        lost = conversion_loss("what the function returned", facts, transforms)
        if lost is not None:
            raise UnsupportedError(lost)
        return mover(backend_of(result), backend, device)(result)

    return rule_abroad


def _to_device_of(query: Array, result: Array) -> Array:
    """Return the result on the query's device, which a library without a plugin cannot name."""
    if str(getattr(result, "device", "")) == str(getattr(query, "device", "")):
        return result
    return result.to_device(query.device) if hasattr(result, "to_device") else result


_Move = Callable[[Array], Array]


def mover(source: Backend, target: Backend, device: str) -> _Move:
    """Return the function that takes an array of `source` to `device` of `target`."""
    by_way_of_numpy = source is not target and "numpy" in (_root(source), _root(target))

    def move(array: Array) -> Array:
        return target.place(source.fetch(array) if by_way_of_numpy else array, device or None)

    return move


def convert_like(array: Array, like: Array) -> Array:
    """Return an array's values in the library and on the device of another."""
    source, target = backend_of(array), backend_of(like)
    values = array if source is target else source.fetch(array)
    return target.place(values, facts_of(like).device or None)


def _root(backend: Backend) -> str:
    return str(backend.xp.__name__.removeprefix("array_api_compat."))


def backend_of(array: Array) -> Backend:
    """Return the backend that knows how to take arrays of this library in and out."""
    for name in registry.serving(library_of(array).name):
        if registry.load(name) is None:
            return registry.loaded(name)
    return registry.array_api_backend(array)


def conversion_loss(name: str, facts: ArrayFacts, transforms: frozenset[str]) -> str | None:
    """Return what a conversion to another library would lose of an array, or None."""
    if facts.traced or (facts.library == "torch" and transforms):
        return (
            f"{name} is traced, transformed, lazy or a wrapper, without values to convert: call"
            " outside of that, or name no backend to stay in its library"
        )
    if facts.requires_grad:
        return (
            f"{name} requires grad, and its graph would end at the conversion from"
            f" {facts.library}: pass {name}.detach(), or name a backend of {facts.library}"
        )
    return None
