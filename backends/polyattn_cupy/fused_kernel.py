"""Attention by two stacks of products and one kernel between them, for all dtypes and bands.

Only the scores of one block of rows are held at a time: cuBLAS writes them, a kernel turns them
into weights in place, and cuBLAS multiplies these with the values.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import cupy

from polyattn._core.tiles.visibility import why_too_large
from polyattn.plugin import (
    Array,
    Backend,
    Cotangents,
    Gradients,
    Kernel,
    Operands,
    Problem,
    Residuals,
)
from polyattn_cupy import softmax_cuda
from polyattn_cupy.arrays import empty_result
from polyattn_cupy.fused_gradients import gradients
from polyattn_cupy.made_masks import mask_shape, with_mask_array
from polyattn_cupy.products import Matrices, multiply, why_no_cublas
from polyattn_cupy.score_blocks import ScoreBlock, begin, blocks, record_of, stacked

# float16 weights are scaled by this: otherwise those of a long row would be in the range where
# float16 has few digits. No weight is above 1, so all of them stay finite.
WEIGHT_SCALE = {"float16": 2.0**15}


class Fused(Kernel):
    """Products by cuBLAS, and everything between them in one kernel."""

    name = "fused"
    features = frozenset({
        "batch_broadcast", "bias", "causal", "grouped_heads", "logsumexp", "mask",
        "mask_expression", "mask_mod", "query_offset", "query_offset_array", "scale", "sinks",
        "softcap", "value_size", "window",
    })  # fmt: skip
    differentiates: ClassVar = {"backward": frozenset({
        "batch_broadcast", "causal", "grouped_heads", "mask", "mask_expression", "mask_mod",
        "query_offset", "query_offset_array", "scale", "sinks", "softcap", "value_size", "window",
    })}  # fmt: skip
    # A weight of 0 is multiplied by the value of the masked key, which may be NaN.
    promises = frozenset()
    takes_empty = False
    tile = 2**26

    def reasons_against(self, problem: Problem) -> list[str]:
        missing = why_no_cublas()
        reasons = [] if missing is None else [missing]
        if problem.scale == 0:
            reasons.append("it needs a scale other than 0: for 0 cuBLAS reads neither factor")
        return reasons

    def only_on_request(self, problem: Problem) -> str | None:
        made = math.prod(mask_shape(problem) or (0,))
        return why_too_large(made)

    def __call__(
        self, problem: Problem, operands: Operands, backend: Backend
    ) -> tuple[Array, Array | None]:
        group_size = problem.group_size
        operands = with_mask_array(problem, operands, backend)
        query, key, value = (
            stacked(problem, array, count)
            for array, count in zip(operands[:3], (group_size, 1, 1), strict=True)
        )
        output, logsumexp = empty_result(problem, operands.query.dtype)
        record, arrays = record_of(problem, operands, logsumexp=logsumexp)
        record["weight_scale"] = WEIGHT_SCALE.get(problem.dtype, 1.0)
        cut = blocks(problem, self.tile)
        scores = cupy.empty(max(block.size for block in cut), problem.accumulator)
        record["scores"] = scores.data.ptr
        step = group_size * problem.query_length * problem.value_size
        result = Matrices(output.data.ptr, problem.value_size, step, problem.dtype)
        for block in cut:
            _attend(problem, block, (query[0], key[0], value[0], result), record)
        del arrays  # kept alive until here, since the kernels have only their addresses
        return output, logsumexp

    def backward(
        self, problem: Problem, operands: Operands, residuals: Residuals, cotangents: Cotangents,
        backend: Backend,
    ) -> Gradients:  # fmt: skip
        operands = with_mask_array(problem, operands, backend)
        return gradients(problem, operands, residuals, cotangents, backend, self.tile)


def _attend(
    problem: Problem,
    block: ScoreBlock,
    arrays: tuple[Matrices, Matrices, Matrices, Matrices],
    record: Any,
) -> None:
    """Compute one block of the output."""
    query, key, value, output = arrays
    pairs, folded, columns = block
    count, height = pairs.length, folded.length
    scores = block.matrices(record["scores"], problem.accumulator)
    multiply(
        query.at(pairs.start, folded.start),
        key.at(pairs.start, columns.start),
        scores,
        (count, height, columns.length, problem.head_size),
        transposed="y",
        factor=problem.scale,
    )
    begin(record, block)
    name = softmax_cuda.name_of(problem.dtype, problem.bias_dtype or problem.dtype)
    softmax_cuda.launch(record, count * height, name)
    multiply(
        scores.holding(problem.dtype),
        value.at(pairs.start, columns.start),
        output.at(pairs.start, folded.start),
        (count, height, problem.value_size, columns.length),
        factor=1 / WEIGHT_SCALE.get(problem.dtype, 1.0),
    )
