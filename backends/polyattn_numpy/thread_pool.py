"""Threads that live as long as the process, and BLAS limited to one thread while they work.

NumPy releases the interpreter lock inside a product or an elementwise function, so threads that
each work on their own tiles scale. Threads inside BLAS do not, on products as small as a tile, and
both at once are several times slower than either.
"""

from __future__ import annotations

import contextvars
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import cache
from queue import SimpleQueue
from typing import Any, TypeVar
from weakref import WeakSet

from threadpoolctl import ThreadpoolController

from polyattn._base.forks import forkable_lock
from polyattn.plugin import CUT_BY_FORK, progress

T = TypeVar("T")


class Exclusive:
    """A lock for actions, which is always free afterwards."""

    # An interrupt between two instructions at the end of a `with` block would leave it taken.

    def __init__(self) -> None:
        self._lock = forkable_lock()

    def run(self, action: Callable[[], T]) -> T:
        """Return the result of an action that no other thread may do at the same time."""
        if self._lock._is_owned():  # by a call of a signal handler amid an action
            return action()
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


class Limit:
    """One thread for some BLAS libraries, as long as any call needs that."""

    def __init__(self, libraries: list[Any]) -> None:
        self.libraries = libraries
        self.holders: set[object] = set()
        self._counts: list[int] = []  # to restore; empty if there is nothing to restore

    def counts(self) -> list[int]:
        """Return the numbers of threads without the limit."""
        return self._counts or self._read()

    def take(self, holder: object) -> None:
        """Limit the libraries, if no other holder has."""
        self.holders.add(holder)  # first: a call of a signal handler then leaves the counts
        if not self._counts:  # else they are not restored yet, and BLAS has the limit
            self._counts = self._read()
        if len(self.holders) == 1:
            self._set([1] * len(self._counts))

    def leave(self, holder: object) -> None:
        """Restore what the libraries had, if no other holder is left."""
        self.holders.discard(holder)
        counts = self._counts
        if counts and not self.holders:
            self._set(counts)
            self._counts = []

    def _read(self) -> list[int]:
        return [library.get_num_threads() for library in self.libraries]

    def _set(self, counts: list[int]) -> None:
        for library, now, count in zip(self.libraries, self._read(), counts, strict=True):
            if now != count:
                # threadpoolctl 3.8 heeds only the first thread that sets OpenBLAS's count.
                change = getattr(library, "_real_set_num_threads", library.set_num_threads)
                change(count)


class Blas:
    """NumPy's BLAS, limited to one thread as long as any call needs that."""

    # The number of its threads belongs to the process: the call that ends last restores it. MKL,
    # and OpenBLAS built with OpenMP, have one number for each thread.

    def __init__(self, find: Callable[[], list[Any]]) -> None:
        self._find = find
        self._one_at_a_time = Exclusive()
        self._of_process: Limit | None = None
        self._of_threads = threading.local()

    def libraries(self) -> list[Any]:
        """Return the controllers of the libraries."""
        limits = self._one_at_a_time.run(self.limits)
        return [library for limit in limits for library in limit.libraries]

    def limits(self) -> tuple[Limit, Limit]:
        """Return the limits of process and calling thread, in turns by `_one_at_a_time`."""
        if self._of_process is None:
            self._of_process = Limit([x for x in self._find() if not counts_by_thread(x)])
        own: Limit | None = getattr(self._of_threads, "limit", None)
        if own is None:
            own = Limit([x for x in self._find() if counts_by_thread(x)])
            self._of_threads.limit = own
        return self._of_process, own

    def threads(self) -> int:
        """Return the number of threads of BLAS without a limit; 0 if it cannot be limited."""

        def read() -> list[int]:
            return [count for limit in self.limits() for count in limit.counts()]

        return min(self._one_at_a_time.run(read), default=0)

    def held(self, work: Callable[[], T]) -> T:
        """Return the result of some work, during which BLAS has one thread."""
        # An interrupt may come between any two instructions, so the holder exists before it is
        # registered, and leaving can be repeated: once complete, it changes nothing.
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
        for limit in self.limits():
            limit.take(holder)

    def _leave(self, holder: object) -> None:
        for limit in self.limits():
            limit.leave(holder)

    def hold_thread(self) -> None:
        """Limit BLAS in the calling thread for good, where it has a number for each."""
        _, own = self._one_at_a_time.run(self.limits)
        own.take(self)

    def forget_holders(self) -> None:
        """Remove the limit in a forked process, which has no other threads."""
        for limit in (self._of_process, getattr(self._of_threads, "limit", None)):
            if limit is not None:
                limit.holders.clear()
                limit.leave(self)


def counts_by_thread(library: Any) -> bool:
    """Return whether a library has a number of threads for each thread that calls it."""
    on_openmp: bool = getattr(library, "threading_layer", None) == "openmp"
    return library.internal_api == "mkl" or (library.internal_api == "openblas" and on_openmp)


@cache
def numpys_blas() -> list[Any]:
    """Return threadpoolctl's controllers of NumPy's BLAS."""
    libraries = ThreadpoolController().select(user_api="blas").lib_controllers
    # Other packages may have loaded another BLAS, which we must not limit.
    numpys = [library for library in libraries if "numpy" in str(library.filepath)]
    return numpys or libraries


class Job:
    """Work that several threads may do at once, besides the one that waits for them."""

    # Its progress is lengths of growing lists, so that a wait can be interrupted and repeated.

    def __init__(self, work: Callable[[], None], state: Shared) -> None:
        self._work, self._state = work, state
        self._closed = False
        self._begun: list[None] = []
        self._ended: list[None] = []
        self._wake: SimpleQueue[None] = SimpleQueue()
        self.errors: list[BaseException] = []
        _jobs.add(self)

    def help(self) -> None:
        """Do the work, unless the job is finished."""
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
        """Keep further threads from starting, and wait for those that have started."""
        self._closed = True
        while len(self._ended) < len(self._begun):
            self._wake.get()
        self._work = lambda: None  # a busy thread, which takes the job later, keeps no arrays alive

    def lose_threads(self) -> None:
        """Stop in the child of a fork, if it lacks a thread that has started."""
        if len(self._ended) < len(self._begun):
            self._state.stopped = True
            self.errors.append(RuntimeError(CUT_BY_FORK))
            self._ended = self._begun
            self._wake.put(None)


class Pool:
    """Threads that wait for jobs, as many as were ever needed at once."""

    # They are daemons: those of `concurrent.futures` end before functions of `atexit` run. No call
    # waits for a thread that has not begun.

    def __init__(self) -> None:
        self._jobs: SimpleQueue[tuple[contextvars.Context, Job]] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._one_at_a_time = Exclusive()

    def add(self, helpers: int, job: Job) -> None:
        """Let up to `helpers` threads help with a job, each in a copy of the caller's context."""
        if len(self._threads) < helpers:
            self._one_at_a_time.run(lambda: self._start(helpers))
        for _ in range(min(helpers, len(self._threads))):
            self._jobs.put((contextvars.copy_context(), job))

    def _start(self, helpers: int) -> None:
        while len(self._threads) < helpers:
            name = f"polyattn_{len(self._threads)}"
            thread = threading.Thread(target=self._serve, name=name, daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the process is at its limit, or ends: the caller does the work
                break
            self._threads.append(thread)

    def _serve(self) -> None:
        blas.hold_thread()
        while True:
            context, job = self._jobs.get()
            context.run(job.help)
            del context, job  # to free the arrays of the call


blas = Blas(numpys_blas)
_pool = Pool()
_jobs: WeakSet[Job] = WeakSet()


def _after_fork() -> None:
    global _pool
    _pool = Pool()
    blas.forget_holders()
    for job in _jobs:
        job.lose_threads()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class StoppedError(Exception):
    """The call has failed or been interrupted, so the result is not needed any more."""


class Shared:
    """The state that the threads of a call share."""

    def __init__(self) -> None:
        self.stopped = False

    def check(self) -> None:
        """Raise `StoppedError` if one of the threads has failed or been interrupted."""
        if self.stopped:
            raise StoppedError


def default() -> int:
    """Return the default number of threads: as many as BLAS may use."""
    return max(1, blas.threads())


def each(work: Callable[[T], None], items: Sequence[T], threads: int, state: Shared) -> None:
    """Do the work on every item, on the calling thread and up to `threads` - 1 others."""
    # An error stops them all. Long work calls `state.check` now and then.
    left = deque(items)

    def drain(show: Callable[[float], None] | None = None) -> None:
        try:
            while not state.stopped:
                try:
                    item = left.popleft()
                except IndexError:
                    return
                work(item)
                if show is not None:
                    show(1 - len(left) / len(items))
        except StoppedError:
            return  # the thread that stopped it has the error
        except BaseException:
            state.stopped = True
            raise

    if threads > 1 and not blas.libraries():
        threads = 1  # BLAS's threads, which cannot be limited, would compete with ours
    job = Job(drain, state)

    def drain_together() -> None:
        try:
            _pool.add(min(threads, len(items)) - 1, job)
            with progress() as show:
                drain(show)
                job.finish()
        except BaseException:
            # However the call ends, its work must end first.
            state.stopped = True
            job.finish()
            raise

    blas.held(drain_together)
    if job.errors:
        raise job.errors[0]
