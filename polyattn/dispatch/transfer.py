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
from polyattn.call.gradients import Gradients
from polyattn.call.operands import Cotangents, Operands, Residuals, Tangents, mapped
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
        found: tuple[Array, Array | None] = self._run("run", operands)
        return found

    def run_backward(
        self, operands: Operands, residuals: Residuals, cotangents: Cotangents
    ) -> Gradients:
        """Run the kernel's backward pass, and return gradients on the query's device."""
        found: Gradients = self._run("run_backward", operands, residuals, cotangents)
        return found

    def run_jvp(
        self, operands: Operands, residuals: Residuals, tangents: Tangents
    ) -> tuple[Array, Array | None]:
        """Run the kernel's directional derivative, as `run` does."""
        found: tuple[Array, Array | None] = self._run("run_jvp", operands, residuals, tangents)
        return found

    def run_weights(
        self, operands: Operands, logsumexp: Array | None
    ) -> tuple[Array, Array | None]:
        """Run the kernel of the weights, as `run` does."""
        found: tuple[Array, Array | None] = self._run("run_weights", operands, logsumexp)
        return found

    def _run(self, method: str, operands: Operands, *others: Any) -> Any:
        """Call a method of the backend with what it is given there, and bring the result back."""
        recorder = _recorder(operands, others)
        if recorder is not None:
            return getattr(recorder, method)(self, operands, *others)
        backend, _, problem, moved = self.placement
        if backend is None:
            raise RuntimeError("a plan made from shapes only cannot run")
        given = (operands, *others)
        if moved:
            given = (
                self._move(operands, backend),
                *[self._move_all(one, backend) for one in others],
            )
        found = getattr(backend, method)(self.kernel, problem, *given)
        if method == "run_backward":
            self._check_gradients(found, given[0])
        elif method != "run_weights":
            self._check_result(found, given[0])
        if "query" not in moved:
            return found
        back = _mover(backend, backend_of(operands.query), self.home, problem.dtype)

        def home(one: Any) -> Any:
            if isinstance(one, list):
                return [home(array) for array in one]
            return None if one is None else _on_query_device(operands.query, back(one))

        return Gradients(*map(home, found)) if method == "run_backward" else tuple(map(home, found))

    def _check_result(self, result: Any, operands: Operands) -> None:
        """Raise if the result of the kernel breaks the contract."""
        if not isinstance(result, tuple) or len(result) != 2:
            raise TypeError(
                f"the kernel {self.kernel.name} must return (output, logsumexp); it returned"
                f" a {type(result).__name__}"
            )
        if result[1] is None and "logsumexp" in self.placement.problem.features:
            raise TypeError(f"the kernel {self.kernel.name} declares logsumexp and returned None")
        if not self.tried and self._is_handed_in:
            problem = self.placement.problem
            rows, accumulator = problem.scores[:-1], problem.accumulator
            dtype = accumulator if "jvp" in problem.features else problem.dtype
            query = operands.query
            self._check_array("output", result[0], query, dtype, (*rows, problem.value_size))
            if result[1] is not None:
                self._check_array("logsumexp", result[1], query, accumulator, rows)

    @property
    def _is_handed_in(self) -> bool:
        """Whether the kernel is the caller's own, whose results nobody has tested."""
        return self.kernel not in self.placement.kernels and not is_compiling()

    def _check_gradients(self, found: Any, operands: Operands) -> None:
        """Raise if the gradients of the kernel break the contract."""
        if not isinstance(found, Gradients):
            raise TypeError(
                f"backward of the kernel {self.kernel.name} must return Gradients; it returned a"
                f" {type(found).__name__}"
            )
        if self.tried or not self._is_handed_in:
            return
        problem, query = self.placement.problem, operands.query
        for name in ("query", "key", "value", "bias", "sinks"):
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
        for name in self.placement.moved.intersection(operands._fields):
            operand = getattr(operands, name)
            if name == "seed" and backend_of(operand) is not backend:
                converted[name] = int(operand)  # not every library has integers of 64 bits
            elif not isinstance(operand, Expression):
                if name == "query_offset":
                    operand = _clip_to_int32(operand, self.placement.problem)
                converted[name] = _mover(backend_of(operand), backend, device, dtype)(operand)
        for name in ("mask", "score_mod", "similarity"):
            operand = getattr(operands, name)
            if isinstance(operand, Expression):
                converted[name] = operand.map(
                    lambda _, leaf: self._move_one(leaf, operands, backend)
                )
            elif callable(operand):
                converted[name] = self._move_one(operand, operands, backend)
        return operands._replace(**converted)

    def _move_all(self, given: Any, backend: Backend) -> Any:
        """Move the arrays of a record of derivatives, or the known logsumexp of weights."""
        problem, moved = self.placement.problem, self.placement.moved

        def move(name: str, array: Array) -> Array:
            if name not in moved:
                return array
            return _mover(backend_of(array), backend, problem.device, problem.dtype)(array)

        if isinstance(given, tuple):
            return mapped(given, move)  # type: ignore[type-var]
        return None if given is None else move("known_logsumexp", given)

    def _move_one(self, leaf: Any, operands: Operands, backend: Backend) -> Any:
        """Move an array to the backend, or wrap a function so that it can be called there."""
        problem = self.placement.problem
        if is_array(leaf):
            return _mover(backend_of(leaf), backend, problem.device, problem.dtype)(leaf)
        if "query" not in self.placement.moved:
            return leaf
        back = _mover(backend, backend_of(operands.query), self.home, problem.dtype)
        return _wrap_callback(leaf, back, backend, problem)


def _recorder(operands: Operands, others: tuple[Any, ...]) -> Recorder | None:
    """Return the recorder of what a call is given, if an array has one."""
    if not recorders:
        return None
    things: list[Any] = list(operands)
    for record in others:
        things += record if isinstance(record, tuple) else [record]
    for value in (operands.mask, operands.score_mod, operands.similarity):
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
