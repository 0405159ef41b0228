"""Small calls without masks by ten calls of NumPy: there Python takes most of the time.

The kernel `dense` takes 2.0 to 1.4 times as long, from 16 to 400 keys of a token.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from polyattn.plugin import Array, Backend, Kernel, Operands, Problem
from polyattn_numpy.scratch import ones
from polyattn_numpy.tiling import TINY


class Small(Kernel):
    """The formula at once, for keys that all rows see."""

    name = "small"
    features = frozenset({
        "causal", "grouped_heads", "logsumexp", "query_offset", "scale", "value_size",
    })  # fmt: skip
    promises = Kernel.promises | {"batch_invariant"}
    takes_empty = False

    def reasons_against(self, problem: Problem) -> list[str]:
        """Return why a row may not see all keys, or the arrays are not NumPy's own floats."""
        reasons = []
        offset = problem.query_offset
        if problem.is_causal and (offset is None or offset < problem.key_length - 1):
            reasons.append("it needs rows that see all keys")
        if problem.dtype != problem.accumulator:
            reasons.append("it supports float32 and float64 only")
        return reasons

    def only_on_request(self, problem: Problem) -> str | None:
        """Leave larger calls to tiles."""
        # Decided by the shape of one item, so that an item is computed alike in any batch.
        if problem.heads * problem.query_length * problem.key_length > TINY:
            return "the problem is large: tiles are faster"
        return None

    def __call__(
        self, problem: Problem, operands: Operands, backend: Backend
    ) -> tuple[Array, Array | None]:
        query, key, value = operands.query, operands.key, operands.value
        grouped = problem.heads != problem.key_heads
        if grouped:
            rows = problem.group_size * problem.query_length
            query = query.reshape(*query.shape[:-3], problem.key_heads, rows, problem.head_size)
        s = np.matmul(query * problem.scale, key.swapaxes(-1, -2))
        maximum = s.max(axis=-1, keepdims=True)
        # A row of −inf only has weights of 0, not NaN.
        np.subtract(s, np.maximum(maximum, _LEAST[s.dtype.char]), s)
        np.exp(s, s)
        total = np.matmul(s, ones(problem.key_length, s.dtype))
        output = np.matmul(s, value)
        output /= np.maximum(total, 1)  # it is 0, or at least the 1 of the maximum
        logsumexp = None
        if "logsumexp" in problem.features:
            logsumexp = (np.log(total) + maximum)[..., 0]
        if grouped:
            output = output.reshape(*problem.scores[:-1], problem.value_size)
            logsumexp = None if logsumexp is None else logsumexp.reshape(problem.scores[:-1])
        if not query.dtype.isnative:
            output = output.astype(query.dtype)
        return output, logsumexp


_LEAST: dict[str, Any] = {dtype: np.finfo(dtype).min for dtype in "fd"}
