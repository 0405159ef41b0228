"""Refuse what `dense` cannot compute of lengths that are unknown until an exported program runs."""

from __future__ import annotations

from polyattn._core.call.problem import Problem
from polyattn._core.tiles.batch_axes import reason_against_batch

#: Features whose numbers are computed from the lengths.
NUMBERED = frozenset({"backward", "jvp"})


def reasons_against_lengths(problem: Problem) -> list[str]:
    """Return why a call needs lengths that are known; none if they are."""
    if not problem.is_symbolic:
        return []
    reason = reason_against_batch(problem)
    if reason is not None:
        return [reason]
    names = ", ".join(sorted(problem.features & NUMBERED))
    return [f"it computes {names} only for known lengths"] if names else []
