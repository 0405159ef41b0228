"""Attention by two stacks of products and one kernel between them, for all dtypes and bands.

Only the scores of one block of rows are held at a time: cuBLAS writes them, a kernel turns them
into weights in place, and cuBLAS multiplies these with the values.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import cupy
import numpy as np

from polyattn.plugin import Array, Backend, Kernel, Operands, Problem, Span, band, column_span
from polyattn_cupy import rows
from polyattn_cupy.products import SIZES, Matrices, multiply, why_no_cublas
from polyattn_cupy.shapes import empty_result, one_batch_axis, with_score_axes

__all__ = ["Block", "Fused", "blocks"]

# Rows of a block if a band hides scores: few enough to skip most of what it hides, and enough for
# an efficient product.
BAND_ROWS = 512
# float16 weights are scaled by this: otherwise those of a long row would be in the range where
# float16 has few digits. No weight is above 1, so all of them stay finite.
WEIGHT_SCALE = {"float16": 2.0**15}


class Fused(Kernel):
    """Products by cuBLAS, and everything between them in one kernel."""

    name = "fused"
    features = frozenset({
        "batch_broadcast", "bias", "causal", "grouped_heads", "logsumexp", "mask", "query_offset",
        "query_offset_array", "scale", "sinks", "softcap", "value_size", "window",
    })  # fmt: skip
    # A weight of 0 is multiplied by the value of the masked key, which may be NaN.
    poison_safe = False
    tile = 2**26

    def reasons_against(self, problem: Problem) -> list[str]:
        """Return why cuBLAS cannot compute the problem."""
        reasons = []
        missing = why_no_cublas()
        if missing is not None:
            reasons.append(missing)
        if 0 in problem.scores or 0 in (problem.head_size, problem.value_size):
            reasons.append("it takes no empty arrays")
        if problem.scale == 0:
            reasons.append("it takes no scale of 0, for which cuBLAS ignores NaN in query and key")
        return reasons

    def __call__(
        self, problem: Problem, operands: Operands, backend: Backend
    ) -> tuple[Array, Array | None]:
        """Return the output, and the logsumexp if the problem asks for it."""
        group_size = problem.heads // problem.key_heads
        query, key, value = (
            _stacked(problem, array, count)
            for array, count in zip(operands[:3], (group_size, 1, 1), strict=True)
        )
        output, logsumexp = empty_result(problem, operands.query.dtype)
        record, arrays = _record(problem, operands, logsumexp)
        cut = blocks(problem, self.tile)
        scores = cupy.empty(max(block.size for block in cut), problem.accumulator)
        record["scores"] = scores.data.ptr
        step = group_size * problem.query_length * problem.value_size
        result = Matrices(output.data.ptr, problem.value_size, step, problem.dtype)
        for block in cut:
            _attend(problem, block, (query[0], key[0], value[0], result), record)
        del arrays  # kept alive until here, since the kernels have only their addresses
        return output, logsumexp


class Block(NamedTuple):
    """Some rows of some key/value heads, and the keys that they may see."""

    pairs: Span  # of a batch item and a key/value head
    rows: Span  # query rows, those of the heads of a group one after another
    columns: Span  # the keys, at least one

    @property
    def pitch(self) -> int:
        """Scores from one row to the next, a multiple of 8 for tensor cores."""
        return -(-self.columns.length // 8) * 8

    @property
    def size(self) -> int:
        """Number of scores that its memory holds."""
        return self.pairs.length * self.rows.length * self.pitch


@lru_cache(maxsize=64)
def blocks(problem: Problem, tile: int) -> tuple[Block, ...]:
    """Cut a call into blocks of at most `tile` scores, or of one row.

    A block with rows of several heads of a group has all rows of these heads.
    """
    length, group_size = problem.query_length, problem.heads // problem.key_heads
    pairs = Span(0, math.prod(problem.batch) * problem.key_heads)
    most = max(1, tile // problem.key_length)
    if problem.masks_by_position:
        most = min(most, BAND_ROWS)
    if most >= length:
        seen = column_span(problem, Span(0, length))
        cut = [(part, seen) for part in Span(0, group_size * length).split(most // length * length)]
    else:
        cut = [
            (Span(first + part.start, first + part.stop), column_span(problem, part))
            for first in range(0, group_size * length, length)
            for part in Span(0, length).split(most)
        ]
    result = []
    for part, seen in cut:
        columns = seen if seen.length else Span(0, 1)
        count = tile // (part.length * columns.length)
        result += [Block(some, part, columns) for some in pairs.split(max(1, count))]
    return tuple(result)


def _attend(
    problem: Problem,
    block: Block,
    arrays: tuple[Matrices, Matrices, Matrices, Matrices],
    record: Any,
) -> None:
    """Compute one block of the output."""
    query, key, value, output = arrays
    pairs, folded, columns = block
    count, height = pairs.length, folded.length
    scores = Matrices(int(record["scores"]), block.pitch, height * block.pitch, problem.accumulator)
    multiply(
        query.at(pairs.start, folded.start),
        key.at(pairs.start, columns.start),
        scores,
        (count, height, columns.length, problem.head_size),
        transposed=True,
        factor=problem.scale,
    )
    record["pitch"], record["pair"] = block.pitch, pairs.start
    record["row"], record["rows"] = folded.start, height
    record["key"], record["keys"] = columns.start, columns.length
    rows.launch(record, count * height, problem.dtype, problem.bias_dtype or problem.dtype)
    narrower = SIZES[problem.accumulator] // SIZES[problem.dtype]
    weights = Matrices(
        scores.pointer, scores.pitch * narrower, scores.step * narrower, problem.dtype
    )
    multiply(
        weights,
        value.at(pairs.start, columns.start),
        output.at(pairs.start, folded.start),
        (count, height, problem.value_size, columns.length),
        factor=1 / WEIGHT_SCALE.get(problem.dtype, 1.0),
    )


def _stacked(problem: Problem, array: Array, group_size: int) -> tuple[Matrices, Array]:
    """Return query, key or value as one stack over items and key/value heads, and its array."""
    length, size = array.shape[-2:]
    array = one_batch_axis(problem, array)
    # A copy, if the axes that are merged have no common stride.
    array = array.reshape(-1, group_size * length, size)
    step, pitch, next_to = _strides(array)
    if next_to != 1 or pitch < size or step < 0:
        array = cupy.ascontiguousarray(array)
        step, pitch, _ = _strides(array)
    return Matrices(array.data.ptr, pitch, step, problem.dtype), array


def _strides(array: Array) -> tuple[int, int, int]:
    """Return the strides of a stack in elements, contiguous ones for axes of length 1."""
    step, pitch, next_to = (stride // array.dtype.itemsize for stride in array.strides)
    count, length, size = array.shape
    pitch = size if length == 1 else pitch
    return length * pitch if count == 1 else step, pitch, 1 if size == 1 else next_to


def _record(problem: Problem, x: Operands, logsumexp: Array | None) -> tuple[Any, list[Array]]:
    """Return a record of `rows.ROWS` for all blocks, and the arrays that it points to."""
    low, high = band(problem)
    record = np.zeros((), rows.ROWS)
    # An end outside int64 is beyond every key.
    record["low"] = rows.NO_LOW if low is None else max(low, rows.NO_LOW)
    record["high"] = rows.NO_HIGH if high is None else min(high, rows.NO_HIGH)
    record["length"], record["groups"] = problem.query_length, problem.key_heads
    record["group_size"] = problem.heads // problem.key_heads
    record["softcap"] = problem.softcap or 0
    record["weight_scale"] = WEIGHT_SCALE.get(problem.dtype, 1.0)
    pointed: dict[str, Array] = {}
    for name, array in (("mask", x.mask), ("bias", x.bias)):
        if array is not None:
            pointed[name] = whole = with_score_axes(problem, array)
            for axis, stride, length in zip(
                ("item", "head", "row", "key"), whole.strides, whole.shape, strict=True
            ):
                record[f"{name}_{axis}"] = 0 if length == 1 else stride // whole.dtype.itemsize
    if x.sinks is not None:
        pointed["sinks"] = cupy.ascontiguousarray(x.sinks.astype(problem.accumulator))
    if problem.query_offset is None:
        offset: Any = x.query_offset
        whole = cupy.broadcast_to(offset.astype("int64"), (*problem.batch, 1, 1, 1))
        pointed["offset"] = cupy.ascontiguousarray(whole)
    if logsumexp is not None:
        pointed["logsumexp"] = logsumexp
    for name, array in pointed.items():
        record[name] = array.data.ptr
    return record, list(pointed.values())
