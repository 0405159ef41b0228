"""The indices of a tile, and what of mask, bias and band falls on it.

Index arrays broadcast to (..., H, l, s) and live where the query lives. They are made when they are
first asked for: most calls need none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from polyattn.arrays import Array, ArrayFacts, broadcast_shapes, cast, facts_of, index_range
from polyattn.masks import Span, in_band
from polyattn.problem import Operands, Problem

__all__ = ["Indices"]


class Indices:
    """The (b, h, i, j) of one tile of scores, and what is visible in it.

    Parameters
    ----------
    problem : Problem
        The facts of the call.
    xp : module
        The standard's namespace of the library.
    like : Array
        An array on the device where the indices are wanted.
    rows, columns : Span
        The query rows and the keys of the tile.
    items, heads : Span, optional
        The batch items, counted flat over all batch axes, and the query heads of the tile, for a
        kernel that takes some at a time. Such a tile has one batch axis.
    """

    def __init__(
        self,
        problem: Problem,
        xp: Any,
        like: Array,
        rows: Span,
        columns: Span,
        *,
        items: Span | None = None,
        heads: Span | None = None,
    ) -> None:
        self._problem, self._xp, self._like = problem, xp, like
        self._rows, self._columns = rows, columns
        self._batch = problem.batch if items is None else (items.length,)
        self._items = items or Span(0, math.prod(problem.batch))
        self._heads = heads or Span(0, problem.heads)

    def _range(self, start: int, stop: int, *shape: int) -> Array:
        return self._xp.reshape(index_range(self._xp, start, stop, self._like), shape)

    @property
    def batch(self) -> Array:
        """The flat index over all batch axes, shape (..., 1, 1, 1)."""
        return self._range(*self._items, *self._batch, 1, 1, 1)

    @property
    def head(self) -> Array:
        """The query head, shape (H, 1, 1)."""
        return self._range(*self._heads, self._heads.length, 1, 1)

    @property
    def row(self) -> Array:
        """The query row, shape (l, 1)."""
        return self._range(*self._rows, self._rows.length, 1)

    @property
    def column(self) -> Array:
        """The key, shape (1, s)."""
        return self._range(*self._columns, 1, self._columns.length)

    def cut(self, array: Array) -> Array:
        """Cut out of an array what falls on the tile.

        Parameters
        ----------
        array : Array
            A mask or bias, which broadcasts to (..., H, L, S).

        Returns
        -------
        Array
            A view of it, which broadcasts to (..., H, l, s).
        """
        rows, columns = self._rows, self._columns
        if len(array.shape) >= 1 and array.shape[-1] != 1:
            array = array[..., columns.start : columns.stop]
        if len(array.shape) >= 2 and array.shape[-2] != 1:
            array = array[..., rows.start : rows.stop, :]
        return array

    def visible(self, x: Operands, *, banded: bool) -> Iterator[Array]:
        """Say by arrays which keys take part.

        Parameters
        ----------
        x : Operands
            The arrays of the call.
        banded : bool
            Whether causal and window may hide a key of this tile.

        Yields
        ------
        Array of bool
            Broadcasts to (..., H, l, s); a key takes part where all of them hold.
        """
        if callable(x.mask):
            yield self.from_rule(x.mask)
        elif x.mask is not None:
            yield self.cut(x.mask)
        if banded and self._problem.masks_by_position:
            rows, offset = self.row, None
            if self._problem.query_offset is None:
                offset = cast(self._xp, x.query_offset, rows.dtype)
            seen = in_band(self._problem, rows, self.column, offset)
            if seen is not None:
                yield seen

    def modified(self, rule: Callable[..., Array], scores: Array) -> Array:
        """Call a score function.

        Parameters
        ----------
        rule : callable
            A function of (score, b, h, i, j).
        scores : Array
            The scores of the tile, which broadcast to (..., H, l, s).

        Returns
        -------
        Array
            What it returns, in the scores' dtype, with axes for H, l and s.
        """
        result = rule(scores, self.batch, self.head, self.row, self.column)
        facts = self._check("score_mod", result)
        if facts.dtype == "bool" or "complex" in facts.dtype:
            raise TypeError(f"score_mod must return real numbers; it returned dtype {facts.dtype}")
        if len(facts.shape) < len(scores.shape) or facts.shape[-3:] != scores.shape[-3:]:
            whole = broadcast_shapes(facts.shape, scores.shape)
            result = self._xp.broadcast_to(result, whole)
        return cast(self._xp, result, scores.dtype)

    def from_rule(self, rule: Callable[..., Array]) -> Array:
        """Call a mask function.

        Parameters
        ----------
        rule : callable
            A function of (b, h, i, j).

        Returns
        -------
        Array of bool
            What it returns, which broadcasts to (..., H, l, s).
        """
        seen = rule(self.batch, self.head, self.row, self.column)
        if isinstance(seen, bool):
            return self._xp.full_like(self.column, seen, dtype=self._xp.bool)
        facts = self._check("the mask function", seen)
        if facts.dtype != "bool":
            raise TypeError(
                "the mask function must return a bool array, True where a key takes part; it"
                f" returned dtype {facts.dtype}"
            )
        return seen

    def _check(self, name: str, result: Array) -> ArrayFacts:
        facts = facts_of(result, f"what {name} returned")
        if facts.library != self._problem.library:
            raise TypeError(
                f"{name} was called with arrays of {self._problem.library} and must return one; it"
                f" returned one of {facts.library}"
            )
        tile = (*self._batch, self._heads.length, self._rows.length, self._columns.length)
        if len(facts.shape) > len(tile) or broadcast_shapes(facts.shape, tile) != tile:
            raise ValueError(
                f"what {name} returns must broadcast to {tile}, the shape that its index arrays"
                f" broadcast to; it returned {facts.shape}"
            )
        return facts
