"""Methods of a backend that only the benchmark, the listing and the layers use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from polyattn.arrays import Array

__all__ = ["BackendTools"]


class BackendTools:
    """The optional part of a backend, which no call of attention needs."""

    @property
    def tiled(self) -> Any:
        """The array-API kernel `tiled`, for what a kernel that has no derivatives leaves to it."""
        from polyattn.kernels.tiled import Tiled

        return Tiled()

    def hardware(self, device: str) -> dict[str, str | int]:
        """Describe a device.

        Parameters
        ----------
        device : str
            One of `devices`.

        Returns
        -------
        dict
            What is known of it: ``name``; ``memory``, in bytes; ``compute_capability``.
        """
        return {}

    def engines(self) -> dict[str, str]:
        """List the engines that the kernels call, such as cuDNN.

        Returns
        -------
        dict of str to str
            The versions of those that are here, such as cuDNN's, by name.
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
        """Return a function as users of the library call it repeatedly: compiled, if they do that.

        `polyattn bench` times what this returns.

        Parameters
        ----------
        function : callable
            Takes arrays of this library and returns one.

        Returns
        -------
        callable
            The same function, or one that does the same once it is compiled.
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
            What `compile` returned; it has been called with these arrays before.
        *arrays : Array
            What it is to be called with.

        Returns
        -------
        int or None
            Bytes, or None if the library does not count them. Of the CPU the operating system is
            asked then.
        """
        return None

    def each(self, work: Callable[[Any], None], items: Sequence[Any]) -> None:
        """Call a function on every item, in any order, on as many threads as attention uses.

        Parameters
        ----------
        work : callable
            What to do with an item.
        items : sequence
            The items.
        """
        for item in items:
            work(item)
