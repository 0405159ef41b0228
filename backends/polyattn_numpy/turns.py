"""The order in which pieces add to sums that they share.

A sum of floating-point numbers depends on their order, so pieces add in the order in which threads
take them, whatever the number of threads. A piece waits just before it adds some keys, and only
until the pieces before it have done these keys. All of those have begun, so one of them never
waits, and threads that work on one head follow each other from tile to tile.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Iterator, Sequence

from polyattn.plugin import Span
from polyattn_numpy.blocks import Piece

__all__ = ["Turns"]

# Seconds between two looks at what a piece waits for: little beside the work on a tile.
PAUSE = 5e-5


class Turns:
    """How far each piece has come, and which pieces share a sum.

    Plain lists, which threads read and write without a lock: no interrupt can leave them locked.
    """

    def __init__(
        self,
        cut: Sequence[Piece],
        sums: Sequence[Sequence[Hashable]],
        check: Callable[[], None],
    ) -> None:
        self._cut, self._check = cut, check
        # The first key that each piece may still add to.
        self._reached = [-math.inf] * len(cut)
        self._sharing: dict[Hashable, list[int]] = {}
        for number, names in enumerate(sums):
            for name in names:
                self._sharing.setdefault(name, []).append(number)
        self._unfinished = dict.fromkeys(self._sharing, 0)

    def wait(self, number: int, name: Hashable, columns: Span | None = None) -> None:
        """Return once the pieces before one have added some keys, or all, to the sum of a name."""
        for other in self._before(number, name):
            while not self._has_passed(other, columns):
                self._check()
                time.sleep(PAUSE)

    def reach(self, number: int, column: float) -> None:
        """Say that a piece will add no key before one; no key at all from infinity on."""
        self._reached[number] = column

    def _before(self, number: int, name: Hashable) -> Iterator[int]:
        """Yield the pieces before one that share a sum with it and have not finished."""
        sharing, first = self._sharing[name], self._unfinished[name]
        while self._reached[sharing[first]] == math.inf:
            first += 1
        self._unfinished[name] = first
        while sharing[first] < number:
            yield sharing[first]
            first += 1

    def _has_passed(self, other: int, columns: Span | None) -> bool:
        if columns is None:
            return self._reached[other] == math.inf
        own = self._cut[other].columns
        apart = own.stop <= columns.start or columns.stop <= own.start
        return apart or self._reached[other] >= columns.stop
