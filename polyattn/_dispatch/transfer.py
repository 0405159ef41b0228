"""Move arrays to the chosen backend, and results back."""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import Any

from polyattn._base.arrays import Array, ArrayFacts, cast, clip, facts_of, is_array, library_of
from polyattn._base.host import as_array
from polyattn._core.call.operands import Operands, mapped
from polyattn._core.call.options import OPTIONS
from polyattn._core.call.problem import Problem
from polyattn._core.expressions.expression import Expression
from polyattn._dispatch import registry
from polyattn._dispatch.errors import UnsupportedError
from polyattn.plugin import Backend

# A library may have no integers above 32 bits.
_INT32_MAX = 2**31 - 1
# The libraries whose arrays go to others, and come from them, as arrays of NumPy.
_THROUGH_NUMPY = frozenset(("numpy", "dask.array", "ndonnx"))

_Move = Callable[[Array], Array]


def move_operands(
    operands: Operands, names: Set[str], target: Backend, problem: Problem, query_device: str
) -> Operands:
    """Return the operands, with those of these names moved to the device of the problem."""
    converted: dict[str, Any] = {}
    for name in names & set(operands._fields):
        operand = getattr(operands, name)
        if operand is None:  # a table of pages whose keys were gathered
            continue
        if name == "seed" and backend_of(operand) is not target:
            converted[name] = int(operand)  # not every library has integers of 64 bits
        elif not isinstance(operand, Expression):
            if name == "query_offset":
                operand = _clip_to_int32(operand, problem)
            converted[name] = _mover(backend_of(operand), target, problem)(operand)

    def move_leaf(leaf: Any) -> Any:
        """Move an array, or wrap a function so that it can be called there."""
        if is_array(leaf):
            return _mover(backend_of(leaf), target, problem)(leaf)
        if "query" not in names:
            return leaf
        back = _mover(target, backend_of(operands.query), problem, query_device)
        return _wrap_callback(leaf, back, target, problem)

    for name in OPTIONS.keys() & set(operands._fields):
        operand = getattr(operands, name)
        if isinstance(operand, Expression):
            converted[name] = operand.map(lambda _, leaf: move_leaf(leaf))
        elif callable(operand):
            converted[name] = move_leaf(operand)
    return operands._replace(**converted)


def move_results(given: Any, names: Set[str], target: Backend, problem: Problem) -> Any:
    """Move the arrays of a record of derivatives, or the known logsumexp of weights."""

    def move(name: str, array: Array) -> Array:
        return _mover(backend_of(array), target, problem)(array) if name in names else array

    if isinstance(given, tuple):
        return mapped(given, move)  # type: ignore[type-var]
    return None if given is None else move("known_logsumexp", given)


def mover_back(query: Array, source: Backend, problem: Problem, device: str) -> _Move:
    """Return a function that moves a result of `source` to the library and device of the query."""
    back = _mover(source, backend_of(query), problem, device)
    return lambda result: _on_query_device(query, back(result))


def _clip_to_int32(offset: Array, problem: Problem) -> Array:
    """Clip query offsets to 32 bits, unless a window is so wide that this changes a result."""
    facts = facts_of(offset)
    is_wide = any(end is not None and end > _INT32_MAX // 2 for end in problem.window)
    if is_wide or facts.dtype not in ("int64", "uint64", "uint32"):
        return offset
    least = 0 if facts.dtype.startswith("u") else -_INT32_MAX
    return clip(library_of(offset).xp, offset, least, _INT32_MAX)


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
        # As the indices are: a kernel of dask calls the function with chunks, of another library.
        return _mover(source, backend_of(indices[-1]), problem)(result)

    return wrapped


def _on_query_device(query: Array, result: Array) -> Array:
    """Return the result on the query's device, if the library has devices."""
    if str(getattr(result, "device", "")) == str(getattr(query, "device", "")):
        return result
    return result.to_device(query.device) if hasattr(result, "to_device") else result


def _mover(source: Backend, target: Backend, problem: Problem, device: str | None = None) -> _Move:
    """Return a function that moves an array of `source` to a device of `target`.

    By default it is the device of the problem. An array of the problem's dtype or of bools must
    keep it.
    """
    device = problem.device if device is None else device
    through_numpy = source is not target and not _THROUGH_NUMPY.isdisjoint(
        (_root(source), _root(target))
    )

    def move(array: Array) -> Array:
        placed = target.place(source.fetch(array) if through_numpy else array, device or None)
        before, after = facts_of(array).dtype, facts_of(placed).dtype
        if before != after and before in (problem.dtype, "bool"):
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


def as_float64(array: Array) -> Any:
    """Return an array of floats, which may require a gradient, as float64 in NumPy."""
    plain = array.detach() if hasattr(array, "detach") else array
    xp = library_of(plain).xp
    wide = plain if plain.dtype == xp.float64 else cast(xp, plain, xp.float32)
    of_numpy = as_array("an example", [0.0])
    return convert_like(wide, of_numpy).astype(of_numpy.dtype)


def _root(backend: Backend) -> str:
    return str(backend.xp.__name__.removeprefix("array_api_compat."))


def backend_of(array: Array) -> Backend:
    """Return the backend that converts arrays of this library."""
    library = library_of(array)
    return registry.first_serving(library.name) or registry.array_api_backend(library.xp)


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
