"""A part of the scores, whose batch items, heads, rows and keys count from its own first ones.

An expression becomes that of a part in two steps: its arrays are cut, by the axes of the scores
that they follow (`axes_of_array`), and what remains is counted anew (`Expression.part`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

from polyattn._base.arrays import library_of
from polyattn._base.span import Span
from polyattn._core.expressions.indices import saturating_sum

# The axes of the array in each field of an expression, the last ones: L, S and H of the scores, and
# "-" for an axis of its own. A dot says that batch axes may come before them.
_AXES = {
    "array": ".HLS",
    "key_ids": ".S",
    "key_lengths": ".",
    "lengths": ".",
    "query_ids": ".L",
    "query_lengths": ".",
    "slopes": "H",
    "table": "-H",
    "weight": "-",
}


def axes_of_array(field: str, rank: int, batch: int) -> tuple[int | str | None, ...]:
    """Return the axis of the scores that each axis of an array follows.

    Parameters
    ----------
    field : str
        The field of the expression that holds it, or ``"array"`` for a mask or a bias.
    rank : int
        The number of its axes.
    batch : int
        The number of batch axes of the scores.

    Returns
    -------
    tuple of (int, str or None)
        The number of a batch axis; ``"H"``, ``"L"`` or ``"S"``; None for an axis of its own.
    """
    return axes_of_last(_AXES[field], rank, batch)


def axes_of_last(axes: str, rank: int, batch: int) -> tuple[int | str | None, ...]:
    """Return the axis of the scores that each axis of an array follows.

    Parameters
    ----------
    axes : str
        The axes that its last ones follow: ``"H"``, ``"L"`` or ``"S"``, and ``"-"`` for an axis of
        its own; after a dot if batch axes may come before them.
    rank : int
        The number of its axes.
    batch : int
        The number of batch axes of the scores.

    Returns
    -------
    tuple of (int, str or None)
        As from `axes_of_array`.
    """
    letters = [None if letter == "-" else letter for letter in axes.lstrip(".")]
    every: list[int | str | None] = [*range(batch), *letters]
    return tuple(every[len(every) - rank :])


class Part(NamedTuple):
    """Some batch items, heads, rows and keys of the scores.

    Attributes
    ----------
    batch : tuple of int
        The batch axes of the whole.
    items : tuple of Span
        Those of the part, one span for each batch axis.
    heads, rows, columns : Span
        The query heads, query rows and keys.
    """

    batch: tuple[int, ...]
    items: tuple[Span, ...]
    heads: Span
    rows: Span
    columns: Span

    @property
    def away(self) -> int:
        """What the query offset of the whole grows by."""
        return self.rows.start - self.columns.start

    @property
    def flat_items(self) -> list[int]:
        """The flat batch items of the whole, in the order of the part."""
        return [
            self._flat(places) for places in itertools.product(*(range(*s) for s in self.items))
        ]

    @property
    def first(self) -> tuple[int, int, int, int]:
        """The first flat batch item, head, row and key."""
        item = self._flat([span.start for span in self.items])
        return item, self.heads.start, self.rows.start, self.columns.start

    def _flat(self, places: Any) -> int:
        flat = 0
        for place, length in zip(places, self.batch, strict=True):
            flat = flat * length + place
        return flat

    def item(self, b: Any) -> Any:
        """Return the flat batch items of the whole, from those of the part.

        Parameters
        ----------
        b : Array
            Flat batch items of the part.

        Returns
        -------
        Array
            Those of the whole.
        """
        found: Any = 0
        stride = 1
        for length, span in zip(reversed(self.batch), reversed(self.items), strict=True):
            found = found + (b % span.length + span.start) * stride
            b, stride = b // span.length, stride * length
        return found if self.batch else b

    def counted(self, numbers: Any, first: int) -> Any:
        """Return an integer, or an array of them, less `first`.

        Parameters
        ----------
        numbers : int, Array or None
            Positions in the whole, in an integer dtype.
        first : int
            The position of the part.

        Returns
        -------
        int, Array or None
            Positions in the part.
        """
        if first == 0 or numbers is None:
            return numbers
        if isinstance(numbers, int):
            return numbers - first
        xp = library_of(numbers).xp
        return saturating_sum(numbers, -first, xp, xp.int64)

    def array(self, array: Any, axes: str) -> Any:
        """Return an array as it is: those of such a part are cut already.

        Parameters
        ----------
        array : Array
            Entries of the part.
        axes : str
            The axes of the scores that its last axes follow.

        Returns
        -------
        Array
            The same.
        """
        return array

    def expression(self, value: Any) -> Any:
        """Return an expression, whose arrays are cut, counted from the first row and key.

        Parameters
        ----------
        value : Expression
            The expression.

        Returns
        -------
        Expression
            One of the same meaning in the part.
        """
        return value.part(self)

    def shifted(self, offset: Any) -> Any:
        """Return the query offset of the part, from that of the whole.

        Parameters
        ----------
        offset : int or Array
            The position of the first row of the whole.

        Returns
        -------
        int or Array
            That of the first row of the part.
        """
        return self.counted(offset, -self.away)

    def after(self, start: Any) -> Any:
        """Return what the part begins with in the hash of dropout.

        Parameters
        ----------
        start : tuple of int
            The batch item, head, row and key that the whole begins with.

        Returns
        -------
        tuple of int
            Those of the part.
        """
        return tuple([a + b for a, b in zip(start, self.first, strict=True)])

    def moved(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function of the indices of the part, from one of the indices of the whole.

        Parameters
        ----------
        function : callable
            A function of (b, h, i, j), or of (score, b, h, i, j).

        Returns
        -------
        callable
            The function itself if the part is the whole.
        """
        whole = all(s == Span(0, n) for s, n in zip(self.items, self.batch, strict=True))
        return function if whole and not any(self.first) else _Moved(function, self)


class _Moved:
    """A function of the indices of a part; a class, so that it can be pickled."""

    def __init__(self, function: Callable[..., Any], part: Part) -> None:
        self._function, self._part = function, part

    def __call__(self, *given: Any) -> Any:
        *scores, b, h, i, j = given
        part = self._part
        return self._function(
            *scores,
            part.item(b),
            h + part.heads.start,
            i + part.rows.start,
            j + part.columns.start,
        )
