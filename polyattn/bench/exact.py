"""What the output should be: some of its rows in float64, by the formula as it stands."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from polyattn.api.attention import attention
from polyattn.bench.workload import Workload

__all__ = ["Rows", "exact_rows", "largest_error"]

BLOCKS, ROWS = 4, 16


class Rows(NamedTuple):
    """Some rows of the output: where they are, and what they should hold."""

    where: tuple[Any, ...]
    values: Any


def exact_rows(workload: Workload, arrays: list[Any], length: int) -> list[Rows]:
    """Return blocks of rows, spread over the whole length, of the first and the last head."""
    query, key, value = arrays
    rows, times = query.shape[-2], workload.heads // workload.key_heads
    starts = sorted({int(start) for start in np.linspace(0, max(rows - ROWS, 0), BLOCKS)})
    found = []
    for head in sorted({0, workload.heads - 1}):
        group = slice(head // times, head // times + 1)
        for start in starts:
            # The batch's last item, one head, so that an item or head that is mixed up shows.
            where = (slice(-1, None), slice(head, head + 1), slice(start, start + ROWS))
            values = attention(
                *(x.astype(np.float64) for x in (query[where], key[-1:, group], value[-1:, group])),
                is_causal=workload.causal,
                window=workload.window,
                query_offset=length - rows + start,
                backend="array-api",
                kernel="dense",
            )
            found.append(Rows(where, values))
    return found


def largest_error(output: Any, exact: list[Rows]) -> float:
    """Return the largest difference from the exact rows; NaN if some element is no number."""
    errors = [np.abs(output[where].astype(np.float64) - values).max() for where, values in exact]
    return float(np.max(errors))
