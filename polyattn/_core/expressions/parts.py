"""A part of the scores, whose batch items, heads, rows and keys count from its own first ones.

`Expression.part` returns an expression that shows in the part what the whole expression shows
there: its arrays are sliced along the axes of the scores that they follow, and the rest counts from
the part's first row and key.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from polyattn._base.arrays import Array, is_array, library_of
from polyattn._base.slices import Slice, place, take
from polyattn._core.expressions.indices import INDEX_LIMIT, saturating_sum


def axes_of_last(axes: str, rank: int, batch: int) -> tuple[int | str | None, ...]:
    """Return the axis of the scores that each axis of an array of this rank follows.

    `axes` says what its last ones follow: ``"H"``, ``"L"`` or ``"S"``, and ``"-"`` for an axis of
    its own; after a dot if some of the `batch` axes may come before them. The result has the number
    of a batch axis, a letter, or None for an axis of its own.
    """
    letters = [None if letter == "-" else letter for letter in axes.lstrip(".")]
    every: list[int | str | None] = [*range(batch), *letters]
    return tuple(every[len(every) - rank :])


class Part(NamedTuple):
    """Some batch items, heads, rows and keys of the scores; JAX may trace starts, not of items."""

    batch: tuple[int, ...]  #: the batch axes of the whole
    items: tuple[Slice, ...]  #: one for each batch axis
    heads: Slice  #: query heads
    rows: Slice  #: query rows
    columns: Slice  #: keys
    #: The position of the first row of the whole, which counts where a start is traced.
    offset: Any = 0

    @property
    def offset_shift(self) -> Any:
        """The number that is added to the query offset of the whole."""
        return self.rows.start - self.columns.start

    @property
    def flat_items(self) -> list[int]:
        """The flat batch items of the whole, in the order of the part."""
        ranges = (range(span.start, span.stop) for span in self.items)
        return [self._flat(places) for places in itertools.product(*ranges)]

    @property
    def first(self) -> tuple[Any, Any, Any, Any]:
        """The first flat batch item, head, row and key."""
        item = self._flat([span.start for span in self.items])
        return item, self.heads.start, self.rows.start, self.columns.start

    def _flat(self, places: Any) -> int:
        flat = 0
        for at, length in zip(places, self.batch, strict=True):
            flat = flat * length + at
        return flat

    @property
    def _has_all_items(self) -> bool:
        return tuple([span.length for span in self.items]) == self.batch

    def item(self, b: Any) -> Any:
        """Return the flat batch items of the whole, from those of the part."""
        if self._has_all_items:
            return b
        flat: Any = 0
        stride = 1
        for length, span in zip(reversed(self.batch), reversed(self.items), strict=True):
            flat = flat + (b % span.length + span.start) * stride
            b, stride = b // span.length, stride * length
        return flat

    def _slices(self, axes: str, rank: int) -> Iterator[tuple[int, Slice]]:
        """Yield the axes of an array that follow an axis of the scores, and their slices."""
        slices: dict[Any, Slice] = dict(enumerate(self.items))
        slices |= {"H": self.heads, "L": self.rows, "S": self.columns}
        for n, axis in enumerate(axes_of_last(axes, rank, len(self.batch))):
            if axis is not None:
                yield n, slices[axis]

    def array(self, array: Array, axes: str) -> Array:
        """Return the entries of an array; one that is cut already stays as it is.

        `axes` are those of the scores that its last axes follow, as for `axes_of_last`.
        """
        for axis, (start, length) in self._slices(axes, len(array.shape)):
            if array.shape[axis] != 1:
                array = take(array, axis, start, length)
        return array

    def padded(self, gradient: Array, whole: Array, axes: str) -> Array:
        """Return the gradient of a whole array, padded with 0: the transpose of `array`."""
        for axis, (start, _) in self._slices(axes, len(gradient.shape)):
            gradient = place(gradient, axis, start, whole.shape[axis])
        return gradient

    def counted(self, numbers: Any, first: Any) -> Any:
        """Return positions in the part, from one in the whole or an array of the batch items.

        `first` is the position of the part, which JAX may trace.
        """
        if is_array(numbers):
            numbers = self.array(numbers, ".")
        if numbers is None or _is_zero(first):
            return numbers
        if isinstance(numbers, int) and isinstance(first, int):
            return numbers - first
        # JAX may have no int64. Other libraries keep far positions exact: a window may reach them.
        library = library_of(first if isinstance(numbers, int) else numbers)
        is_narrow = library.name == "jax" and "64" not in str(getattr(numbers, "dtype", ""))
        dtype = library.xp.int32 if is_narrow else library.xp.int64
        limit = INDEX_LIMIT if is_narrow else 2**61
        shift = -first if isinstance(first, int) else 0
        shifted = saturating_sum(numbers, shift, library.xp, dtype, limit)
        return shifted if isinstance(first, int) else shifted - first

    def shifted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function of (b, h, i, j) or (score, b, h, i, j) that counts from the part."""
        begins = all(map(_is_zero, self.first))
        return function if begins and self._has_all_items else _ShiftedFunction(function, self)


class _ShiftedFunction:
    """A function of the indices of a part; a class, so that it can be pickled."""

    def __init__(self, function: Callable[..., Any], part: Part) -> None:
        self._function, self._part = function, part

    def __call__(self, *given: Any) -> Any:
        *scores, b, h, i, j = given
        part = self._part
        shifted = [
            index if _is_zero(first) else index + first
            for index, first in zip((h, i, j), part.first[1:], strict=True)
        ]
        return self._function(*scores, part.item(b), *shifted)


def _is_zero(start: Any) -> bool:
    return isinstance(start, int) and start == 0
