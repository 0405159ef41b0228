"""The sums of gradients over tiles, and over the axes that were broadcast."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from polyattn.arguments import Shape
from polyattn.arrays import Array, cast, is_array, with_rank
from polyattn.call.gradients import Gradients
from polyattn.call.operands import Operands
from polyattn.call.problem import Problem
from polyattn.span import Span

__all__ = ["Sums", "sum_to"]


def sum_to(xp: Any, array: Array, shape: Shape) -> Array:
    """Sum an array over the axes along which one of this shape was broadcast to it."""
    extra = len(array.shape) - len(shape)
    if extra:
        array = xp.sum(array, axis=tuple(range(extra)))
    axes = tuple(n for n, size in enumerate(shape) if size == 1 and array.shape[n] != 1)
    return xp.sum(array, axis=axes, keepdims=True) if axes else array


class Sums:
    """The gradients of a call so far, by blocks of rows and keys.

    Parameters
    ----------
    problem, x : Problem, Operands
        As a kernel is given them.
    xp : module
        The standard's namespace of the library.
    tile_size : tuple of int
        The rows and keys of a tile.
    """

    def __init__(self, problem: Problem, x: Operands, xp: Any, tile_size: tuple[int, int]) -> None:
        self._problem, self._x, self._xp = problem, x, xp
        self._dtype = getattr(xp, problem.accumulator)
        self._tile_size = tile_size
        self._query: list[Array] = []
        self._rows: Array = None
        self._key: dict[int, Array] = {}
        self._value: dict[int, Array] = {}
        self._bias: dict[tuple[int, int], Array] = {}
        self._sinks: Array = None
        self._score: list[Array] = []
        self._similarity: list[Array] = []
        self._scale: Array = None
        self._softcap: Array = None

    def wants(self, name: str) -> bool:
        """Return whether the gradient of query, key, value, bias or sinks is asked for."""
        return getattr(self._x, name) is not None and name not in self._problem.constants

    def add_query(self, gradient: Array, rows: Span) -> None:
        """Add to the gradient of a block of the query, without the scale."""
        shape = (*self._x.query.shape[:-2], rows.length, gradient.shape[-1])
        self._rows = _plus(self._rows, sum_to(self._xp, gradient, shape))

    def end_rows(self, rows: Span) -> None:
        """Finish a block of rows."""
        query = self._x.query[..., rows.start : rows.stop, :]
        if self._rows is None:
            self._rows = self._xp.zeros_like(query, dtype=self._dtype)
        elif self._x.similarity is None:
            xp, found = self._xp, self._rows
            # A row that sees no key may hold NaN.
            product = xp.where(found == 0, found, found * cast(xp, query, self._dtype))
            self.add_scale(xp.sum(product))
        self._query.append(self._rows)
        self._rows = None

    def add_key(self, gradient: Array, columns: Span) -> None:
        """Add to the gradient of a block of the key."""
        self._add_columns(self._key, self._x.key, gradient, columns)

    def add_value(self, gradient: Array, columns: Span) -> None:
        """Add to the gradient of a block of the value."""
        self._add_columns(self._value, self._x.value, gradient, columns)

    def _add_columns(
        self, blocks: dict[int, Array], like: Array, gradient: Array, columns: Span
    ) -> None:
        shape = (*like.shape[:-2], columns.length, like.shape[-1])
        found = sum_to(self._xp, gradient, shape)
        blocks[columns.start] = _plus(blocks.get(columns.start), found)

    def add_bias(self, gradient: Array, rows: Span, columns: Span) -> None:
        """Add the gradient of a tile of scores to that of the bias."""
        bias: Any = self._x.bias
        if not self.wants("bias"):
            return
        at, shape = (0, 0), list(bias.shape)
        if shape and shape[-1] != 1:
            at, shape[-1] = (0, columns.start), columns.length
        if len(shape) > 1 and shape[-2] != 1:
            at, shape[-2] = (rows.start, at[1]), rows.length
        self._bias[at] = _plus(self._bias.get(at), sum_to(self._xp, gradient, tuple(shape)))

    def add_sinks(self, logsumexp: Array, delta: Array) -> None:
        """Add what rows give to the gradient of the sinks."""
        if not self.wants("sinks"):
            return
        shape = (self._problem.heads, 1, 1)
        sinks = self._xp.reshape(cast(self._xp, self._x.sinks, delta.dtype), shape)
        sinks = with_rank(sinks, len(delta.shape))
        found = sum_to(self._xp, -self._xp.exp(sinks - logsumexp) * delta, shape)
        self._sinks = _plus(self._sinks, self._xp.reshape(found, (-1,)))

    def add_score(self, gradients: Sequence[Array]) -> None:
        """Add to the gradients of the arrays in a score expression."""
        self._score = _plus_all(self._score, gradients)

    def add_similarity(self, gradients: Sequence[Array]) -> None:
        """Add to the gradients of the arrays in a similarity."""
        self._similarity = _plus_all(self._similarity, gradients)

    def add_scale(self, gradient: Array) -> None:
        """Add to the gradient of the scale."""
        self._scale = _plus(self._scale, gradient)

    def add_softcap(self, gradient: Array) -> None:
        """Add to the gradient of the softcap."""
        self._softcap = _plus(self._softcap, gradient)

    def total(self) -> Gradients:
        """Return all of them, in the accumulator's dtype."""
        problem, x, xp = self._problem, self._x, self._xp
        query = xp.concat(self._query, axis=-2) if self._query else self._zeros(x.query)
        zero = xp.sum(self._zeros(x.query))
        return Gradients(
            query * problem.scale if x.similarity is None else query,
            self._joined(self._key, x.key),
            self._joined(self._value, x.value),
            self._joined_bias() if self.wants("bias") else None,
            self._or_zeros(self._sinks, x.sinks) if self.wants("sinks") else None,
            self._of_arrays(self._score, x.score_mod),
            self._of_arrays(self._similarity, x.similarity),
            zero if self._scale is None else self._scale,
            None if problem.softcap is None else _plus(self._softcap, zero),
        )

    def _zeros(self, like: Array) -> Array:
        return self._xp.zeros_like(like, dtype=self._dtype)

    def _or_zeros(self, found: Array | None, like: Array) -> Array:
        return self._zeros(like) if found is None else found

    def _joined(self, blocks: dict[int, Array], like: Array) -> Array:
        parts = [
            self._or_zeros(blocks.get(columns.start), like[..., columns.start : columns.stop, :])
            for columns in Span(0, self._problem.key_length).split(self._tile_size[1])
        ]
        return self._xp.concat(parts, axis=-2) if parts else self._zeros(like)

    def _joined_bias(self) -> Array:
        xp, bias = self._xp, self._x.bias
        assert bias is not None
        if not self._bias:
            return self._zeros(bias)
        down, across = (
            list(Span(0, length).split(size))
            if len(bias.shape) >= 2 - axis and bias.shape[axis - 2] != 1
            else None
            for axis, length, size in zip(
                (0, 1), self._problem.scores[-2:], self._tile_size, strict=True
            )
        )
        lines = []
        for rows in down or [Span(0, 0)]:
            part = bias if down is None else bias[..., rows.start : rows.stop, :]
            tiles = []
            for columns in across or [Span(0, 0)]:
                tile = part if across is None else part[..., columns.start : columns.stop]
                tiles.append(self._or_zeros(self._bias.get((rows.start, columns.start)), tile))
            lines.append(tiles[0] if across is None else xp.concat(tiles, axis=-1))
        return lines[0] if down is None else xp.concat(lines, axis=-2)

    def _of_arrays(self, found: list[Array], expression: Any) -> list[Array]:
        """Return the sums for the arrays of an expression, in order."""
        if expression is None or not hasattr(expression, "carried"):
            return []
        arrays = [thing for _, thing in expression.carried() if is_array(thing)]
        return found or [self._zeros(array) for array in arrays]


def _plus(one: Array | None, other: Array) -> Array:
    return other if one is None else one + other


def _plus_all(one: Sequence[Array], other: Sequence[Array]) -> list[Array]:
    return [a + b for a, b in zip(one, other, strict=True)] if one else list(other)
