"""The messages that a strategy sends among the ranks of one call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from polyattn._base.arrays import Array, library_of, numbers_like


class Communicator:
    """The ranks of one call, seen from one of them.

    A communicator for another engine defines `rank`, `size`, `shift`, `wait`, `gather` and
    `exchange`. All ranks make the same calls in the same order.

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
        """Begin to send arrays `by` ranks onwards, and to receive those sent here.

        Parameters
        ----------
        arrays : sequence of Array
            The same number, shapes and dtypes on every rank. They must not change before `wait`.
        by : int
            The distance between sender and receiver; ranks are in a circle.

        Returns
        -------
        object
            What `wait` takes.
        """
        raise NotImplementedError

    def wait(self, handle: Any) -> Sequence[Array]:
        """Return the arrays that a `shift` receives.

        Parameters
        ----------
        handle : object
            The result of `shift`.

        Returns
        -------
        sequence of Array
        """
        raise NotImplementedError

    def gather(self, array: Array, axis: int) -> Array:
        """Return the arrays of all ranks, concatenated in their order.

        Parameters
        ----------
        array : Array
            Of one shape on every rank.
        axis : int
            The axis to concatenate along.

        Returns
        -------
        Array
            The arrays, concatenated.
        """
        raise NotImplementedError

    def exchange(self, array: Array, split: int, concat: int) -> Array:
        """Give each rank one part of an array, and concatenate the parts received.

        Parameters
        ----------
        array : Array
            Of one shape on every rank.
        split : int
            The axis to cut into as many parts as there are ranks.
        concat : int
            The axis to concatenate along.

        Returns
        -------
        Array
            The parts received, concatenated.
        """
        raise NotImplementedError

    def gather_bytes(self, message: bytes, like: Array) -> list[bytes]:
        """Return the messages of all ranks, in their order.

        Parameters
        ----------
        message : bytes
            Of one length on every rank.
        like : Array
            An array that the ranks could gather.

        Returns
        -------
        list of bytes
        """
        xp = library_of(like).xp
        numbers = numbers_like(xp, list(message), xp.uint8, like)
        found = bytes(self.gather(numbers, 0).tolist())
        return [found[n : n + len(message)] for n in range(0, len(found), len(message))]

    def stack(self, array: Array) -> Array:
        """Return the arrays of all ranks along a new first axis.

        Parameters
        ----------
        array : Array
            Of one shape on every rank.

        Returns
        -------
        Array
            The arrays, shape (n, ...) for n ranks.
        """
        return self.gather(array[None, ...], 0)

    def scatter_sum(self, array: Array, axis: int) -> Array:
        """Return this rank's part of the sum of the arrays of all ranks.

        Parameters
        ----------
        array : Array
            Of one shape on every rank.
        axis : int
            The axis to cut into as many parts as there are ranks, counted from the last, −1.

        Returns
        -------
        Array
            This rank's part.
        """
        parts = self.exchange(array[None, ...], axis, 0)
        return library_of(parts).xp.sum(parts, axis=0)

    def repeat(self, count: int, step: Callable[[Any, Any], Any], state: Any) -> Any:
        """Return the state after steps 0 to count − 1.

        Parameters
        ----------
        count : int
            The number of steps.
        step : callable
            Takes the number of the step and the state, and returns the state.
        state : object
            Nested tuples, lists and dicts of arrays.

        Returns
        -------
        object
            The last state.
        """
        for number in range(count):
            state = step(number, state)
        return state

    def when(self, condition: Any, change: Callable[[Any], Any], state: Any) -> Any:
        """Return the changed state if a condition holds on this rank, or the state as it is.

        Parameters
        ----------
        condition : bool or Array
            Whether to change it.
        change : callable
            Takes the state and returns one of the same structure, without communication.
        state : object
            Nested tuples, lists and dicts of arrays.

        Returns
        -------
        object
            The state.
        """
        return change(state) if condition else state
