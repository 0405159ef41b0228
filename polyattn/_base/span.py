"""A range of rows or keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple


class Span(NamedTuple):
    """Some rows or keys: a range that torch.compile can trace."""

    start: int
    stop: int  #: after the last; None for the end of a length that is unknown

    @property
    def length(self) -> int:
        """The number of rows or keys."""
        return self.stop if self.stop is None else self.stop - self.start

    def split(self, size: int) -> Iterator[Span]:
        """Yield the parts in order; all but the last have that size."""
        for first in range(self.start, self.stop, size):
            yield Span(first, min(first + size, self.stop))
