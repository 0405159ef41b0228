"""The options of a call as its kernel knows them, and those of a part of its scores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polyattn._base.arrays import Array, is_array, library_of
from polyattn._core.call.operands import Operands
from polyattn._core.call.options import OPTIONS, Option, option_of
from polyattn._core.call.problem import Problem
from polyattn._core.expressions.expression import Expression, split
from polyattn._core.expressions.parts import Part


def options_of(problem: Problem, operands: Operands) -> dict[str, Any]:
    """Return the options of `attention`, other than their defaults, that give a call."""
    options = {
        name: getattr(operands if name in Operands._fields else problem, name, None)
        for name in OPTIONS
    }
    options["scale"] = problem.scale if problem.score_norm is None else problem.score_norm
    if problem.query_offset is not None:
        options["query_offset"] = problem.query_offset
    start = problem.dropout_start
    start = operands.dropout_start if start is None else start
    options["dropout"] = (problem.dropout, operands.seed, start) if problem.dropout else None
    return {name: value for name, value in options.items() if value is not OPTIONS[name].default}


def options_of_part(given: Mapping[str, Any], part: Part) -> dict[str, Any]:
    """Return the options of a part of a call; TypeError for one that cannot be cut."""
    return {name: _of_part(option_of(name), value, part) for name, value in given.items()}


def _of_part(option: Option, value: Any, part: Part) -> Any:
    if option.name == "query_offset":
        return part.counted(value, -part.offset_shift)
    if option.name == "dropout":
        rate, seed, start = value
        return rate, seed, _sums(start, part.first)
    if isinstance(value, Expression):
        return value.part(part)
    if is_array(value):
        if option.axes is None:
            raise TypeError(
                f"{option.name} cannot be cut: the table of options does not give its axes"
            )
        return part.array(value, option.axes)
    return part.shifted(value) if callable(value) else value


def _sums(start: Any, first: tuple[Any, ...]) -> Any:
    """Return the sums of four numbers, as an array if one of them is."""
    sums = [a + b for a, b in zip(start, first, strict=True)]
    arrays = [number for number in sums if is_array(number)]
    if not arrays:
        return tuple(sums)
    return library_of(arrays[0]).xp.stack([number + 0 * arrays[0] for number in sums])


def arrays_in(value: Any) -> list[Array]:
    """Return the arrays in the value of an option, in order."""
    return split(value, is_array)[1]
