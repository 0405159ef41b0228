"""Threads that live with the process, and BLAS held to one thread each while they work.

NumPy lets go of the interpreter inside a product or an elementwise function, so threads that each
work on tiles of their own scale; threads inside BLAS, on products as small as a tile, do not, and
both at once are several times slower than either.
"""

from __future__ import annotations

import contextvars
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

from threadpoolctl import ThreadpoolController

__all__ = ["Shared", "StoppedError", "blas", "default", "each"]

T = TypeVar("T")


class Blas:
    """NumPy's BLAS, held to one thread as long as anybody is inside.

    The count of BLAS's threads belongs to the process. It is put back by whoever leaves last.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._libraries: list[Any] | None = None
        self._counts: list[int] = []

    def libraries(self) -> list[Any]:
        """Return the controllers of NumPy's BLAS, which are looked for once."""
        if self._libraries is None:
            found = ThreadpoolController().select(user_api="blas").lib_controllers
            # Others may have brought a BLAS of their own, which is none of ours to hold.
            own = [library for library in found if "numpy" in str(library.filepath)]
            self._libraries = own or found
        return self._libraries

    def threads(self) -> int:
        """Return how many threads BLAS has when nobody holds it; 0 if it cannot be held."""
        with self._lock:
            counts = self._counts or [library.get_num_threads() for library in self.libraries()]
        return min(counts, default=0)

    def __enter__(self) -> None:
        with self._lock:
            if not self._users:
                self._counts = [library.get_num_threads() for library in self.libraries()]
                for library, count in zip(self.libraries(), self._counts, strict=True):
                    if count != 1:
                        library.set_num_threads(1)
            self._users += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                self._put_back()

    def _put_back(self) -> None:
        for library, count in zip(self.libraries(), self._counts, strict=True):
            if count != 1:
                library.set_num_threads(count)
        self._counts = []

    def forget_users(self) -> None:
        """Start anew in a forked process, where none of the threads that were inside lives on."""
        self._lock = threading.Lock()
        if self._users:
            self._users = 0
            self._put_back()


class Pool:
    """Threads that wait for work, as many as were ever asked for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._executor: ThreadPoolExecutor | None = None
        self._size = 0

    def submit(self, helpers: int, work: Callable[[], None]) -> list[Future[None]]:
        """Let `helpers` threads do the same work, each in the caller's context."""
        if helpers < 1:
            return []
        with self._lock:
            if self._executor is None or helpers > self._size:
                if self._executor is not None:
                    self._executor.shutdown(wait=False)
                self._executor = ThreadPoolExecutor(helpers, "polyattn")
                self._size = helpers
            submit = self._executor.submit
            return [submit(contextvars.copy_context().run, work) for _ in range(helpers)]


#: NumPy's BLAS in this process.
blas = Blas()
_pool = Pool()


def _after_fork() -> None:
    global _pool
    _pool = Pool()
    blas.forget_users()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class StoppedError(Exception):
    """Nobody waits for the result any more."""


class Shared:
    """What the threads that share a call know of one another."""

    def __init__(self) -> None:
        self.stopped = False

    def check(self) -> None:
        """Raise `StoppedError` if one of them has failed or been interrupted."""
        if self.stopped:
            raise StoppedError


def default() -> int:
    """Return how many threads are right if nobody says: no more than BLAS has been given."""
    return max(1, blas.threads())


def each(work: Callable[[T], None], items: Sequence[T], threads: int, state: Shared) -> None:
    """Do the work on every item, by the calling thread and others; an error stops them all.

    Parameters
    ----------
    work : callable
        What to do with an item.
    items : sequence
        The items, in the order in which they are begun.
    threads : int
        How many threads are to work, the caller's among them.
    state : Shared
        Told when to stop; long work asks it.
    """
    left = deque(items)

    def drain() -> None:
        try:
            while not state.stopped:
                try:
                    item = left.popleft()
                except IndexError:
                    return
                work(item)
        except StoppedError:
            return  # the one that stopped it has the error
        except BaseException:
            state.stopped = True
            raise

    if not blas.libraries():
        threads = 1  # its own threads would fight with ours
    with blas:
        helpers = _pool.submit(min(threads, len(items)) - 1, drain)
        try:
            drain()
        finally:
            # Nothing of this call runs on when it ends, however it ends.
            begun = [helper for helper in helpers if not helper.cancel()]
            try:
                wait(begun)
            except BaseException:
                state.stopped = True
                raise
        for helper in begun:
            helper.result()
