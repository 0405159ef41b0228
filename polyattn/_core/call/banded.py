"""Mask expressions that are causal and window over some keys, for engines with these options.

The intervals of the expression tell, so any composition of numbers that comes to a band is one::

    4 queries, 8 keys                                             of the keys
    masks.causal() & masks.padding(5), query_offset=0             0 to 4   is_causal
    masks.causal() | masks.window(None, 2), query_offset=0        0 to 6   window=(None, 2)
    masks.window(1, 0) & ~masks.prefix(2) & masks.padding(6)      3 to 6   window=(1, 0)
"""

from __future__ import annotations

from typing import NamedTuple

from polyattn._base.span import Span
from polyattn._base.tracing import is_compiling
from polyattn._core.call.problem import Problem


class Banded(NamedTuple):
    """A problem with causal and window over some of the keys in place of a mask expression."""

    problem: Problem
    keys: Span

    @property
    def note(self) -> str:
        """What `explain` says of it."""
        band = "" if self.problem.band is None else f" and {self.problem.band}"
        return f"it gets the keys {self.keys.start}:{self.keys.stop}{band} in place of the mask"


#: Ends of more rows take longer than is worth it before a call.
MOST_ROWS = 2**22
# What a part of the keys does not change, if it is given no other arrays.
_OF_ANY_KEYS = frozenset({
    "batch_broadcast", "causal", "grouped_heads", "logsumexp", "mask_expression", "query_offset",
    "scale", "sinks", "softcap", "value_size", "window",
})  # fmt: skip


def banded(problem: Problem) -> Banded | None:
    """Return causal and window over some keys that show what a mask expression does, or None.

    The expression must hold numbers only: then its intervals are known before there are arrays.
    """
    mask, offset = problem.mask_spec, problem.query_offset
    if mask is None or offset is None or is_compiling() or problem.is_symbolic or problem.is_empty:
        return None
    rows = problem.query_length
    if mask.carried() or problem.features - _OF_ANY_KEYS or rows > MOST_ROWS:
        return None
    whole = mask if problem.band is None else problem.band & mask
    found = whole.intervals(
        (rows, problem.key_length), offset, batch=problem.batch, heads=problem.heads, most=1,
        evaluates=False,
    )  # fmt: skip
    ends = None if found is None else found.band()
    if ends is None:
        return None
    low, high, start, stop = ends
    if low is None and high is None:
        offset = stop - rows
    elif (low is not None and low > offset) or (high is not None and high < offset):
        offset = (high if low is None else low) or 0
    left, right = None if low is None else offset - low, None if high is None else high - offset
    needed = {
        "causal": right == 0,
        "window": left is not None or right not in (None, 0),
        "query_offset": offset != stop - rows,
    }
    features = problem.features - {"mask_expression", *needed}
    changed = problem._replace(
        key_length=stop - start, query_offset=offset - start, is_causal=right == 0,
        window=(left, right or None), mask_spec=None,
        features=features | {name for name, is_needed in needed.items() if is_needed},
    )  # fmt: skip
    return Banded(changed, Span(start, stop))
