"""The blocks of the fused kernel, and the arrays and records that its products and kernels read."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import cupy
import numpy as np

from polyattn._core.tiles.visibility import score_axes
from polyattn.plugin import Array, Operands, Problem, Span, band, column_span, one_batch_axis
from polyattn_cupy import softmax_cuda
from polyattn_cupy.products import Matrices

# Rows of a block if a band hides scores: few enough to skip most of what it hides, and enough for
# an efficient product.
BAND_ROWS = 512


class ScoreBlock(NamedTuple):
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

    def matrices(self, pointer: Any, dtype: str) -> Matrices:
        """Return its scores at an address."""
        return Matrices(int(pointer), self.pitch, self.rows.length * self.pitch, dtype)


@lru_cache(maxsize=64)
def blocks(problem: Problem, tile: int) -> tuple[ScoreBlock, ...]:
    """Cut a call into blocks of at most `tile` scores, or of one row."""
    # A block with rows of several heads of a group has all rows of these heads.
    length, group_size = problem.query_length, problem.group_size
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
        result += [ScoreBlock(some, part, columns) for some in pairs.split(max(1, count))]
    return tuple(result)


def stacked(problem: Problem, array: Array, group_size: int) -> tuple[Matrices, Array]:
    """Return query, key or value as one stack over items and key/value heads, and its array."""
    length, size = array.shape[-2:]
    array = one_batch_axis(problem, array, cupy)
    # A copy, if the merged axes cannot be described by one stride.
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


def record_of(problem: Problem, x: Operands, **others: Array | None) -> tuple[Any, list[Array]]:
    """Return a record of `softmax_cuda.ROWS` for all blocks, `others` by name, and its arrays."""
    low, high = band(problem)
    record = np.zeros((), softmax_cuda.ROWS)
    # An end outside int64 is beyond every key.
    record["low"] = softmax_cuda.NO_LOW if low is None else max(low, softmax_cuda.NO_LOW)
    record["high"] = softmax_cuda.NO_HIGH if high is None else min(high, softmax_cuda.NO_HIGH)
    record["length"], record["groups"] = problem.query_length, problem.key_heads
    record["group_size"] = problem.group_size
    record["softcap"] = problem.softcap or 0
    pointed: dict[str, Array] = {}
    for name, array in (("mask", x.mask), ("bias", x.bias)):
        if array is not None:
            pointed[name] = whole = score_axes(problem, array, cupy)
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
    pointed |= {name: array for name, array in others.items() if array is not None}
    for name, array in pointed.items():
        record[name] = array.data.ptr
    return record, list(pointed.values())


def begin(record: Any, block: ScoreBlock) -> None:
    """Let a record be that of a block."""
    record["pitch"], record["pair"] = block.pitch, block.pairs.start
    record["row"], record["rows"] = block.rows.start, block.rows.length
    record["key"], record["keys"] = block.columns.start, block.columns.length
