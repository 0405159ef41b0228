"""The indices of a tile, and the parts of masks, scores and bias for it.

Index arrays broadcast to (..., H, l, s), have all of its axes, and live where the query lives. They
are made on demand: most calls need none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

from polyattn._base.arrays import (
    Array,
    ArrayFacts,
    as_count,
    as_index,
    broadcast_shapes,
    cast,
    index_range,
    length_of,
    with_rank,
)
from polyattn._base.scatter import marked
from polyattn._base.span import Span
from polyattn._core.call.operands import Operands
from polyattn._core.call.problem import Problem
from polyattn._core.expressions.indices import (
    INDEX_LIMIT,
    call_mask,
    call_score_mod,
    facts_of_result,
    found_in_lists,
    reduced,
    saturating_sum,
)
from polyattn._core.expressions.masks import Mask
from polyattn._core.expressions.scores import Score, as_score
from polyattn._core.tiles.axes import cut_items
from polyattn._core.tiles.band import visible_band
from polyattn._core.tiles.dropout import (
    WORDS,
    keep_mask_by_key,
    keep_mask_by_word,
    keep_mask_of_keys,
)


class Indices:
    """The indices (b, h, i, j) of one tile of scores, and the keys that are visible in it.

    `items`, counted flat over all batch axes, and `heads` are for a kernel that takes some at a
    time. A tile of some items has one batch axis.
    """

    #: Number of keys that dropout decides about at once; the first is a multiple of it.
    decided: ClassVar[int] = WORDS
    differentiate: Callable[..., Array] | None = None

    def __init__(
        self,
        problem: Problem,
        xp: Any,
        x: Operands,
        rows: Span,
        columns: Span,
        *,
        items: Span | None = None,
        heads: Span | None = None,
    ) -> None:
        self._problem, self.xp, self._x = problem, xp, x
        self._rows, self._columns = rows, columns
        self._batch = problem.batch if items is None else (items.length,)
        self._some_heads = heads is not None
        self._items = items
        self._heads = heads or Span(0, problem.heads)
        self._rank = len(self._batch) + 3

    @classmethod
    def of_tile(cls, problem: Problem, xp: Any, x: Operands, rows: Span, columns: Span) -> Indices:
        """Return the indices of a tile, or those that the operands bring along."""
        return cls(problem, xp, x, rows, columns) if x.indices is None else x.indices

    def _range(self, start: int, stop: Any, *shape: int) -> Array:
        numbers, lead = index_range(self.xp, start, stop, self._x.query), self._rank - len(shape)
        return self.xp.reshape(numbers, (1,) * lead + shape)

    def _along(self, span: Span, array: Array, *shape: int) -> Array:
        """Return the numbers of a span, which an axis of the array has at least."""
        stop = length_of(array, -2) if span.stop is None else span.stop
        return self._range(span.start, stop, *shape)

    @property
    def batch(self) -> Array:
        """The flat index over all batch axes, shape (..., 1, 1, 1)."""
        if None in self._batch:
            return self._range(0, length_of(self._x.query, -4), -1, 1, 1, 1)
        items = self._items or Span(0, math.prod(self._batch))
        return self._range(*items, *self._batch, 1, 1, 1)

    @property
    def head(self) -> Array:
        """The query head, shape (..., H, 1, 1)."""
        return self._range(*self._heads, self._heads.length, 1, 1)

    @property
    def row(self) -> Array:
        """The query row, shape (..., 1, l, 1)."""
        return self._along(self._rows, self._x.query, -1, 1)

    @property
    def column(self) -> Array:
        """The key, shape (..., 1, 1, s)."""
        return self._along(self._columns, self._x.key, 1, -1)

    # ---- the tile's part of an array ----

    def cut(self, array: Array) -> Array:
        """Return the tile's rows and keys of a mask or bias, a view (..., H, l, s)."""
        rows, columns = self._rows, self._columns
        if len(array.shape) >= 1 and array.shape[-1] != 1:
            array = array[..., columns.start : columns.stop]
        if len(array.shape) >= 2 and array.shape[-2] != 1:
            array = array[..., rows.start : rows.stop, :]
        return array

    def of_scores(self, array: Array) -> Array:
        """Return what `cut` returns, only for the items and heads of the tile."""
        array = self.cut(array)
        if self._some_heads and len(array.shape) > 2 and array.shape[-3] != 1:
            array = array[..., slice(*self._heads), :, :]
        return self._of_items(array)

    def of_bias(self, bias: Array) -> Array:
        """Return the bias of the tile."""
        return self.of_scores(bias)

    def _of_items(self, array: Array) -> Array:
        """Cut (..., H, l, s) down to the tile's batch items."""
        items = self._items
        array = array if items is None else cut_items(array, self._problem.batch, items)
        return with_rank(array, self._rank)

    def per_item(self, numbers: Any) -> Any:
        """Return the number of each batch item, shape (..., 1, 1, 1), or the number for all."""
        if isinstance(numbers, int):
            return min(numbers, INDEX_LIMIT)
        return self._of_items(as_count(self.xp, numbers)[..., None, None, None])

    def per_head(self, numbers: Array) -> Array:
        """Return the number of each query head, shape (..., H, 1, 1)."""
        numbers = self.xp.reshape(numbers, (1,) * (self._rank - 3) + (-1, 1, 1))
        return numbers[..., slice(*self._heads), :, :]

    def per_row(self, numbers: Array) -> Array:
        """Return the number of each row from an array (..., L), shape (..., 1, l, 1)."""
        numbers = as_index(self.xp, self.cut(numbers[..., None]))
        return self._of_items(numbers[..., None, :, :])

    def per_key(self, numbers: Array) -> Array:
        """Return the number of each key from an array (..., S), shape (..., 1, 1, s)."""
        numbers = as_index(self.xp, self.cut(numbers[..., None, :]))
        return self._of_items(numbers[..., None, :, :])

    def looked_up(self, table: Array, *indices: Any) -> Array:
        """Return the entries of a table at arrays of indices, one for each of its axes."""
        flat: Any = 0
        for index, length in zip(indices, table.shape, strict=True):
            flat = flat * length + index
        taken = self.xp.take(self.xp.reshape(table, (-1,)), self.xp.reshape(flat, (-1,)), axis=0)
        return self.xp.reshape(taken, flat.dynamic_shape if None in flat.shape else flat.shape)

    def is_listed(self, lists: Array, places: tuple[Any, ...], number: Array, size: int) -> Array:
        """Return whether the block of `size` of each key is in the list of a row.

        The keys are numbered from any first one on. They are marked, where the library can.
        """
        xp, many = self.xp, number.shape[-1]
        if 0 in self._problem.scores:  # the lists may have no items, or there is no first key
            return number < 0
        if many is None or None in self._problem.scores:
            return found_in_lists(self, lists, places, number // size)
        block = number // size
        first = block[..., :1]
        of_rows = self.looked_up(
            lists, *places, with_rank(index_range(xp, 0, lists.shape[-1], lists), self._rank)
        )
        # The first and the last block may be cut.
        marks = marked(of_rows - first, many if size == 1 else (many - 1) // size + 2)
        if marks is None:
            return found_in_lists(self, lists, places, block)
        return marks if size == 1 else xp.take(marks, xp.reshape(block - first, (-1,)), axis=-1)

    # ---- positions of the rows among the keys ----

    def position(self, shift: int = 0) -> Array:
        """Return the positions of the rows among the keys, plus `shift`: (..., 1, l, 1)."""
        row = self.row
        return row + saturating_sum(self._offset(), shift, self.xp, row.dtype)

    def relative_position(self, modulus: int | None = None) -> Array:
        """Return key minus position of the row, (..., H, l, s), or its remainder by a modulus."""
        if modulus is None:
            return self.column - self.position()
        shift, modulus = reduced(self._offset(), modulus, self.xp, self.row.dtype)
        return (self.column - self.row - shift) % modulus

    def _offset(self) -> Any:
        offset = self._problem.query_offset
        return self._of_items(self._x.query_offset) if offset is None else offset

    @property
    def dropout_start(self) -> Any:
        """The numbers of the first batch item, head, row and key in the hash of dropout."""
        given = self._problem.dropout_start
        return as_index(self.xp, self._x.dropout_start) if given is None else given

    def keep_mask(self) -> Array:
        """Return which weights dropout keeps, shape (..., H, l, s)."""
        first = self.dropout_start[3]
        if self._columns.stop is None:
            return keep_mask_by_key(self.keep_mask_by_word, self.column + first)
        start, length = self._columns.start + first, self._columns.length
        return keep_mask_of_keys(self.xp, self.keep_mask_by_word, start, length, self.row)

    def keep_mask_by_word(self, blocks: Array) -> tuple[Array, ...]:
        """Return which weights dropout keeps in blocks of `decided` keys, by index in the block.

        The numbers of the blocks, (n,), count from the first key of the hash. Each mask is (..., H,
        l, n).
        """
        item, head, row, _ = self.dropout_start
        at = self.batch + item, self.head + head, self.row + row, with_rank(blocks, self._rank)
        return keep_mask_by_word(self.xp, self._x.seed, self._problem.dropout, *at)

    def visible(self, *, banded: bool = True) -> Iterator[Array]:
        """Yield masks that broadcast to (..., H, l, s); a key takes part where all of them hold.

        Causal and window are among them if they are `banded`.
        """
        mask = self._x.mask
        if mask is not None:
            if isinstance(mask, Mask):
                yield mask.seen(self)
            else:
                yield self.by_rule(mask) if callable(mask) else self.of_scores(mask)
        shown = visible_band(self._problem) if banded else None
        if shown is not None:
            yield shown.seen(self)

    def modified(self, scores: Array) -> Array:
        """Return scores after ``score_mod=``, in their dtype, with axes for H, l and s."""
        rule = self._x.score_mod
        if rule is None:
            return scores
        if isinstance(rule, Score):
            return rule.apply(scores, self)
        return self.by_score_mod(rule, scores)

    def score_pullback(
        self, scores: Array, gradient: Array, differentiate: Callable[..., Array]
    ) -> tuple[Array, list[Array]]:
        """Return the gradients of the scores before ``score_mod=``, and of the arrays in it.

        `gradient` is that of the scores after it; ``differentiate`` is the backend's `pullback`.
        """
        if self._x.score_mod is None:
            return gradient, []
        self.differentiate = differentiate
        return as_score(self._x.score_mod).pullback(scores, self, gradient)

    def by_score_mod(self, rule: Callable[..., Array], scores: Array) -> Array:
        """Call a function of (score, b, h, i, j) with the tile's scores.

        The result has their dtype, and axes for H, l and s.
        """
        result, facts = call_score_mod(rule, self, scores, self._check)
        if len(facts.shape) < len(scores.shape) or facts.shape[-3:] != scores.shape[-3:]:
            if self._problem.is_symbolic:
                # broadcast_to would need the lengths.
                zeros = 0 * (self.batch + self.head + self.row + self.column)
                result = result + cast(self.xp, zeros, result.dtype)
            else:
                whole = broadcast_shapes(facts.shape, scores.shape)
                result = self.xp.broadcast_to(result, whole)
        return cast(self.xp, result, scores.dtype)

    def by_rule(self, rule: Callable[..., Array]) -> Array:
        """Call a function of (b, h, i, j); the result broadcasts to (..., H, l, s)."""
        return with_rank(call_mask(rule, self, self._check), self._rank)

    def _check(self, name: str, result: Array) -> ArrayFacts:
        facts = facts_of_result(name, result)
        if facts.library != self._problem.library:
            raise TypeError(
                f"{name} was called with arrays of {self._problem.library} and must return one; it"
                f" returned one of {facts.library}"
            )
        tile = (*self._batch, self._heads.length, self._rows.length, self._columns.length)
        shape = facts.shape
        if self._problem.is_symbolic and len(shape) <= len(tile):
            # A graph may have lost lengths that are known.
            last = tile[len(tile) - len(shape) :]
            shape = tuple(n if own is None else own for own, n in zip(shape, last, strict=True))
        if len(shape) > len(tile) or broadcast_shapes(shape, tile) != tile:
            raise ValueError(
                f"the result of {name} must broadcast to {tile}, the shape that its index arrays"
                f" broadcast to; it returned {facts.shape}"
            )
        return facts
