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
from queue import SimpleQueue
from typing import Any, TypeVar

from threadpoolctl import ThreadpoolController

__all__ = ["Shared", "StoppedError", "blas", "default", "each"]

T = TypeVar("T")


class Exclusive:
    """What one thread does at a time, with a lock that is free afterwards whatever happens.

    An interrupt may come between any two instructions of the main thread, at the end of a `with`
    too: its lock would stay taken.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def run(self, action: Callable[[], T]) -> T:
        """Return the result of an action that no other thread may do at the same time."""
        try:
            try:
                self._lock.acquire()
                return action()
            finally:
                self._release()
        finally:
            self._release()  # again: an interrupt may have cut the first one short

    def _release(self) -> None:
        try:
            while True:
                self._lock.release()
        except RuntimeError:
            pass  # this thread does not hold it any more


class Blas:
    """NumPy's BLAS, held to one thread as long as any call needs that.

    The count of BLAS's threads belongs to the process. It is put back by the call that ends last.
    """

    def __init__(self) -> None:
        self._one_at_a_time = Exclusive()
        self._holders: set[object] = set()
        self._libraries: list[Any] | None = None
        self._counts: list[int] = []  # to be put back; empty when there is nothing to put back

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
        return min(self._one_at_a_time.run(lambda: self._counts or self._read()), default=0)

    def held(self, work: Callable[[], T]) -> T:
        """Return the result of some work during which BLAS has one thread."""
        # An interrupt may come between any two instructions, so the holder is known before it is
        # counted, and leaving can be done again: it changes nothing once it is complete.
        holder = object()
        try:
            try:
                self._one_at_a_time.run(lambda: self._take(holder))
                return work()
            finally:
                self._one_at_a_time.run(lambda: self._leave(holder))
        finally:
            self._one_at_a_time.run(lambda: self._leave(holder))

    def _take(self, holder: object) -> None:
        if not self._counts:  # else they are not put back yet, and what BLAS has now is ours
            self._counts = self._read()
        self._holders.add(holder)
        if len(self._holders) == 1:
            self._set([1] * len(self._counts))

    def _leave(self, holder: object) -> None:
        self._holders.discard(holder)
        if not self._holders:
            self._put_back()

    def _put_back(self) -> None:
        if self._counts:
            self._set(self._counts)
            self._counts = []

    def _read(self) -> list[int]:
        return [library.get_num_threads() for library in self.libraries()]

    def _set(self, counts: list[int]) -> None:
        for library, now, count in zip(self.libraries(), self._read(), counts, strict=True):
            if now != count:
                # threadpoolctl 3.8 ignores all threads but the first that has set OpenBLAS's count.
                change = getattr(library, "_real_set_num_threads", library.set_num_threads)
                change(count)

    def forget_holders(self) -> None:
        """Start anew in a forked process, where none of the threads that held it lives on."""
        self._one_at_a_time = Exclusive()
        self._holders.clear()
        self._put_back()


class Job:
    """Work that several threads may do at once, beside the one that waits for them.

    What has happened is read off lists that only grow, so that waiting can be interrupted and begun
    again.
    """

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._closed = False
        self._begun: list[None] = []
        self._ended: list[None] = []
        self._wake: SimpleQueue[None] = SimpleQueue()
        self.errors: list[BaseException] = []

    def help(self) -> None:
        """Do the work if the job is not finished yet."""
        self._begun.append(None)
        try:
            if not self._closed:
                self._work()
        except BaseException as error:
            self.errors.append(error)
        finally:
            self._ended.append(None)
            self._wake.put(None)

    def finish(self) -> None:
        """Let nobody begin any more, and wait for those who have."""
        self._closed = True
        while len(self._ended) < len(self._begun):
            self._wake.get()


class Pool:
    """Threads that wait for jobs, as many as were ever asked for.

    They are daemons, and so outlive `concurrent.futures`, whose threads end before the functions of
    `atexit` run. No call waits for a thread that has not begun.
    """

    def __init__(self) -> None:
        self._jobs: SimpleQueue[tuple[contextvars.Context, Job]] = SimpleQueue()
        self._threads: list[threading.Thread] = []

    def add(self, helpers: int, job: Job) -> None:
        """Let up to `helpers` threads help with a job, each in the caller's context."""
        while len(self._threads) < helpers:
            name = f"polyattn_{len(self._threads)}"
            thread = threading.Thread(target=self._serve, name=name, daemon=True)
            try:
                thread.start()
            except RuntimeError:  # at the process's limit, or its end: the caller does it all
                break
            self._threads.append(thread)
        for _ in range(min(helpers, len(self._threads))):
            self._jobs.put((contextvars.copy_context(), job))

    def _serve(self) -> None:
        while True:
            context, job = self._jobs.get()
            context.run(job.help)
            del context, job  # and the arrays of the call


#: NumPy's BLAS in this process.
blas = Blas()
_pool = Pool()


def _after_fork() -> None:
    global _pool
    _pool = Pool()
    blas.forget_holders()


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
    job = Job(drain)

    def drain_together() -> None:
        try:
            _pool.add(min(threads, len(items)) - 1, job)
            drain()
            job.finish()
        except BaseException:
            # Nothing of this call runs on when it ends, however it ends.
            state.stopped = True
            job.finish()
            raise

    blas.held(drain_together)
    if job.errors:
        raise job.errors[0]
