"""Attention by two stacks of products with one pass between them, for all dtypes and all bands.

The scores of a block of rows are held, never those of the whole call: cuBLAS writes them, one
kernel makes weights of them in their place, and cuBLAS multiplies these with the values.
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
from polyattn_cupy.shapes import one_batch_axis, with_score_axes

__all__ = ["Block", "Fused", "blocks"]

# Rows of a block where a band cuts the scores: few enough that most of what it hides is skipped,
# enough for a product.
STRIP = 512
# float16 weights are written this many times as large: as they are, those of a long row would lie
# where float16 has few digits left. None is above 1, so that all stay in its range.
LIFT = {"float16": 2.0**15}


class Fused(Kernel):
    """Products by cuBLAS, and all between them in one kernel."""

    name = "fused"
    features = frozenset(
        {
            "batch_broadcast",
            "bias",
            "causal",
            "grouped_heads",
            "logsumexp",
            "mask",
            "query_offset",
            "query_offset_array",
            "scale",
            "sinks",
            "softcap",
            "value_size",
            "window",
        }
    )
    # A weight of 0 is multiplied with whatever the masked key's value holds.
    poison_safe = False
    tile = 2**26

    def reasons_against(self, problem: Problem) -> list[str]:
        """Return why cuBLAS cannot take the problem."""
        reasons = []
        missing = why_no_cublas()
        if missing is not None:
            reasons.append(missing)
        if 0 in problem.scores or 0 in (problem.head_size, problem.value_size):
            reasons.append("it takes no empty arrays")
        if problem.scale == 0:
            reasons.append("cuBLAS reads neither factor of a product that is multiplied by 0")
        return reasons

    def __call__(
        self, problem: Problem, operands: Operands, backend: Backend
    ) -> tuple[Array, Array | None]:
        """Return the output, and the logsumexp if the problem asks for it."""
        members = problem.heads // problem.key_heads
        query, key, value = (
            _stacked(problem, array, count)
            for array, count in zip(operands[:3], (members, 1, 1), strict=True)
        )
        output = cupy.empty((*problem.scores[:-1], problem.value_size), operands.query.dtype)
        logsumexp = None
        if "logsumexp" in problem.features:
            logsumexp = cupy.empty(problem.scores[:-1], problem.accumulator)
        record, kept = _record(problem, operands, logsumexp)
        cut = blocks(problem, self.tile)
        scores = cupy.empty(max(block.size for block in cut), problem.accumulator)
        record["scores"] = scores.data.ptr
        folded = members * problem.query_length
        result = Matrices(
            output.data.ptr, problem.value_size, folded * problem.value_size, problem.dtype
        )
        for block in cut:
            _attend(problem, block, (query[0], key[0], value[0], result), record)
        del kept  # until here, for the kernels know no more than addresses
        return output, logsumexp


class Block(NamedTuple):
    """Some rows of some key/value heads, and the keys that they may see.

    Attributes
    ----------
    units : Span
        Pairs of a batch item and a key/value head.
    rows : Span
        Query rows, the heads of a group folded into them.
    columns : Span
        The keys, at least one.
    """

    units: Span
    rows: Span
    columns: Span

    @property
    def pitch(self) -> int:
        """How many scores from one row to the next: rows begin where tensor cores want them."""
        return -(-self.columns.length // 8) * 8

    @property
    def size(self) -> int:
        """How many scores it has room for."""
        return self.units.length * self.rows.length * self.pitch


@lru_cache(maxsize=64)
def blocks(problem: Problem, tile: int) -> tuple[Block, ...]:
    """Cut a call into blocks.

    Parameters
    ----------
    problem : Problem
        The facts of the call.
    tile : int
        How many scores a block may hold; one row is the least.

    Returns
    -------
    tuple of Block
        The blocks. One that holds rows of several heads of a group holds whole heads.
    """
    length, members = problem.query_length, problem.heads // problem.key_heads
    units = Span(0, math.prod(problem.batch) * problem.key_heads)
    most = max(1, tile // problem.key_length)
    if problem.masks_by_position:
        most = min(most, STRIP)
    if most >= length:
        seen = column_span(problem, Span(0, length))
        cut = [(part, seen) for part in Span(0, members * length).split(most // length * length)]
    else:
        cut = [
            (
                Span(head * length + part.start, head * length + part.stop),
                column_span(problem, part),
            )
            for head in range(members)
            for part in Span(0, length).split(most)
        ]
    found = []
    for part, seen in cut:
        columns = seen if seen.length else Span(0, 1)
        few = tile // (part.length * columns.length)
        found += [Block(some, part, columns) for some in units.split(max(1, few))]
    return tuple(found)


def _attend(
    problem: Problem,
    block: Block,
    arrays: tuple[Matrices, Matrices, Matrices, Matrices],
    record: Any,
) -> None:
    """Compute one block of the output."""
    query, key, value, output = arrays
    units, folded, columns = block
    count, height = units.length, folded.length
    scores = Matrices(int(record["scores"]), block.pitch, height * block.pitch, problem.accumulator)
    multiply(
        query.at(units.start, folded.start),
        key.at(units.start, columns.start),
        scores,
        (count, height, columns.length, problem.head_size),
        transposed=True,
        factor=problem.scale,
    )
    record["pitch"], record["unit"] = block.pitch, units.start
    record["row"], record["rows"] = folded.start, height
    record["key"], record["keys"] = columns.start, columns.length
    rows.launch(record, count * height, problem.dtype, problem.bias_dtype or problem.dtype)
    narrower = SIZES[problem.accumulator] // SIZES[problem.dtype]
    weights = Matrices(
        scores.pointer, scores.pitch * narrower, scores.step * narrower, problem.dtype
    )
    multiply(
        weights,
        value.at(units.start, columns.start),
        output.at(units.start, folded.start),
        (count, height, problem.value_size, columns.length),
        factor=1 / LIFT.get(problem.dtype, 1.0),
    )


def _stacked(problem: Problem, array: Array, members: int) -> tuple[Matrices, Array]:
    """Return query, key or value as one stack over items and key/value heads, and its memory."""
    length, size = array.shape[-2:]
    array = one_batch_axis(problem, array)
    # Copied where no one stride leads through the axes that become one.
    array = array.reshape(-1, members * length, size)
    step, pitch, next_to = _strides(array)
    if next_to != 1 or pitch < size or step < 0:
        array = cupy.ascontiguousarray(array)
        step, pitch, _ = _strides(array)
    return Matrices(array.data.ptr, pitch, step, problem.dtype), array


def _strides(array: Array) -> tuple[int, int, int]:
    """Return the strides of a stack in elements, as they would be where an axis has length 1."""
    step, pitch, next_to = (stride // array.dtype.itemsize for stride in array.strides)
    count, length, size = array.shape
    pitch = size if length == 1 else pitch
    return length * pitch if count == 1 else step, pitch, 1 if size == 1 else next_to


def _record(problem: Problem, x: Operands, logsumexp: Array | None) -> tuple[Any, list[Array]]:
    """Return the record of `rows.ROWS` as far as all blocks share it, and what it points to."""
    low, high = band(problem)
    record = np.zeros((), rows.ROWS)
    # An end beyond int64 is beyond every key.
    record["low"] = rows.NO_LOW if low is None else max(low, rows.NO_LOW)
    record["high"] = rows.NO_HIGH if high is None else min(high, rows.NO_HIGH)
    record["length"], record["groups"] = problem.query_length, problem.key_heads
    record["members"] = problem.heads // problem.key_heads
    record["softcap"] = problem.softcap or 0
    record["lift"] = LIFT.get(problem.dtype, 1.0)
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
