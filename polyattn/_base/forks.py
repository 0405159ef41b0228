"""Locks in the child of a fork, which has only the thread that forked.

Guarded data is replaced in one step, because an interrupt may come at any time. So the child finds
it consistent.
"""

from __future__ import annotations

import logging  # noqa: F401 -- first: its lock must be taken after ours, which an import may need
import os
import threading
from typing import Any
from weakref import WeakSet

#: The error of a call that is under way where the child of a fork begins.
CUT_BY_FORK = "the process was forked amid this call, and its threads are in the parent: call again"
#: The seconds that a fork waits at most for a lock that is held during forks.
PATIENCE = 30.0

_at_fork: Any = getattr(os, "register_at_fork", lambda **functions: None)
_locks: WeakSet[Any] = WeakSet()


def forkable_lock() -> Any:
    """Return a lock that its thread may take again, and that is free in the child of a fork."""
    lock = threading.RLock()
    _locks.add(lock)
    return lock


def hold_during_forks(lock: Any) -> None:
    """Let a fork wait while another thread holds a lock.

    It guards imports: Python cannot import in the child what a thread was importing.
    """

    def release() -> None:
        if lock._is_owned():
            lock.release()

    _at_fork(
        before=lambda: lock.acquire(timeout=PATIENCE),
        after_in_parent=release,
        after_in_child=release,
    )


def _make_anew() -> None:
    for lock in _locks:
        if not lock._is_owned():  # by this thread, which will release it
            lock._at_fork_reinit()


_at_fork(after_in_child=_make_anew)
