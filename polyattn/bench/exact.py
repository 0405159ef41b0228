"""Compute some rows of the output in float64 and the error of a result against them."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from polyattn._api.attention import attention
from polyattn.bench.workload import Workload

BLOCKS, ROWS = 4, 16


class ExactRows(NamedTuple):
    """A block of output rows: its index and its exact values."""

    where: tuple[Any, ...]
    values: Any


def exact_rows(workload: Workload, arrays: list[Any], length: int) -> list[ExactRows]:
    """Return blocks of rows from the whole length, for the first and the last head."""
    query, key, value = arrays
    rows, times = query.shape[-2], workload.heads // workload.key_heads
    starts = sorted({int(start) for start in np.linspace(0, max(rows - ROWS, 0), BLOCKS)})
    blocks = []
    for head in sorted({0, workload.heads - 1}):
        group = slice(head // times, head // times + 1)
        for start in starts:
            # The last batch item and one head, so that swapped items or heads are detected.
            where = (slice(-1, None), slice(head, head + 1), slice(start, start + ROWS))
            values = attention(
                *(x.astype(np.float64) for x in (query[where], key[-1:, group], value[-1:, group])),
                is_causal=workload.causal,
                window=workload.window,
                query_offset=length - rows + start,
                backend="array-api",
                kernel="dense",
            )
            blocks.append(ExactRows(where, values))
    return blocks


def largest_error(output: Any, exact: list[ExactRows]) -> float:
    """Return the largest difference from the exact rows; NaN if an element is NaN."""
    errors = [np.abs(output[where].astype(np.float64) - values).max() for where, values in exact]
    return float(np.max(errors))
