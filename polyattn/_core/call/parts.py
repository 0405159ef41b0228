"""The options of a call as its kernel knows them, and those of a part of its scores."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from polyattn._base.arrays import Array, is_array
from polyattn._core.call.operands import Operands
from polyattn._core.call.options import OPTIONS, Option, option_of
from polyattn._core.call.problem import Problem
from polyattn._core.expressions.expression import Expression


class PartOfScores(Protocol):
    """Some batch items, heads, rows and keys of a call, which count from its own first ones."""

    def array(self, array: Array, axes: str) -> Array:
        """Return the entries of an array whose last axes follow these axes of the scores."""

    def expression(self, value: Expression) -> Any:
        """Return an expression with the same meaning in the part."""

    def moved(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function of the indices of the part, from one of the indices of the whole."""

    def shifted(self, offset: Any) -> Any:
        """Return the query offset of the part, from that of the whole."""

    def after(self, start: Any) -> Any:
        """Return what the part begins with in the hash of dropout, from that of the whole."""


def options_of(problem: Problem, operands: Operands) -> dict[str, Any]:
    """Return the options of `attention`, other than their defaults, that give a call."""
    found = {
        name: getattr(operands if name in Operands._fields else problem, name) for name in OPTIONS
    }
    found["scale"] = problem.scale if problem.score_norm is None else problem.score_norm
    if problem.query_offset is not None:
        found["query_offset"] = problem.query_offset
    start = problem.dropout_start
    start = operands.dropout_start if start is None else start
    found["dropout"] = (problem.dropout, operands.seed, start) if problem.dropout else None
    return {name: value for name, value in found.items() if value is not OPTIONS[name].default}


def options_of_part(given: Mapping[str, Any], part: PartOfScores) -> dict[str, Any]:
    """Return the options of a part of a call, from those of the whole.

    Raises TypeError for an option that the table of options does not describe.
    """
    return {name: _of_part(option_of(name), value, part) for name, value in given.items()}


def _of_part(option: Option, value: Any, part: PartOfScores) -> Any:
    if option.name == "query_offset":
        return part.shifted(value)
    if option.name == "dropout":
        rate, seed, start = value
        return rate, seed, part.after(start)
    if isinstance(value, Expression):
        return part.expression(value)
    if is_array(value):
        if option.axes is None:
            raise TypeError(f"{option.name} cannot be cut: it has no axes in the table of options")
        return part.array(value, option.axes)
    return part.moved(value) if callable(value) else value


def map_arrays(value: Any, change: Callable[[str, Array], Any]) -> Any:
    """Return the value of an option with each of its arrays replaced.

    `change` takes the name of the field of an expression, or ``""``, and the array.
    """
    if is_array(value):
        return change("", value)
    if isinstance(value, Expression):
        return value.map(lambda field, thing: change(field, thing) if is_array(thing) else thing)
    return tuple([map_arrays(one, change) for one in value]) if type(value) is tuple else value


def arrays_in(value: Any) -> list[Array]:
    """Return the arrays that `map_arrays` finds."""
    found: list[Array] = []
    map_arrays(value, lambda _, array: found.append(array))
    return found
