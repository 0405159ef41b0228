"""The order in which tasks add to sums that they share.

A sum of floating-point numbers depends on their order, so tasks add in the order in which threads
take them, whatever the number of threads. A task waits just before it adds some keys, and only
until the tasks before it have done these keys. All of those have begun, so one of them never
waits, and threads that work on one head follow each other from tile to tile.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Iterable, Sequence

from polyattn.plugin import Span
from polyattn_numpy.tiling import ThreadTask

# Seconds between two looks at what a task waits for: little beside the work on a tile.
PAUSE = 5e-5


class Sequencer:
    """Makes tasks add to shared sums in a fixed order."""

    # Threads use plain lists without a lock: no interrupt can leave them locked.

    def __init__(
        self,
        cut: Sequence[ThreadTask],
        by_key: Iterable[Iterable[Hashable]],
        by_row: Iterable[Iterable[Hashable]],
        check: Callable[[], None],
    ) -> None:
        """Take the names of the sums to which each task adds by tile, and at its end."""
        self.cut, self.check = cut, check
        # The first key that each task may still add.
        self.reached = [-math.inf] * len(cut)
        self.by_key, self.by_row = _groups(by_key), _groups(by_row)


class Ticket:
    """The place of a task in the order; all tasks before it must have begun."""

    def __init__(self, order: Sequencer, number: int) -> None:
        self._order, self._number = order, number
        self._by_key, self._by_row = (
            [
                other
                for group in groups[number]
                for other in group
                if other < number and order.reached[other] < math.inf
            ]
            for groups in (order.by_key, order.by_row)
        )

    def wait_for_keys(self, columns: Span) -> None:
        """Wait until the earlier tasks have added these keys to the sums that they share."""
        for other in self._by_key:
            own = self._order.cut[other].columns
            if own.start < columns.stop and columns.start < own.stop:
                self._wait_for(other, columns.stop)

    def wait_for_rows(self) -> None:
        """Wait until the earlier tasks that share a sum by row have ended."""
        for other in self._by_row:
            self._wait_for(other, math.inf)

    def reach(self, column: float) -> None:
        """Say that the task will add no key before one; infinity means that it ends."""
        self._order.reached[self._number] = column

    def _wait_for(self, other: int, column: float) -> None:
        while self._order.reached[other] < column:
            self._order.check()
            time.sleep(PAUSE)


def _groups(names: Iterable[Iterable[Hashable]]) -> list[list[list[int]]]:
    """Return for each task the groups that share a sum, each as the numbers of its tasks."""
    named = [list(one) for one in names]
    groups: dict[Hashable, list[int]] = {}
    for number, own in enumerate(named):
        for name in own:
            groups.setdefault(name, []).append(number)
    return [[groups[name] for name in own if len(groups[name]) > 1] for own in named]
