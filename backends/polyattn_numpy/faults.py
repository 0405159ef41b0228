"""Known faults of NumPy itself, as rows of data, and how this plugin avoids each.

A row can go when no release that the package supports is in it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from polyattn.plugin import Problem

Release = tuple[int, ...]


class Fault(NamedTuple):
    """One fault."""

    function: str
    first: Release
    last: Release | None  # None if no release is known to be right
    effect: str  # as a clause about the function, with its condition
    workaround: str
    evidence: str  # where it was seen
    concerns: Callable[[Problem], bool]  # whether gradients of a problem would meet it

    def __str__(self) -> str:
        first, last = (".".join(map(str, release or ())) for release in (self.first, self.last))
        releases = f"NumPy {first} {f'to {last}' if last else 'and later'}"
        return f"{releases}: numpy.{self.function} {self.effect}; avoided: {self.workaround}"


def faults_of(release: str = np.__version__, problem: Problem | None = None) -> tuple[Fault, ...]:
    """Return the faults of a release of NumPy, or only those that concern a problem."""
    numbers = tuple(map(int, re.findall(r"\d+", release)[:3]))
    return tuple(
        fault
        for fault in FAULTS
        if fault.first <= numbers <= (fault.last or numbers)
        and (problem is None or fault.concerns(problem))
    )


def _has_a_bad_stride(problem: Problem) -> bool:
    """Return whether a column of the values, with the one added, has the stride that fails."""
    return problem.value_size == {"float32": 3, "float64": 7}[problem.accumulator]


FAULTS = (
    Fault(
        "negative", (2, 1), (2, 5, 4),
        "leaves most of an output unwritten whose stride is 16 bytes (numbers of 4 bytes) or 64 "
        "(of 8)",
        "the result is copied there",
        "seen in NumPy 2.4.6 and 2.5.0 to 2.5.4; right in 2.0.2 and 2.5.5",
        _has_a_bad_stride,
    ),
    Fault(
        "isfinite", (2, 0), None,
        "leaves a strided output unwritten",
        "it gets no output",
        "seen in NumPy 2.0.2 to 2.5.5 on AVX-512",
        lambda problem: False,
    ),
)  # fmt: skip
