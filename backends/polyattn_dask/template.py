"""The options of a call without its arrays, from which a task makes those of a part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from polyattn.plugin import (
    Array,
    Expression,
    Operands,
    Part,
    Problem,
    map_arrays,
    options_of,
    options_of_part,
)
from polyattn_dask.grid import Axes, Grid, aligned, axes_along, axes_of


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
    given : dict
        The options of the whole call, by name.
    whole_rows : bool
        Whether a part needs all the keys of its rows at once.
    """

    given: dict[str, Any]
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
        found = {
            name: map_arrays(value, lambda _, hole: next(rest))
            for name, value in self.given.items()
        }
        offset: Any = found.get("query_offset")
        if getattr(offset, "shape", ()):  # with the axes of the scores, as a kernel gets it
            found["query_offset"] = offset.reshape(offset.shape[:-3])
        return options_of_part(found, part)


def template_of(problem: Problem, x: Operands, grid: Grid) -> tuple[Template, list[Leaf]]:
    """Return the template of a call, and its arrays."""
    leaves: list[Leaf] = []

    def hole(option: str, last: str | None, array: Any) -> Any:
        axes = (
            axes_of(option, array.shape, problem)
            if last is None
            else axes_along(last, array.shape, problem)
        )
        leaves.append(Leaf(option, axes, aligned(array, axes, grid)))
        return Hole(tuple(array.shape), str(array.dtype))

    given: dict[str, Any] = {}
    for name, value in options_of(problem, x).items():
        whole = value.apart() if isinstance(value, Expression) else value
        given[name] = map_arrays(whole, partial(hole, name))
    return Template(given, reads_whole_rows(problem)), leaves


def reads_whole_rows(problem: Problem) -> bool:
    """Return whether a part needs all the keys of its rows at once."""
    return problem.normalizer is not None or problem.score_norm is not None
