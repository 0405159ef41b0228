"""A range of rows or keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple


class Span(NamedTuple):
    """Some rows or keys: a range that torch.compile can trace.

    Attributes
    ----------
    start, stop : int
        The first one, and the one after the last: None for the end of a length that is unknown.
    """

    start: int
    stop: int

    @property
    def length(self) -> int:
        """The number of rows or keys."""
        return self.stop if self.stop is None else self.stop - self.start

    def split(self, size: int) -> Iterator[Span]:
        """Cut the span into parts.

        Parameters
        ----------
        size : int
            The largest length of a part.

        Yields
        ------
        Span
            The parts in order; all but the last have that size.
        """
        for first in range(self.start, self.stop, size):
            yield Span(first, min(first + size, self.stop))
