"""The indices of scores whose keys a mask names: other keys for each block of rows.

The scores have the axes (..., blocks, H, rows, named keys).
"""

from __future__ import annotations

import math
from typing import Any

from polyattn._base.arrays import Array, as_index, index_range, with_rank
from polyattn._base.slices import Slice, take
from polyattn._base.span import Span
from polyattn._core.call.operands import Operands
from polyattn._core.call.problem import Problem
from polyattn._core.expressions.indices import found_in_lists
from polyattn._core.expressions.selections import Selection, repeated
from polyattn._core.tiles.dropout import keep_mask_by_key
from polyattn._core.tiles.indices import Indices


class NamedIndices(Indices):
    """The indices (b, h, i, j) of some rows and of the keys that a selection names for them.

    JAX may trace the first row. `x.mask` is what else hides keys. `keys` are (..., blocks, H or 1,
    1, named), with 0 in place of the keys that `hidden` marks.
    """

    def __init__(
        self, problem: Problem, xp: Any, x: Operands, rows: Slice, blocks: int, selection: Selection
    ) -> None:
        self._rank_of_call = len(problem.batch) + 3
        self.keys, self.hidden = _named(selection, problem, xp, rows, blocks)
        named = Span(0, self.keys.shape[-1])
        super().__init__(problem, xp, x, Span(0, rows.length // blocks), named)
        self._batch, self._rank = (*problem.batch, blocks), self._rank_of_call + 1
        self._first, self._blocks = rows.start, blocks

    @property
    def batch(self) -> Array:
        """The flat index over all batch axes of the call, shape (..., 1, 1, 1, 1)."""
        return self._numbers_of(self._problem.batch)

    @property
    def row(self) -> Array:
        """The query row, shape (..., blocks, 1, rows, 1)."""
        rows = self._rows.length
        # The first is traced where JAX loops over tiles.
        return self._range(0, self._blocks * rows, self._blocks, 1, rows, 1) + self._first

    @property
    def column(self) -> Array:
        """The key, shape (..., blocks, H or 1, 1, named)."""
        return self.keys

    def visible(self, *, banded: bool = True) -> Any:
        """Yield masks as for other indices, first that of the keys that are named."""
        yield ~self.hidden
        yield from super().visible(banded=banded)

    # ---- entries of arrays at the keys ----

    def _of_items(self, array: Array) -> Array:
        return with_rank(array, self._rank_of_call)[..., None, :, :, :]

    def of_bias(self, bias: Array) -> Array:
        """Return a bias, which is gathered already."""
        return bias

    def of_scores(self, array: Array) -> Array:
        """Return the entries of an array that broadcasts to (..., H, L, S)."""
        table, places = self._at_scores(array)
        return self.looked_up(table, *places)

    def places(self, array: Array) -> Array:
        """Return where `of_scores` reads an array, as places of its flat form."""
        flat: Any = 0
        table, places = self._at_scores(array)
        for place, length in zip(places, table.shape, strict=True):
            flat = flat * length + place
        return flat

    def _at_scores(self, array: Array) -> tuple[Array, list[Any]]:
        *lead, heads, rows, keys = with_rank(array, self._rank_of_call).shape
        table = self.xp.reshape(array, (math.prod(lead), heads, rows, keys))
        at = [
            index if length != 1 else 0
            for index, length in ((self.head, heads), (self.row, rows), (self.column, keys))
        ]
        return table, [self._numbers_of(lead), *at]

    def _numbers_of(self, lead: Any) -> Array:
        """Return the number of each item of an array with these batch axes."""
        return self._range(0, math.prod(lead), *lead, 1, 1, 1, 1)

    def per_row(self, numbers: Array) -> Array:
        """Return the number of each row from an array (..., L), shape (..., blocks, 1, l, 1)."""
        return as_index(self.xp, self.of_scores(numbers[..., None, :, None]))

    def per_key(self, numbers: Array) -> Array:
        """Return the number of each key from an array (..., S), in the shape of `column`."""
        return as_index(self.xp, self.of_scores(numbers[..., None, None, :]))

    def is_listed(self, lists: Array, places: tuple[Any, ...], number: Array, size: int) -> Array:
        """Return whether the block of `size` of each key is in the list of a row, by a search."""
        return found_in_lists(self, lists, places, number // size)

    def keep_mask(self) -> Array:
        """Return which weights dropout keeps, shape (..., blocks, H, l, named)."""
        return keep_mask_by_key(self.keep_mask_by_word, self.column + self.dropout_start[3])

    # ---- keys and values ----

    def taken(self, array: Array, heads: int) -> Array:
        """Return keys or values (..., G, S, size) as (..., blocks, heads, named, size)."""
        at, size = self.numbers(array, heads), array.shape[-1]
        table = self.xp.reshape(array, (math.prod(array.shape[:-1]), size))
        taken = self.xp.take(table, self.xp.reshape(at, (-1,)), axis=0)
        return self.xp.reshape(taken, (*at.shape, size))

    def numbers(self, array: Array, heads: int) -> Array:
        """Return the numbers of the keys that `taken` takes, in (items · G · S)."""
        *lead, groups, keys, _ = with_rank(array, self._rank_of_call).shape
        head = self._range(0, heads, heads, 1) // max(1, heads // max(1, groups))
        items = self._numbers_of(lead)[..., 0]
        return (items * groups + head[..., 0, :, :]) * keys + self.keys[..., 0, :]


def swapped(xp: Any, array: Array, axis: int) -> Array:
    """Return an array whose axis, counted from the end, has changed places with the next one."""
    order = list(range(len(array.shape)))
    order[axis], order[axis + 1] = order[axis + 1], order[axis]
    return xp.permute_dims(array, tuple(order))


def _named(
    selection: Selection, problem: Problem, xp: Any, rows: Slice, blocks: int
) -> tuple[Array, Array]:
    """Return the keys that are named for blocks of rows, and which of them are hidden."""
    of_rows, size = selection.sizes
    first_row = 0 if selection.first_row is None else selection.first_row
    lists = with_rank(selection.lists, len(problem.batch) + 3)
    if of_rows == 1:
        lists = take(lists, -2, rows.start + first_row, rows.length)
    else:
        row = index_range(xp, 0, blocks, lists) * (rows.length // blocks) + rows.start
        number = row * 0 if of_rows is None else (row + first_row) // of_rows
        lists = xp.take(lists, number, axis=-2)
    lists = as_index(xp, swapped(xp, lists, -3))  # (..., blocks, H or 1, K)
    shape = (*lists.shape[:-1], 1, lists.shape[-1])
    hidden = xp.reshape(repeated(xp, lists), (*shape, 1))
    within = with_rank(index_range(xp, 0, size, lists), len(shape) + 1)
    keys = xp.reshape(lists, (*shape, 1)) * size + within
    keys = keys - selection.first_key
    hidden = hidden | (keys < 0) | (keys >= problem.key_length)
    keys, hidden = (xp.reshape(x, (*shape[:-1], shape[-1] * size)) for x in (keys, hidden))
    return xp.where(hidden, xp.zeros_like(keys), keys), hidden
