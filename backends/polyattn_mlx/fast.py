"""The kernel that calls MLX's own attention, for calls that it computes as the semantics define."""

from __future__ import annotations

import contextlib
import functools
import os
from typing import Any, cast

import mlx.core as mx

from polyattn._core.tiles.visibility import band_from, score_axes
from polyattn.plugin import (
    Array,
    Backend,
    Kernel,
    Operands,
    Problem,
    cleared,
    empty_rows,
    may_have_empty_rows,
    one_batch_axis,
    visible_keys,
)


class Fast(Kernel):
    """`mx.fast.scaled_dot_product_attention`."""

    # It gives a row without keys the mean of the values, so with a mask such rows are cleared here.

    name = "fast"
    features = frozenset({
        "batch_broadcast", "causal", "grouped_heads", "mask", "query_offset", "query_offset_array",
        "scale", "sinks", "value_size", "window",
    })  # fmt: skip
    # The weight 0 of a masked key is multiplied by its value, which may be NaN.
    promises = frozenset()
    takes_empty = False
    takes_band = True

    def reasons_against(self, problem: Problem) -> list[str]:
        """Return what MLX's operation computes differently."""
        if problem.dtype == "float64":
            return ["its softmax is in float32, and this is float64"]
        return []

    def remark(self, problem: Problem) -> str | None:
        """Return how float32 may be rounded on a GPU."""
        kind = problem.device_kind or mx.default_device().type.name
        exact = problem.dtype != "float32" or os.environ.get("MLX_ENABLE_TF32") == "0"
        if kind == "cpu" or exact:
            return None
        return "float32 is multiplied as TF32 where the GPU can, unless MLX_ENABLE_TF32=0 is set"

    def __call__(
        self, problem: Problem, operands: Operands, backend: Backend
    ) -> tuple[Array, Array | None]:
        xp = backend.xp
        query, key, value = (one_batch_axis(problem, x, xp) for x in operands[:3])
        mask = _mask(problem, operands, xp)
        output = _attend(problem.scale, query, key, value, mask, operands.sinks)
        if isinstance(mask, mx.array) and may_have_empty_rows(problem):
            output, _ = cleared(output, None, empty_rows(mask, xp), xp)
        return output.reshape(*problem.scores[:-1], problem.value_size), None


def _attend(
    scale: float,
    query: mx.array,
    key: mx.array,
    value: mx.array,
    mask: mx.array | str | None,
    sinks: mx.array | None,
) -> mx.array:
    attend = functools.partial(mx.fast.scaled_dot_product_attention, scale=scale, mask=mask)
    dtype = query.dtype
    # Fused kernels sum 16 bits in float32, the others in 16 bits; sinks are cast to the dtype.
    if dtype != mx.float32 and (sinks is None or sinks.dtype == dtype):
        with contextlib.suppress(ValueError):  # there is none for this device, size or gradient
            return attend(query, key, value, sinks=sinks, force_fused=True)
    query, key, value = (x.astype(mx.float32) for x in (query, key, value))
    sinks = None if sinks is None else sinks.astype(mx.float32)
    return attend(query, key, value, sinks=sinks, force_fused=False).astype(dtype)


def _mask(problem: Problem, operands: Operands, xp: Any) -> mx.array | str | None:
    """Return which keys each row sees: MLX's own causal mask if every row sees some key."""
    newest = problem.key_length - problem.query_length
    if operands.mask is None and newest >= 0 and band_from(problem, newest) == (None, 0):
        return "causal"
    seen = visible_keys(problem, operands, xp)
    return None if seen is None else cast(mx.array, score_axes(problem, seen, xp))
