"""Ranks that are threads of one process: for tests, and for several devices of one process."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Any

from polyattn._base.arrays import Array, library_of
from polyattn._base.slices import take
from polyattn.parallel.communicator import Communicator
from polyattn.parallel.token_layout import check_size


class _Mail:
    """The messages between ranks, and the errors of any of them."""

    def __init__(self, size: int, timeout: float) -> None:
        self.size, self.timeout = size, timeout
        ranks = range(size)
        self.boxes: dict[Any, SimpleQueue[Any]] = {
            (source, target): SimpleQueue() for source in ranks for target in ranks
        }
        self.failed: list[tuple[int, BaseException]] = []

    def fail(self, rank: int, error: BaseException) -> None:
        self.failed.append((rank, error))
        for box in self.boxes.values():
            box.put(self)


class Threads(Communicator):
    """One of the threads that `run_threads` starts; it counts the bytes `sent` to others."""

    def __init__(self, rank: int, mail: _Mail) -> None:
        self.rank, self._mail, self.size, self.sent = rank, mail, mail.size, 0

    def _send(self, target: int, array: Array) -> None:
        if target != self.rank:
            self.sent += int(getattr(array, "nbytes", 0))
        self._mail.boxes[self.rank, target].put(array)

    def _receive(self, source: int) -> Any:
        mail = self._mail
        try:
            thing = mail.boxes[source, self.rank].get(timeout=mail.timeout)
        except Empty:
            raise TimeoutError(
                f"rank {self.rank} got nothing from rank {source} in {mail.timeout} s; all ranks"
                " must make the same calls"
            ) from None
        if thing is mail:  # which stands for an error
            rank, error = mail.failed[0]
            raise RuntimeError(
                f"rank {self.rank} stopped, because rank {rank} raised {error!r}"
            ) from error
        return thing

    def shift(self, arrays: Sequence[Array], by: int = 1) -> tuple[int, int]:
        """Send arrays `by` ranks onwards; the receiver gets these arrays, not copies."""
        for array in arrays:
            self._send((self.rank + by) % self.size, array)
        return by, len(arrays)

    def wait(self, handle: tuple[int, int]) -> list[Array]:
        by, count = handle
        return [self._receive((self.rank - by) % self.size) for _ in range(count)]

    def gather(self, array: Array, axis: int) -> Array:
        return self._all([array] * self.size, axis)

    def exchange(self, array: Array, split: int, concat: int) -> Array:
        length = array.shape[split] // self.size
        parts = [take(array, split, n * length, length) for n in range(self.size)]
        return self._all(parts, concat)

    def gather_bytes(self, message: bytes, like: Array) -> list[bytes]:
        """Return the messages of all ranks, in their order; they do not count as sent."""
        return self._exchanged([message] * self.size)

    def _all(self, parts: Sequence[Array], axis: int) -> Array:
        received = self._exchanged(parts)
        return library_of(received[0]).xp.concat(received, axis=axis)

    def _exchanged(self, parts: Sequence[Any]) -> list[Any]:
        for target, part in enumerate(parts):
            self._send(target, part)
        return [self._receive(source) for source in range(self.size)]


def run_threads(
    size: int, function: Callable[[Threads], Any], *, timeout: float = 60.0
) -> list[Any]:
    """Call a function on each of some threads, which form the ranks of a communicator.

    Parameters
    ----------
    size : int
        The number of threads.
    function : callable
        Takes the communicator of its thread, which counts the bytes that it sends as ``sent``.
    timeout : float
        The seconds that a thread waits for another.

    Returns
    -------
    list
        What the function returned on each rank.

    Raises
    ------
    Exception
        The first error that a rank raised. The other ranks stop where they wait for it.

    Examples
    --------
    >>> import numpy as np
    >>> from polyattn import parallel
    >>> x = np.ones((2, 8, 4))
    >>> def attend(ranks):
    ...     own = parallel.shard(x, over=ranks)
    ...     return parallel.attention(own, own, own, over=ranks, strategy="ring").shape
    >>> parallel.run_threads(2, attend)
    [(2, 4, 4), (2, 4, 4)]
    """
    mail, results = _Mail(check_size(size), timeout), [None] * size

    def work(rank: int) -> None:
        try:
            results[rank] = function(Threads(rank, mail))
        except BaseException as error:
            mail.fail(rank, error)

    contexts = [contextvars.copy_context() for _ in range(size)]
    threads = [
        threading.Thread(target=context.run, args=(work, rank), daemon=True)
        for rank, context in enumerate(contexts)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if mail.failed:
        raise mail.failed[0][1]
    return results
