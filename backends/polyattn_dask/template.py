"""The options of a call without its arrays, from which a task makes those of a part."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from polyattn.plugin import Array, Expression, Operands, Part, Problem
from polyattn_dask.grid import Axes, Grid, aligned, axes_of

__all__ = ["Leaf", "Template", "template_of"]

#: The operands beside query, key and value: each a number, a function, an array, or an expression.
OPTIONS = ("mask", "bias", "query_offset", "score_mod", "sinks", "similarity", "seed")


class Hole(NamedTuple):
    """The place of an array in an expression."""

    shape: tuple[int, ...]
    dtype: str


class Leaf(NamedTuple):
    """An array among the options, cut as the grid is."""

    option: str
    axes: Axes
    array: Any


@dataclass(frozen=True)
class Template:
    """The options of a call, with holes for arrays.

    Attributes
    ----------
    plain : dict
        The options that are the same for each part.
    held : dict
        The others, by name.
    rate : float
        The rate of dropout.
    start : tuple of int
        Where the hash of dropout begins for the whole call.
    whole_rows : bool
        Whether a part needs all the keys of its rows at once.
    """

    plain: dict[str, Any]
    held: dict[str, Any]
    rate: float
    start: tuple[int, int, int, int]
    whole_rows: bool

    def options(self, part: Part, arrays: Sequence[Array]) -> dict[str, Any]:
        """Return the options of a part, whose arrays are given in the order of the leaves.

        Parameters
        ----------
        part : Part
            The part.
        arrays : sequence of Array
            A block of each leaf.
        """
        rest = iter(arrays)
        found = {name: _filled(value, part, rest) for name, value in self.held.items()}
        found = {name: value for name, value in found.items() if value is not None}
        seed, offset = found.pop("seed", None), found.get("query_offset")
        if seed is not None:
            start = tuple([a + b for a, b in zip(self.start, part.first, strict=True)])
            found["dropout"] = self.rate, seed, start
        if offset is not None:
            shape = getattr(offset, "shape", ())
            offset = offset.reshape(shape[:-3]) if shape else offset
            found["query_offset"] = part.counted(offset, -part.away)
        return self.plain | found


def _filled(value: Any, part: Part, rest: Iterator[Array]) -> Any:
    if isinstance(value, Hole):
        return next(rest)
    if isinstance(value, Expression):
        full = value.map(lambda _, thing: next(rest) if isinstance(thing, Hole) else thing)
        return full.part(part)
    return part.moved(value) if callable(value) else value


def template_of(problem: Problem, x: Operands, grid: Grid) -> tuple[Template, list[Leaf]]:
    """Return the template of a call, and its arrays."""
    leaves: list[Leaf] = []

    def hole(option: str, field: str, array: Any) -> Any:
        if callable(array):
            return array
        axes = axes_of(f"{option}.{field}" if field else option, array.shape, problem)
        leaves.append(Leaf(option, axes, aligned(array, axes, grid)))
        return Hole(tuple(array.shape), str(array.dtype))

    held: dict[str, Any] = {}
    for name in OPTIONS:
        value = getattr(x, name)
        if name == "query_offset" and problem.query_offset is not None:
            value = problem.query_offset
        if isinstance(value, Expression):
            value = value.apart().map(partial(hole, name))
        elif hasattr(value, "shape"):
            value = hole(name, "", value)
        held[name] = value
    plain = {
        "is_causal": problem.is_causal,
        "window": problem.window,
        "scale": problem.scale if problem.score_norm is None else problem.score_norm,
        "softcap": problem.softcap,
        "normalizer": problem.normalizer,
    }
    plain = {name: value for name, value in plain.items() if value is not None}
    whole_rows = problem.normalizer is not None or problem.score_norm is not None
    assert problem.dropout_start is not None, "the kernel refuses a start in an array"
    template = Template(plain, held, problem.dropout, problem.dropout_start, whole_rows)
    return template, leaves
