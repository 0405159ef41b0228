"""Count the calls of a program by their plans: which kernels run, how often and for how long."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import groupby
from time import perf_counter
from typing import Any, NamedTuple, TypeVar

from polyattn._base.arrays import is_array
from polyattn._base.forks import forkable_lock
from polyattn._base.text_table import table
from polyattn._base.tracing import constant_when_traced, is_compiling, is_recording, known_length
from polyattn._core.call.features import DERIVATIVES
from polyattn._dispatch.explanation import Candidate
from polyattn.plugin import Backend

F = TypeVar("F", bound=Callable[..., Any])
Lengths = tuple[int | None, ...]  # None for a length that a program leaves open

#: The traces that are open, of all threads. An empty list costs a call one look.
open_traces: list[Trace] = []
_timed_traces: list[Trace] = []  # those of them that want the time


class CallCount(NamedTuple):
    """Calls that are alike, the kernel that ran them, and how many there were."""

    library: str  #: of the query
    device: str  #: that the kernel ran on; empty if it is not known
    dtype: str
    query: Lengths  #: its shape
    key: Lengths
    value: Lengths | None  #: a call for weights has none
    needs: frozenset[str]  #: what the call needs of a kernel beyond the plain formula
    backend: str  #: with its device if one was requested
    kernel: str
    refused: tuple[Candidate, ...]  #: what comes before the kernel, with the reasons against it
    traced: bool  #: whether the calls were traced only, for a program or graph that runs later
    count: int = 0  # type: ignore[assignment]  # rather than the method of a tuple
    seconds: float | None = None  #: of all of them together, if they were timed

    @property
    def function(self) -> str:
        """``"forward"``, ``"backward"``, ``"jvp"`` or ``"weights"``."""
        other = "weights" if self.value is None else "forward"
        return next((name for name in DERIVATIVES if name in self.needs), other)

    def __str__(self) -> str:
        _, _, function, *facts, kernel, refused = self.cells()
        return f"{function}: {', '.join(facts)}: {kernel}{refused and f', after {refused}'}"

    def cells(self) -> tuple[str, ...]:
        """Return the facts as cells of a table."""
        given = [shape for shape in (self.query, self.key, self.value) if shape is not None]
        alike = [(shape, len(list(group))) for shape, group in groupby(given)]
        return (
            f"{self.count:,}{' traced' if self.traced else ''}",
            "-" if self.seconds is None else f"{self.seconds:.4f}",
            self.function,
            " ".join([f"{shape}{f' ×{number}' if number > 1 else ''}" for shape, number in alike]),
            f"{self.dtype}, {self.library}{self.device and f' on {self.device}'}",
            ", ".join(sorted(self.needs)) or "-",
            f"{self.backend} {self.kernel}",
            "; ".join(f"{c.kernel or c.backend}: {c.text}" for c in self.refused),
        )


class Trace:
    """The calls that returned while a trace was open, in `calls`; it prints as a table."""

    _titles = (
        "calls", "seconds", "function", "query, key, value", "arrays", "needs", "kernel",
        "tried before it",
    )  # fmt: skip

    def __init__(self, times: bool) -> None:
        self._times = times
        self._numbers: dict[CallCount, list[Any]] = {}  # how many there were, and their seconds
        self._lock = forkable_lock()  # which a signal handler may take again

    def add(self, call: CallCount, seconds: float = 0.0) -> None:
        """Count a call."""
        with self._lock:
            numbers = self._numbers.get(call)
            if numbers is None:
                numbers = self._numbers[call] = [0, None]
            numbers[0] += 1
            if self._times and not call.traced:
                numbers[1] = seconds + (numbers[1] or 0)

    @property
    def calls(self) -> tuple[CallCount, ...]:
        """The calls so far, in the order in which the first of each kind returned."""
        with self._lock:
            numbers = tuple(self._numbers.items())  # at once: a signal handler may add a call
            return tuple([call._replace(count=n, seconds=s) for call, (n, s) in numbers])

    def __str__(self) -> str:
        rows = [self._titles, *(call.cells() for call in self.calls)]
        if self._times:
            return "\n".join(table(rows, right=(0, 1)))
        return "\n".join(table([(row[0], *row[2:]) for row in rows], right=(0,)))

    def __repr__(self) -> str:
        calls = self.calls
        number = f"{sum(call.count for call in calls):,} calls of {len(calls)} kinds"
        return f"<Trace: {number}; print it for the kernels>"


@contextmanager
def trace(*, time: bool = False) -> Iterator[Trace]:
    """Count the calls of attention that return inside the block, by what decides their kernel.

    It counts the calls of all threads and tasks of the process, by every public function. A call
    under ``jax.jit`` or ``torch.compile`` counts when the program is traced, not when it runs.

    Parameters
    ----------
    time : bool
        Whether to add up the wall time of the kernels. Each call then waits for its device before
        its kernel and after it, so the program as a whole may take longer.

    Yields
    ------
    Trace
        The calls so far: it prints as a table, and `calls` are named tuples.

    Examples
    --------
    >>> import numpy as np
    >>> import polyattn
    >>> x = np.ones((8, 5, 64), dtype=np.float32)
    >>> with polyattn.trace() as trace:
    ...     output = polyattn.attention(x, x, x, kernel="dense")
    >>> [(call.kernel, call.query, call.count) for call in trace.calls]
    [('dense', (8, 5, 64), 1)]
    """
    opened = Trace(time)
    lists = (open_traces, _timed_traces) if time else (open_traces,)
    for one in lists:
        one.append(opened)
    try:
        yield opened
    finally:
        for one in lists:
            one.remove(opened)


@constant_when_traced
def is_traced() -> bool:
    """Return whether a trace is open; a program of torch.compile keeps the answer."""
    return bool(open_traces)


def counted(call: CallCount, backend: Backend | None, run: F) -> F:
    """Return a method of a backend as one that counts the call when it has run."""
    if is_compiling():
        _add(*_with_lengths(call, known_length)._replace(traced=True))
        return run
    if is_recording():  # torch.jit.trace has tensors in place of lengths
        call = _with_lengths(call, lambda length: int(length) if is_array(length) else length)
    return functools.partial(run_counted, call, backend, run)  # type: ignore[return-value]


def _with_lengths(call: CallCount, change: Callable[[Any], int | None]) -> CallCount:
    query, key, value = [
        None if shape is None else tuple([change(length) for length in shape])
        for shape in (call.query, call.key, call.value)
    ]
    return call._replace(query=query or (), key=key or (), value=value)


@constant_when_traced
def _add(*facts: Any) -> None:
    for one in tuple(open_traces):
        one.add(CallCount(*facts))


def run_counted(call: CallCount, backend: Any, run: Callable[..., Any], *given: Any) -> Any:
    """Run a kernel by a method of its backend, and count the call in the traces that are open."""
    seconds = 0.0
    if _timed_traces and not call.traced:
        backend.synchronize(call.device or None)
        start = perf_counter()
        result = run(*given)
        backend.synchronize(call.device or None)
        seconds = perf_counter() - start
    else:
        result = run(*given)
    for one in tuple(open_traces):
        one.add(call, seconds)
    return result
