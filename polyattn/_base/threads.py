"""The number of threads that a kernel may use if its library does not decide that itself.

The innermost `use_threads` wins over the environment variable, which is read at call time and wins
over the number of processors that affinity and control group grant this process.
"""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import SupportsIndex

from polyattn._base.quirks import reader_of
from polyattn._base.settings import Context

VARIABLE = "POLYATTN_NUM_THREADS"
_variable = reader_of(VARIABLE)

_context: Context[int] = Context("polyattn_threads")


@contextmanager
def use_threads(count: SupportsIndex) -> Iterator[None]:
    """Limit the threads of all calls that this thread or task makes inside the block.

    Only the NumPy backend follows it; PyTorch and JAX have their own settings. The number of
    threads does not change any bit of the result.

    Parameters
    ----------
    count : int
        Number of threads that a call may use, including the calling thread; any integer type
        except bool.

    Yields
    ------
    None
        Nothing; the limit ends with the block.

    Raises
    ------
    TypeError
        If `count` is not an integer.
    ValueError
        If `count` is less than 1.

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
    if isinstance(count, bool) or str(getattr(count, "dtype", "")) == "bool":
        raise wrong
    try:
        threads = operator.index(count)
    except TypeError:
        raise wrong from None
    if threads < 1:
        raise ValueError(f"use_threads takes at least 1 thread; got {count}")
    with _context.block(threads):
        yield


def thread_count(most: Callable[[], int] | None = None) -> int:
    """Return the number of threads that this call may use.

    Without `use_threads` and the variable, `most` may limit the default. Raises ValueError if the
    environment variable is not a number of threads.
    """
    chosen = _context.get()
    if chosen is not None:
        return chosen
    variable = _variable()
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
    """Return the number of processors that this process may use; computed once per process."""
    if hasattr(os, "sched_getaffinity"):
        processors = len(os.sched_getaffinity(process))
    else:
        processors = os.cpu_count() or 1
    return max(1, min(processors, _quota(Path("/sys/fs/cgroup"))))


def _quota(root: Path) -> int:
    """Return the control group's limit as a number of processors, rounded up."""
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
