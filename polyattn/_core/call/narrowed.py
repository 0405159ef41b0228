"""Problems of some of the keys, for calls whose rows see no others.

Any composition of numbers in a mask expression may come to causal and window over some keys; its
intervals tell, before there are arrays::

    4 queries, 8 keys                                             of the keys
    masks.causal() & masks.padding(5), query_offset=0             0 to 4   is_causal
    masks.causal() | masks.window(None, 2), query_offset=0        0 to 6   window=(None, 2)
    masks.window(1, 0) & ~masks.prefix(2) & masks.padding(6)      3 to 6   window=(1, 0)
"""

from __future__ import annotations

from typing import Any, NamedTuple

from polyattn._base.span import Span
from polyattn._base.tracing import is_compiling
from polyattn._core.call.problem import Problem
from polyattn._core.expressions.masks import Mask

#: Features that some keys or items alone do not change: of the arrays of such a call, only query,
#: key and value go by keys or items.
SEPARABLE = frozenset({
    "batch_broadcast", "causal", "grouped_heads", "logsumexp", "mask_expression", "query_offset",
    "query_offset_array", "scale", "sinks", "softcap", "value_size", "window",
})  # fmt: skip
#: Ends of more rows take longer than is worth it before a call.
MOST_ROWS = 2**22


def narrowed(problem: Problem, keys: Span, **facts: Any) -> Problem:
    """Return the problem of some of the keys, with other facts, which count from the first of all.

    Lengths must be known.
    """
    own = problem._replace(key_length=keys.stop - keys.start, **facts)
    # As `FEATURES` and `positions_matter` say of a call, where it has other facts.
    needed = {
        "causal": own.is_causal,
        "mask_expression": own.mask_spec is not None,
        "window": own.window != (None, None),
    }
    offset, newest = own.query_offset, own.key_length - own.query_length
    if own.score_spec is None and not any(needed.values()):
        offset = newest
    elif offset is not None:
        offset -= keys.start
    needed["query_offset"] = offset not in (None, newest)
    needed["query_offset_array"] = offset is None
    features = own.features.difference(needed).union([name for name in needed if needed[name]])
    return own._replace(query_offset=offset, features=features)


class Banded(NamedTuple):
    """A problem with causal and window over some of the keys in place of a mask expression."""

    problem: Problem
    keys: Span

    @property
    def note(self) -> str:
        """The line that `explain` shows."""
        band = "" if self.problem.band is None else f" and {self.problem.band}"
        return f"it gets the keys {self.keys.start}:{self.keys.stop}{band} in place of the mask"


def banded(problem: Problem) -> Banded | None:
    """Return the problem of causal and window over some keys that shows the same, or None."""
    mask, offset = problem.mask_spec, problem.query_offset
    if mask is None or offset is None or is_compiling() or problem.is_symbolic or problem.is_empty:
        return None
    # JAX would compile for each number of keys outside of a program.
    if problem.library == "jax" and not problem.traced:
        return None
    if not problem.features <= SEPARABLE:
        return None
    ends = _ends_of_length(problem, offset, mask)
    if ends is None and problem.query_length <= MOST_ROWS and not mask.carried():
        lengths, band = (problem.query_length, problem.key_length), problem.band
        intervals = (mask if band is None else band & mask).intervals(
            lengths, offset, batch=problem.batch, heads=problem.heads, most=1, evaluates=False
        )
        ends = None if intervals is None else intervals.band()
    if ends is None:
        return None
    low, high, start, stop = ends
    if (low is not None and low > offset) or (high is not None and high < offset):
        offset = (high if low is None else low) or 0
    left, right = None if low is None else offset - low, None if high is None else high - offset
    keys, window = Span(start, stop), (left, right or None)
    facts = {"query_offset": offset, "is_causal": right == 0, "window": window, "mask_spec": None}
    return Banded(narrowed(problem, keys, **facts), keys)


def _ends_of_length(
    problem: Problem, offset: int, mask: Mask
) -> tuple[int | None, int | None, int, int] | None:
    """Return `Intervals.band` of a number of keys, in 0.05 of the time that intervals take."""
    # A step of generation has another number each time.
    if not isinstance(stop := mask.first_keys, int):
        return None
    rows, band = problem.query_length, problem.band
    low = None if band is None or band.left is None else offset - band.left
    high = None if band is None or band.right is None else offset + band.right
    start, stop = max(0, low or 0), min(stop, problem.key_length)
    stop = stop if high is None else min(stop, high + rows)
    low = None if low is None or low + rows <= start + 1 else low
    high = None if high is None or high + 1 >= stop else high
    return (low, high, start, stop) if start < stop else None
