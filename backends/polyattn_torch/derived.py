"""Problems that are made of others, each the same object again: kernels keep calls ready by it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from polyattn.plugin import Problem

# Problems that are kept, at most.
MOST_MADE = 512

_made: dict[Any, tuple[Problem, Problem]] = {}


def derived(make: Callable[..., Problem], problem: Problem, *rest: Any) -> Problem:
    """Return what a function makes of a problem and hashable arguments."""
    if torch.compiler.is_compiling():
        return make(problem, *rest)
    key = make, id(problem), *rest
    known = _made.get(key)
    if known is None or known[0] is not problem:
        if len(_made) >= MOST_MADE:
            _made.clear()
        known = _made[key] = problem, make(problem, *rest)
    return known[1]
