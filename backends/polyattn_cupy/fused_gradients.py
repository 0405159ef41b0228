"""The gradients of the fused kernel: five stacks of products, and one kernel between them.

As in the forward pass, only the scores of one block of rows are held at a time, with the gradients
of their weights. The weights follow from the logsumexp that is known.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import cupy
import numpy as np

from polyattn.plugin import Array, Backend, Cotangents, Gradients, Operands, Problem, Residuals
from polyattn_cupy import softmax_cuda
from polyattn_cupy.arrays import summed
from polyattn_cupy.products import Matrices, multiply
from polyattn_cupy.score_blocks import ScoreBlock, begin, blocks, record_of, stacked


class _Stacks(NamedTuple):
    """The arrays of all products: those that are given, and their gradients."""

    query: Matrices
    key: Matrices
    value: Matrices
    output_gradient: Matrices
    of_query: Matrices
    of_key: Matrices
    of_value: Matrices


def gradients(
    problem: Problem, x: Operands, residuals: Residuals, cotangents: Cotangents, backend: Backend,
    tile: int,
) -> Gradients:  # fmt: skip
    """Return the gradients of a call without a bias, with at most `tile` numbers at a time."""
    # The gradients of scores may be of any size, and float16 has few digits for small numbers.
    dtype: Any = np.dtype("float32") if problem.dtype == "float16" else x.query.dtype
    problem, x = problem._replace(dtype=dtype.name), _in_dtype(x, dtype)
    cotangents = cotangents._replace(output=cotangents.output.astype(dtype, copy=False))
    xp, real = backend.xp, problem.accumulator
    members = problem.group_size
    given = [
        stacked(problem, array, count)
        for array, count in (
            (x.query, members), (x.key, 1), (x.value, 1), (cotangents.output, members),
        )
    ]  # fmt: skip
    sums = [cupy.zeros(array.shape, real) for _, array in given[:3]]
    logsumexp, delta = _of_rows(problem, residuals, cotangents, xp)
    of_softcap = None if problem.softcap is None else cupy.empty(delta.shape, real)
    record, pointed = record_of(problem, x, logsumexp=logsumexp, delta=delta, cap_slopes=of_softcap)
    cut = blocks(problem, max(1, tile // 2))
    scores, slopes = (cupy.empty(max(block.size for block in cut), real) for _ in range(2))
    record["scores"], record["slopes"] = scores.data.ptr, slopes.data.ptr
    stacks = _Stacks(*(stack for stack, _ in given), *map(_contiguous, sums))
    for block in cut:
        _add_block(problem, block, stacks, record)
    del pointed  # kept alive until here, since the kernel has only their addresses
    of_query, of_key, of_value = (
        summed(problem, array.reshape(-1, heads, length, array.shape[-1]), like.shape)
        for array, like, heads, length in (
            (sums[0], x.query, problem.heads, problem.query_length),
            (sums[1], x.key, problem.key_heads, problem.key_length),
            (sums[2], x.value, problem.key_heads, problem.key_length),
        )
    )
    return Gradients(
        query=of_query,
        key=of_key,
        value=of_value,
        sinks=_of_sinks(x, logsumexp, delta, xp),
        # query · its gradient = Σ gradient of the score · score, and the scale is not 0.
        scale=xp.sum(of_query * x.query.astype(real)) / problem.scale,
        softcap=None if of_softcap is None else xp.sum(of_softcap),
    )


def _in_dtype(x: Operands, dtype: Any) -> Operands:
    names = ("query", "key", "value")
    return x._replace(**{name: getattr(x, name).astype(dtype, copy=False) for name in names})


def _of_rows(
    problem: Problem, residuals: Residuals, cotangents: Cotangents, xp: Any
) -> tuple[Array, Array]:
    """Return the logsumexp of each row, and Σ output · output gradient − logsumexp gradient."""
    # Both are 0 in a row without keys, and contiguous of shape (items, H, L).
    real = problem.accumulator
    logsumexp = residuals.logsumexp
    delta = xp.sum(residuals.output.astype(real) * cotangents.output.astype(real), axis=-1)
    if cotangents.logsumexp is not None:
        delta = delta - cotangents.logsumexp.astype(real)
    empty = logsumexp == -math.inf
    zeros = cupy.zeros(delta.shape, real)
    shape = (-1, problem.heads, problem.query_length)
    logsumexp, delta = (
        cupy.ascontiguousarray(cupy.where(empty, zeros, array).reshape(shape))
        for array in (logsumexp.astype(real), delta)
    )
    return logsumexp, delta


def _of_sinks(x: Operands, logsumexp: Array, delta: Array, xp: Any) -> Array | None:
    if x.sinks is None:
        return None
    sinks = x.sinks.astype(delta.dtype)[:, None]
    return -xp.sum(xp.exp(sinks - logsumexp) * delta, axis=(0, 2))


def _contiguous(array: Array) -> Matrices:
    _, length, size = array.shape
    return Matrices(array.data.ptr, size, length * size, array.dtype.name)


def _add_block(problem: Problem, block: ScoreBlock, x: _Stacks, record: Any) -> None:
    """Add what one block of rows gives to the gradients."""
    pairs, folded, columns = block
    count, height, width = pairs.length, folded.length, columns.length
    scores, slopes = (
        block.matrices(record[name], problem.accumulator) for name in ("scores", "slopes")
    )
    query, output_gradient, of_query = (
        stack.at(pairs.start, folded.start) for stack in (x.query, x.output_gradient, x.of_query)
    )
    key, value, of_key, of_value = (
        stack.at(pairs.start, columns.start) for stack in (x.key, x.value, x.of_key, x.of_value)
    )
    size, value_size, scale = problem.head_size, problem.value_size, problem.scale
    multiply(query, key, scores, (count, height, width, size), transposed="y", factor=scale)
    multiply(output_gradient, value, slopes, (count, height, width, value_size), transposed="y")
    begin(record, block)
    softmax_cuda.launch(record, count * height, softmax_cuda.gradient_name_of(problem.dtype))
    weights, slopes = scores.holding(problem.dtype), slopes.holding(problem.dtype)
    by_key = (count, width, value_size, height), (count, width, size, height)
    multiply(weights, output_gradient, of_value, by_key[0], transposed="x", adds=True)
    multiply(slopes, query, of_key, by_key[1], transposed="x", factor=scale, adds=True)
    multiply(slopes, key, of_query, (count, height, size, width), factor=scale)
