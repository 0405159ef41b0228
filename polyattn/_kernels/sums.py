"""The sums of gradients over tiles, and over the axes that were broadcast."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from polyattn._base.arrays import Array, cast, is_array, sum_to
from polyattn._base.span import Span
from polyattn._core.call.gradients import Gradients
from polyattn._core.call.operands import Operands
from polyattn._core.call.options import GRADIENT_ARRAYS
from polyattn._core.call.problem import Problem
from polyattn._core.expressions.expression import Expression

#: The axes of an operand along the rows and along the keys of the scores.
AXES = {"query": (-2, None), "key": (None, -2), "value": (None, -2), "bias": (-2, -1)}


class GradientSums:
    """The gradients of a call so far, each by the first row and the first key of its tiles."""

    def __init__(self, problem: Problem, x: Operands, xp: Any, tile_size: tuple[int, int]) -> None:
        self._problem, self._x, self._xp = problem, x, xp
        self._tile_size = tile_size
        self._sums: dict[tuple[str, int, int], Array] = {}

    def wants(self, name: str) -> bool:
        """Return whether the gradient of query, key, value, bias or sinks is asked for."""
        return getattr(self._x, name, None) is not None and name not in self._problem.constants

    def add(self, name: str, gradient: Array, rows: Span, columns: Span) -> None:
        """Accumulate a tile's share of the gradient of an operand, or of a number."""
        shape, first = list(getattr(self._x, name).shape) if hasattr(self._x, name) else [], [0, 0]
        if list(gradient.shape) == shape:  # this and that in `_joined`: 0.9 of a small call's time
            self._add((name, 0, 0), gradient)
            return
        for n, (axis, span) in enumerate(zip(self._axes(name), (rows, columns), strict=True)):
            if axis is not None:
                first[n], shape[axis] = span.start, span.length
        self._add((name, first[0], first[1]), sum_to(self._xp, gradient, tuple(shape)))

    def add_carried(self, name: str, gradients: Sequence[Array]) -> None:
        """Accumulate a tile's share of the gradients of the arrays in an expression."""
        for n, gradient in enumerate(gradients):
            self._add((name, n, 0), gradient)

    def _add(self, key: tuple[str, int, int], gradient: Array) -> None:
        before = self._sums.get(key)
        self._sums[key] = gradient if before is None else before + gradient

    def total(self) -> Gradients:
        """Return all of them, in the accumulator's dtype."""
        problem, x, xp = self._problem, self._x, self._xp
        query = self._joined("query")
        if x.similarity is None:  # so far, the gradient of scale · query
            # A row that sees no key may hold NaN.
            product = xp.where(query == 0, query, query * cast(xp, x.query, query.dtype))
            self._add(("scale", 0, 0), xp.sum(product))
            query = query * problem.scale
        return Gradients(
            query=query,
            key=self._joined("key"),
            value=self._joined("value"),
            **{name: self._joined(name) for name in GRADIENT_ARRAYS[3:] if self.wants(name)},
            score_mod=self._carried(x.score_mod, "score_mod"),
            similarity=self._carried(x.similarity, "similarity"),
            scale=self._number("scale"),
            softcap=None if problem.softcap is None else self._number("softcap"),
        )

    def _axes(self, name: str) -> list[int | None]:
        """Return the axes of an operand that tiles cut, None for one that it lacks."""
        axes = AXES.get(name, (None, None))
        shape = getattr(self._x, name).shape if name in AXES else ()
        return [a if a is not None and len(shape) >= -a and shape[a] != 1 else None for a in axes]

    def _joined(self, name: str) -> Array:
        """Return the gradient of an operand, from those of its parts."""
        array, first = getattr(self._x, name), self._sums.get((name, 0, 0))
        if first is not None and first.shape == array.shape:
            return first
        return self._join(name, array, ())

    def _join(self, name: str, array: Array, first: tuple[int, ...]) -> Array:
        """Return the gradient of the part of an operand whose first row and key are given."""
        if len(first) == 2:
            total = self._sums.get((name, *first))
            return self._zeros(array) if total is None else total
        axis, size = self._axes(name)[len(first)], self._tile_size[len(first)]
        if axis is None:
            return self._join(name, array, (*first, 0))
        rest = (slice(None),) * (-1 - axis)
        parts = [
            self._join(name, array[(..., slice(*span), *rest)], (*first, span.start))
            for span in Span(0, array.shape[axis]).split(size)
        ]
        return self._xp.concat(parts, axis=axis) if parts else self._zeros(array)

    def _number(self, name: str) -> Array:
        total = self._sums.get((name, 0, 0))
        return self._xp.sum(self._zeros(self._x.query[..., :0, :])) if total is None else total

    def _zeros(self, like: Array) -> Array:
        return self._xp.zeros_like(like, dtype=getattr(self._xp, self._problem.accumulator))

    def _carried(self, expression: Any, name: str) -> list[Array]:
        """Return the gradients of the arrays in an expression, in order."""
        if not isinstance(expression, Expression):
            return []
        arrays = [thing for _, thing in expression.carried() if is_array(thing)]
        return [self._join(name, array, (n, 0)) for n, array in enumerate(arrays)]
