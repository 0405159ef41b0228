"""Methods of a backend that only the benchmark, the listing and the layers use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from polyattn._base.arrays import Array


class BackendTools:
    """The optional part of a backend, which no call of attention needs."""

    def hardware(self, device: str) -> dict[str, str | int]:
        """Return known facts of a device: ``name``, ``memory`` in bytes, ``compute_capability``."""
        return {}

    def engines(self) -> dict[str, str]:
        """Return the versions of available engines that kernels call, such as cuDNN, by name."""
        return {}

    def faults(self) -> tuple[str, ...]:
        """Return the known faults of the installed library that kernels avoid, each a sentence."""
        return ()

    def synchronize(self, device: str | None = None) -> None:
        """Wait until all work on a device, by default the default one, is done."""

    def compile(self, function: Callable[..., Array]) -> Callable[..., Array]:
        """Return a function in the form that users of the library would call: compiled, if usual.

        `polyattn bench` times the result.
        """
        return function

    def peak_memory(
        self, device: str | None, function: Callable[..., Array], *arrays: Array
    ) -> int | None:
        """Return the bytes that a call needs on a device at the peak, beside its arrays and result.

        The function is a result of `compile`, already called with these arrays. None if the library
        does not count bytes. For the CPU, the operating system is asked instead.
        """
        return None

    def reshape_last(self, array: Array, number: int, lengths: tuple[int, ...]) -> Array:
        """Replace the last `number` axes of an array, whose others may be of unknown length."""
        raise NotImplementedError("this library has no arrays of unknown length")

    def rows(self, table: Array, ids: Array) -> Array:
        """Return rows of a table (n, size), at ids whose shape may be unknown."""
        raise NotImplementedError("this library has no arrays of unknown length")

    def with_rows(self, memory: Array, rows: Array, at: Array) -> Array | None:
        """Return the memory of a cache with rows in place of those from a number on.

        The memory is (..., capacity, size), the rows (..., n, size), and the number is an array
        without axes, known only where it is computed. None if the library has no operation for
        this.
        """
        return None

    def each(self, work: Callable[[Any], None], items: Sequence[Any]) -> None:
        """Call a function on every item, in any order, on as many threads as attention uses."""
        for item in items:
            work(item)
