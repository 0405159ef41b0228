"""Count the calls of a program by their plans: which kernels run, how often and for how long."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from html import escape
from itertools import groupby
from time import perf_counter
from typing import Any, NamedTuple, TypeVar

from polyattn._base.html_page import html_table
from polyattn._base.text_table import table
from polyattn._base.tracing import constant_when_traced, is_compiling, known_length
from polyattn._core.call.facts import Call
from polyattn._core.call.features import DERIVATIVES
from polyattn._core.call.problem import Problem
from polyattn._dispatch.explanation import Candidate
from polyattn.plugin import Backend

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

#: The traces that are open, of all threads. An empty list costs a call one look.
open_traces: list[Trace] = []
_timed_traces: list[Trace] = []  # those of them that want the time


class CallCount(NamedTuple):
    """Calls that are alike, the kernel that ran them, and how many there were."""

    function: str  #: "forward", "backward", "jvp" or "weights"
    library: str  #: of the query
    device: str  #: that the kernel ran on; empty if it is not known
    dtype: str
    query: tuple[int | None, ...]  #: its shape; None for a length that is open in a program
    key: tuple[int | None, ...]
    value: tuple[int | None, ...] | None  #: a call for weights has none
    needs: frozenset[str]  #: of the kernel, beyond the plain formula
    backend: str  #: with its device if one was requested
    kernel: str
    refused: tuple[Candidate, ...]  #: what was tried before the kernel, with the reasons against it
    traced: bool  #: whether these calls were only traced, for a program or graph that runs later
    count: int = 0  # type: ignore[assignment]  # rather than the method of a tuple
    seconds: float | None = None  #: of all of them together, if they were timed

    def of_kernel(self, kernel: str, problem: Problem, refused: tuple[Candidate, ...]) -> CallCount:
        """Return the call with the features of another problem, by another kernel."""
        function = _function(problem, self.value is None)
        return self._replace(
            function=function, kernel=kernel, needs=problem.features, refused=refused
        )

    def __str__(self) -> str:
        _, function, *facts, kernel, refused = self.cells()
        return f"{function}: {', '.join(facts)}: {kernel}{refused and f', after {refused}'}"

    def cells(self) -> tuple[str, ...]:
        """Return the facts as cells of a table."""
        given = [shape for shape in (self.query, self.key, self.value) if shape is not None]
        alike = [(shape, len(list(group))) for shape, group in groupby(given)]
        return (
            f"{self.count:,}{' traced' if self.traced else ''}",
            self.function,
            " ".join([f"{shape}{f' ×{number}' if number > 1 else ''}" for shape, number in alike]),
            f"{self.dtype}, {self.library}{self.device and f' on {self.device}'}",
            ", ".join(sorted(self.needs)) or "-",
            f"{self.backend} {self.kernel}",
            "; ".join(f"{c.kernel or c.backend}: {', '.join(c.reasons)}" for c in self.refused),
        )


_TITLES = ("calls", "function", "query, key, value", "arrays", "needs", "kernel", "tried before it")


class Trace:
    """The calls that returned while a trace was open; it prints as a table.

    Attributes
    ----------
    times : bool
        Whether calls are timed.
    """

    def __init__(self, times: bool) -> None:
        self.times = times
        self._numbers: dict[CallCount, list[Any]] = {}  # how many there were, and their seconds
        self._lock = threading.RLock()  # a signal handler may make a call too

    def add(self, call: CallCount, seconds: float = 0.0) -> None:
        """Count a call."""
        with self._lock:
            numbers = self._numbers.setdefault(call, [0, 0.0])
            numbers[0] += 1
            numbers[1] += seconds

    @property
    def calls(self) -> tuple[CallCount, ...]:
        """The calls so far, in the order in which the first of each kind returned."""
        with self._lock:
            found = [(call, *numbers) for call, numbers in self._numbers.items()]
        return tuple([call._replace(count=n, seconds=self._timed(call, t)) for call, n, t in found])

    def _timed(self, call: CallCount, seconds: float) -> float | None:
        return seconds if self.times and not call.traced else None

    def as_dicts(self) -> list[dict[str, object]]:
        """Return the calls in plain types, for JSON."""
        return [
            call._asdict()
            | {"needs": sorted(call.needs), "refused": [one.as_dict() for one in call.refused]}
            for call in self.calls
        ]

    def __str__(self) -> str:
        return "\n".join([self._head(), *table(self._rows(), right=(0, 1) if self.times else (0,))])

    def __repr__(self) -> str:
        return f"<Trace: {self._head()}; print it for the kernels>"

    def _repr_html_(self) -> str:
        return f"<p>{escape(self._head())}</p>" + html_table(self._rows())

    def _head(self) -> str:
        calls = self.calls
        return f"{sum(call.count for call in calls):,} calls of {len(calls)} kinds"

    def _rows(self) -> list[tuple[str, ...]]:
        rows = [_TITLES, *(call.cells() for call in self.calls)]
        if not self.times:
            return rows
        seconds = ["-" if x.seconds is None else f"{x.seconds:.4f}" for x in self.calls]
        timed = zip(rows, ["seconds", *seconds], strict=True)
        return [(row[0], cell, *row[1:]) for row, cell in timed]


@contextmanager
def trace(*, time: bool = False) -> Iterator[Trace]:
    """Count the calls of attention that return inside the block, by what decides their kernel.

    The calls of all threads and tasks of the process count, those of layers, dialects, ranks and
    dask's threads too, and so do gradients and weights that polyattn computes. A call under
    ``jax.jit`` or ``torch.compile`` counts when the program is traced, not when it runs; a program
    that was compiled before is not seen.

    Parameters
    ----------
    time : bool
        Whether to add up the wall time of the kernels. Each call then waits for its device before
        its kernel and after it, so the program as a whole may take longer.

    Yields
    ------
    Trace
        The calls so far. It prints as a table; its `calls` are a tuple of named tuples, and
        ``as_dicts()`` is for JSON.

    See Also
    --------
    explain : Explain which kernel one call would run, with all candidates.

    Examples
    --------
    >>> import numpy as np
    >>> import polyattn
    >>> x = np.ones((8, 5, 64), dtype=np.float32)
    >>> with polyattn.trace() as trace:
    ...     for _ in range(3):
    ...         _ = polyattn.attention(x, x, x, backend="numpy", kernel="tiled", is_causal=True)
    >>> call, = trace.calls
    >>> call.count, call.kernel, sorted(call.needs)
    (3, 'tiled', ['causal'])
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
        lengths: dict[str, Any] = {name: getattr(call, name) for name in ("query", "key", "value")}
        known: Any = {name: x and tuple(map(known_length, x)) for name, x in lengths.items()}
        _add_traced(*call._replace(**known, traced=True))
        return run
    return functools.partial(run_counted, call, backend, run)  # type: ignore[return-value]


@constant_when_traced
def _add_traced(*facts: Any) -> None:
    for one in tuple(open_traces):
        one.add(CallCount(*facts))


def run_counted(call: CallCount, backend: Backend | None, run: Callable[..., T], *given: Any) -> T:
    """Run a kernel by a method of its backend, and count the call in the traces that are open."""
    if _timed_traces and backend is not None and not call.traced:
        found, seconds = _timed(call.device or None, backend, run, *given)
    else:
        found, seconds = run(*given), 0.0
    for one in tuple(open_traces):
        one.add(call, seconds)
    return found


def _timed(
    device: str | None, backend: Backend, run: Callable[..., T], *given: Any
) -> tuple[T, float]:
    backend.synchronize(device)
    start = perf_counter()
    found = run(*given)
    backend.synchronize(device)
    return found, perf_counter() - start


def kind_of(
    call: Call, problem: Problem, device: str, candidates: Sequence[Candidate]
) -> CallCount:
    """Return the facts of a call, with a count of 0; the last of the candidates was chosen."""
    *refused, chosen = candidates
    return CallCount(
        _function(problem, call.value is None),
        call.query.library,
        device,
        problem.dtype,
        call.query.shape,
        call.key.shape,
        None if call.value is None else call.value.shape,
        problem.features,
        chosen.backend,
        str(chosen.kernel),
        tuple(refused),
        problem.traced,
    )


def _function(problem: Problem, is_weights: bool) -> str:
    derivative = next((name for name in DERIVATIVES if name in problem.features), None)
    return derivative or ("weights" if is_weights else "forward")
