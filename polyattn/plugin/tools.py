"""Methods of a backend that only the benchmark, the listing and the layers use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from polyattn._base.arrays import Array


class BackendTools:
    """The optional part of a backend, which no call of attention needs."""

    def hardware(self, device: str) -> dict[str, str | int]:
        """Describe a device.

        Parameters
        ----------
        device : str
            One of `devices`.

        Returns
        -------
        dict
            The known facts: ``name``; ``memory``, in bytes; ``compute_capability``.
        """
        return {}

    def engines(self) -> dict[str, str]:
        """List the engines that the kernels call, such as cuDNN.

        Returns
        -------
        dict of str to str
            The versions of the available engines, by name.
        """
        return {}

    def synchronize(self, device: str | None = None) -> None:
        """Wait until all work on a device is done.

        Parameters
        ----------
        device : str or None
            One of `devices`, or None for the default.
        """

    def compile(self, function: Callable[..., Array]) -> Callable[..., Array]:
        """Return a function in the form that users of the library would call: compiled, if usual.

        `polyattn bench` times the result.

        Parameters
        ----------
        function : callable
            Takes arrays of this library and returns one.

        Returns
        -------
        callable
            The function itself, or a compiled form of it.
        """
        return function

    def peak_memory(
        self, device: str | None, function: Callable[..., Array], *arrays: Array
    ) -> int | None:
        """Return the peak memory that a call needs on a device, beside its arrays and result.

        Parameters
        ----------
        device : str or None
            One of `devices`, or None for the default.
        function : callable
            A result of `compile`, already called with these arrays.
        *arrays : Array
            Its arguments.

        Returns
        -------
        int or None
            Bytes, or None if the library does not count them. For the CPU, the operating system is
            asked instead.
        """
        return None

    def reshape_last(self, array: Array, number: int, lengths: tuple[int, ...]) -> Array:
        """Reshape the last axes of an array, whose others may be of unknown length.

        Parameters
        ----------
        array : Array
            The array.
        number : int
            How many axes are replaced.
        lengths : tuple of int
            The lengths of the axes in their place.

        Returns
        -------
        Array
            The same numbers.
        """
        raise NotImplementedError("this library has no arrays of unknown length")

    def rows(self, table: Array, ids: Array) -> Array:
        """Return rows of a table, at ids whose shape may be unknown.

        Parameters
        ----------
        table : Array
            The table, shape (n, size).
        ids : Array of int
            The ids, shape (...).

        Returns
        -------
        Array
            Shape (..., size).
        """
        raise NotImplementedError("this library has no arrays of unknown length")

    def with_rows(self, memory: Array, rows: Array, at: Array) -> Array | None:
        """Return the memory of a cache with rows in place of those from a number on.

        Parameters
        ----------
        memory : Array
            Shape (..., capacity, size).
        rows : Array
            The new rows, shape (..., n, size).
        at : Array of int
            The number of the first that is replaced, shape (); known only where it is computed.

        Returns
        -------
        Array or None
            A new array, or None if the library has no operation for this.
        """
        return None

    def each(self, work: Callable[[Any], None], items: Sequence[Any]) -> None:
        """Call a function on every item, in any order, on as many threads as attention uses.

        Parameters
        ----------
        work : callable
            A function of one item.
        items : sequence
            The items.
        """
        for item in items:
            work(item)
