"""The messages that a strategy sends among the ranks of one call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from polyattn._base.arrays import Array, library_of, numbers_like


class Communicator:
    """The ranks of one call, seen from one of them.

    A communicator for another engine defines `rank`, `size`, `shift`, `wait`, `gather` and
    `exchange`. All ranks make the same calls in the same order, with arrays of one shape and dtype.
    A state is nested tuples, lists and dicts of arrays.

    Attributes
    ----------
    rank : int or Array
        The number of this rank. An array where one program runs on all ranks, as in JAX.
    size : int
        The number of ranks.
    """

    rank: Any
    size: int

    def shift(self, arrays: Sequence[Array], by: int = 1) -> Any:
        """Begin to send arrays `by` ranks onwards in a circle, and to receive those sent here.

        They must not change before `wait`, which takes what this returns.
        """
        raise NotImplementedError

    def wait(self, handle: Any) -> Sequence[Array]:
        """Return the arrays that a `shift` receives, from what it returned."""
        raise NotImplementedError

    def gather(self, array: Array, axis: int) -> Array:
        """Return the arrays of all ranks, concatenated along an axis in their order."""
        raise NotImplementedError

    def exchange(self, array: Array, split: int, concat: int) -> Array:
        """Give each rank one part of an array, and concatenate the parts received.

        The array is cut along the axis `split` into as many parts as there are ranks, and the parts
        are concatenated along the axis `concat`.
        """
        raise NotImplementedError

    def gather_bytes(self, message: bytes, like: Array) -> list[bytes]:
        """Return the messages of all ranks, of one length, in their order.

        `like` is an array that the ranks could gather.
        """
        xp = library_of(like).xp
        numbers = numbers_like(xp, list(message), xp.uint8, like)
        gathered = bytes(self.gather(numbers, 0).tolist())
        return [gathered[n : n + len(message)] for n in range(0, len(gathered), len(message))]

    def stack(self, array: Array) -> Array:
        """Return the arrays of all n ranks along a new first axis, shape (n, ...)."""
        return self.gather(array[None, ...], 0)

    def scatter_sum(self, array: Array, axis: int) -> Array:
        """Return this rank's part of the sum of the arrays of all ranks.

        The sum is cut along an axis, counted from the last, −1, into as many parts as there are
        ranks.
        """
        parts = self.exchange(array[None, ...], axis, 0)
        return library_of(parts).xp.sum(parts, axis=0)

    def repeat(self, count: int, step: Callable[[Any, Any], Any], state: Any) -> Any:
        """Return the state after steps 0 to count − 1, each ``step(number, state)``."""
        for number in range(count):
            state = step(number, state)
        return state

    def when(self, condition: Any, change: Callable[[Any], Any], state: Any) -> Any:
        """Return the changed state if a condition holds on this rank, or the state as it is.

        The condition is a bool or an array of one. The change keeps the structure of the state and
        communicates nothing.
        """
        return change(state) if condition else state
