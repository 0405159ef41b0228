"""How many threads a kernel of ours may use, where its library does not decide that itself.

The innermost `use_threads` wins over the environment variable, which is read at call time and wins
over what the machine grants this process: its processors, by affinity and by control group.
"""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from pathlib import Path
from typing import SupportsIndex

__all__ = ["VARIABLE", "granted", "thread_count", "use_threads"]

VARIABLE = "POLYATTN_NUM_THREADS"

_context: ContextVar[int | None] = ContextVar("polyattn_threads", default=None)


@contextmanager
def use_threads(count: SupportsIndex) -> Iterator[None]:
    """Limit the threads of every call made inside the block, by this thread or task.

    It holds for the NumPy backend. PyTorch and JAX have settings of their own. Results have the
    same bits whatever it is.

    Parameters
    ----------
    count : int
        How many threads a call may use, the calling one among them; any integer type, not bool.

    Yields
    ------
    None
        Nothing; the limit ends with the block.

    Raises
    ------
    TypeError
        If it is no integer.
    ValueError
        If it is less than 1.

    Examples
    --------
    >>> import numpy as np
    >>> import polyattn
    >>> x = np.ones((8, 512, 64), dtype=np.float32)
    >>> with polyattn.use_threads(1):
    ...     polyattn.attention(x, x, x).shape
    (8, 512, 64)
    """
    wrong = TypeError(f"use_threads takes a number of threads, such as 4; got {count!r}")
    if isinstance(count, bool):
        raise wrong
    try:
        threads = operator.index(count)
    except TypeError:
        raise wrong from None
    if threads < 1:
        raise ValueError(f"use_threads takes at least 1 thread; got {count}")
    token = _context.set(threads)
    try:
        yield
    finally:
        _context.reset(token)


def thread_count(most: Callable[[], int] | None = None) -> int:
    """Return how many threads this call may use.

    Parameters
    ----------
    most : callable, optional
        Returns a limit that holds where nobody has said how many.

    Returns
    -------
    int
        At least 1.

    Raises
    ------
    ValueError
        If the environment variable is no number of threads.
    """
    chosen = _context.get()
    if chosen is not None:
        return chosen
    variable = os.environ.get(VARIABLE)
    if variable:
        return _parsed(variable)
    most_granted = granted(os.getpid())
    return most_granted if most is None else min(most_granted, most())


def _parsed(variable: str) -> int:
    try:
        count = int(variable)
    except ValueError:
        count = 0
    if count < 1:
        raise ValueError(
            f"{VARIABLE} must be a number of threads, such as 4, or not be set; it is {variable!r}"
        )
    return count


@lru_cache(maxsize=1)
def granted(process: int) -> int:
    """Return the processors that this process may use; found out once a process."""
    if hasattr(os, "sched_getaffinity"):
        processors = len(os.sched_getaffinity(process))
    else:
        processors = os.cpu_count() or 1
    return max(1, min(processors, _quota(Path("/sys/fs/cgroup"))))


def _quota(root: Path) -> int:
    """Return how many processors' time the control group grants, rounded up."""
    try:
        granted, period = (root / "cpu.max").read_text(encoding="ascii").split()
    except (OSError, ValueError):
        try:
            granted = (root / "cpu/cpu.cfs_quota_us").read_text(encoding="ascii").strip()
            period = (root / "cpu/cpu.cfs_period_us").read_text(encoding="ascii").strip()
        except OSError:
            return 2**31
    if granted in ("max", "-1"):
        return 2**31
    return math.ceil(int(granted) / int(period))
