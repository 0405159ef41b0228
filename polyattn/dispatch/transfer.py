"""Move arrays to the chosen backend, run the kernel, and move the result back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from polyattn.arrays import (
    Array,
    ArrayFacts,
    Recorder,
    facts_of,
    is_array,
    library_of,
    recorders,
)
from polyattn.call.describe import Operands
from polyattn.call.gradients import Gradients
from polyattn.call.options import GRADIENT_ARRAYS, OPTIONS
from polyattn.call.problem import Problem
from polyattn.dispatch import registry
from polyattn.dispatch.errors import UnsupportedError
from polyattn.expressions.expression import Expression
from polyattn.plugin import Backend, Kernel
from polyattn.tracing import is_compiling

__all__ = ["Placement", "Plan", "Refusal", "backend_of", "conversion_loss", "convert_like"]

# A library may have no integers above 32 bits.
_INT32_MAX = 2**31 - 1

_Move = Callable[[Array], Array]


class Placement(NamedTuple):
    """A backend that could run a call, and the operands that must move there."""

    backend: Backend | None  # None for the array-API kernels where only shapes are known
    kernels: tuple[Kernel, ...]
    problem: Problem  # with the library and device of the backend
    moved: frozenset[str]  # the operands of another library or device


class Refusal(NamedTuple):
    """The reason why a backend cannot be loaded, or cannot run this call."""

    status: str  # "unavailable" or "refused"
    reason: str


class Plan(NamedTuple):
    """The complete decision about a call: a kernel and its placement."""

    kernel: Kernel
    placement: Placement
    home: str  # the device of the query
    tried: bool = False  # whether it has run: what a kernel returns depends on static facts

    def with_feature(self, feature: str) -> Plan | None:
        """Return the plan with one feature more, by the first kernel that has it, or None."""
        problem = self.placement.problem
        problem = problem._replace(features=problem.features | {feature})
        placement = self.placement._replace(problem=problem)
        for kernel in (self.kernel, *placement.kernels):
            if problem.features <= kernel.features and not kernel.reasons_against(problem):
                return self._replace(kernel=kernel, placement=placement)
        return None

    def run(self, operands: Operands) -> tuple[Array, Array | None]:
        """Run the kernel, and return the result in the query's library and on its device."""
        recorder = _recorder(operands)
        if recorder is not None:
            return recorder.run(self, operands)
        backend, _, problem, moved = self.placement
        if backend is None:
            raise RuntimeError("a plan made from shapes only cannot run")
        given = self._move(operands, backend) if moved else operands
        output, logsumexp = self._checked(backend.run(self.kernel, problem, given), given)
        query = operands.query
        if "query" not in moved:
            return output, logsumexp
        back = _mover(backend, backend_of(query), self.home, problem.dtype)
        output = _on_query_device(query, back(output))
        return output, None if logsumexp is None else _on_query_device(query, back(logsumexp))

    def run_backward(self, operands: Operands) -> Gradients:
        """Run the kernel's backward pass, and return gradients on the query's device."""
        recorder = _recorder(operands)
        if recorder is not None:
            recorded: Gradients = recorder.run_backward(self, operands)
            return recorded
        backend, _, problem, moved = self.placement
        if backend is None:
            raise RuntimeError("a plan made from shapes only cannot run")
        given = self._move(operands, backend) if moved else operands
        found = backend.run_backward(self.kernel, problem, given)
        if not isinstance(found, Gradients):
            raise TypeError(
                f"backward of the kernel {self.kernel.name} must return Gradients; it returned a"
                f" {type(found).__name__}"
            )
        if not self.tried and self._is_handed_in:
            self._check_gradients(found, given)
        if "query" not in moved:
            return found
        back = _mover(backend, backend_of(operands.query), self.home, problem.dtype)

        def home(one: Any) -> Any:
            if isinstance(one, list):
                return [home(array) for array in one]
            return None if one is None else _on_query_device(operands.query, back(one))

        return Gradients(*map(home, found))

    def _checked(self, result: Any, operands: Operands) -> tuple[Array, Array | None]:
        """Return the result of the kernel, or raise if it breaks the contract."""
        if not isinstance(result, tuple) or len(result) != 2:
            raise TypeError(
                f"the kernel {self.kernel.name} must return (output, logsumexp); it returned"
                f" a {type(result).__name__}"
            )
        if result[1] is None and "logsumexp" in self.placement.problem.features:
            raise TypeError(f"the kernel {self.kernel.name} declares logsumexp and returned None")
        if not self.tried and self._is_handed_in and operands.value is not None:
            problem = self.placement.problem
            rows, accumulator = problem.scores[:-1], problem.accumulator
            dtype = accumulator if "jvp" in problem.features else problem.dtype
            query = operands.query
            self._check_array("output", result[0], query, dtype, (*rows, problem.value_size))
            if result[1] is not None:
                self._check_array("logsumexp", result[1], query, accumulator, rows)
        return result

    @property
    def _is_handed_in(self) -> bool:
        """Whether the kernel is the caller's own, whose results nobody has tested."""
        return self.kernel not in self.placement.kernels and not is_compiling()

    def _check_gradients(self, found: Gradients, operands: Operands) -> None:
        problem, query = self.placement.problem, operands.query
        for name in GRADIENT_ARRAYS:
            argument, gradient = getattr(operands, name), getattr(found, name)
            if argument is not None and not (gradient is None and name in problem.constants):
                what, shape = f"gradient of {name}", facts_of(argument).shape
                self._check_array(what, gradient, query, problem.accumulator, shape)

    def _check_array(
        self, what: str, array: Any, query: Array, dtype: str, shape: tuple[int | None, ...]
    ) -> None:
        """Raise if a result of the kernel is not an array of the query's library, like this."""
        library = library_of(query).name
        got = "None" if array is None else f"a {type(array).__name__}"
        if is_array(array):
            facts = facts_of(array)
            fits = None in (*shape, *facts.shape) or facts.shape == shape
            if fits and (facts.library, facts.dtype) == (library, dtype):
                return
            got = f"an array of {facts.library}, {facts}"
        raise TypeError(
            f"the kernel {self.kernel.name} must return its {what} as an array of {library},"
            f" {shape} {dtype}; it returned {got}"
        )

    def _move(self, operands: Operands, backend: Backend) -> Operands:
        device, dtype = self.placement.problem.device, self.placement.problem.dtype
        converted: dict[str, Any] = {}
        for name in self.placement.moved:
            operand = getattr(operands, name)
            if name == "seed" and backend_of(operand) is not backend:
                converted[name] = int(operand)  # not every library has integers of 64 bits
            elif not isinstance(operand, Expression):
                if name == "query_offset":
                    operand = _clip_to_int32(operand, self.placement.problem)
                converted[name] = _mover(backend_of(operand), backend, device, dtype)(operand)
        for name in OPTIONS.keys() & set(operands._fields):
            operand = getattr(operands, name)
            if isinstance(operand, Expression):
                converted[name] = operand.map(lambda _, leaf: self._move_one(leaf, operands))
            elif callable(operand):
                converted[name] = self._move_one(operand, operands)
        return operands._replace(**converted)

    def _move_one(self, leaf: Any, operands: Operands) -> Any:
        """Move an array to the backend, or wrap a function so that it can be called there."""
        backend, problem = self.placement.backend, self.placement.problem
        assert backend is not None
        if is_array(leaf):
            return _mover(backend_of(leaf), backend, problem.device, problem.dtype)(leaf)
        if "query" not in self.placement.moved:
            return leaf
        back = _mover(backend, backend_of(operands.query), self.home, problem.dtype)
        return _wrap_callback(leaf, back, backend, problem)


def _recorder(operands: Operands) -> Recorder | None:
    """Return the recorder of the operands, if one of them is an array that has one."""
    if not recorders:
        return None
    things: list[Any] = list(operands)
    for value in operands:
        if isinstance(value, Expression):
            things += [thing for _, thing in value.carried()]
    return next((recorders[type(thing)] for thing in things if type(thing) in recorders), None)


def _clip_to_int32(offset: Array, problem: Problem) -> Array:
    """Clip query offsets to 32 bits, unless a window is so wide that this changes a result."""
    facts = facts_of(offset)
    is_wide = any(end is not None and end > _INT32_MAX // 2 for end in problem.window)
    if is_wide or facts.dtype not in ("int64", "uint64", "uint32"):
        return offset
    least = 0 if facts.dtype.startswith("u") else -_INT32_MAX
    return library_of(offset).xp.clip(offset, least, _INT32_MAX)


def _wrap_callback(
    function: Callable[..., Any], back: _Move, backend: Backend, problem: Problem
) -> Callable[..., Any]:
    """Wrap a callback: convert its inputs to the caller's library and its result back."""

    def wrapped(*indices: Array) -> Any:
        result = function(*map(back, indices))
        if isinstance(result, bool):
            return result
        facts = facts_of(result, "the result of the function")
        source = backend_of(result)
        lost = conversion_loss("the result of the function", facts, problem.transforms)
        if lost is not None and source is not backend:
            raise UnsupportedError(lost)
        return _mover(source, backend, problem.device, problem.dtype)(result)

    return wrapped


def _on_query_device(query: Array, result: Array) -> Array:
    """Return the result on the query's device, if the library has devices."""
    if str(getattr(result, "device", "")) == str(getattr(query, "device", "")):
        return result
    return result.to_device(query.device) if hasattr(result, "to_device") else result


def _mover(source: Backend, target: Backend, device: str, dtype: str) -> _Move:
    """Return a function that moves an array of `source` to `device` of `target`.

    An array of `dtype`, which is that of the call, or of bools must keep it.
    """
    through_numpy = source is not target and "numpy" in (_root(source), _root(target))

    def move(array: Array) -> Array:
        placed = target.place(source.fetch(array) if through_numpy else array, device or None)
        before, after = facts_of(array).dtype, facts_of(placed).dtype
        if before != after and before in (dtype, "bool"):
            raise UnsupportedError(
                f"{_root(target)} makes {after} of {before}: cast the arrays to {after} first, or"
                " name another backend. The plugin should say in lacks() that it has no"
                f" {before}"
            )
        return placed

    return move


def convert_like(array: Array, like: Array) -> Array:
    """Convert `array` to the library and device of `like`."""
    source, target = backend_of(array), backend_of(like)
    values = array if source is target else source.fetch(array)
    return target.place(values, facts_of(like).device or None)


def _root(backend: Backend) -> str:
    return str(backend.xp.__name__.removeprefix("array_api_compat."))


def backend_of(array: Array) -> Backend:
    """Return the backend that converts arrays of this library."""
    for name in registry.serving(library_of(array).name):
        if registry.load(name) is None:
            return registry.loaded(name)
    return registry.array_api_backend(array)


def conversion_loss(name: str, facts: ArrayFacts, transforms: frozenset[str]) -> str | None:
    """Return the reason against converting an array to another library, or None."""
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
