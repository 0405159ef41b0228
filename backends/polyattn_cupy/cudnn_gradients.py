"""The gradients of attention by cuDNN, from the output and the logsumexp that are known.

cuDNN takes the logsumexp as an array and computes exp(score − logsumexp), so it may be that of more
keys than are given.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import cupy
import numpy as np

from polyattn.plugin import (
    Array,
    Backend,
    Cotangents,
    Gradients,
    Operands,
    Problem,
    Residuals,
    Span,
)
from polyattn_cupy import graphs, plans
from polyattn_cupy.arrays import made_bias, packed, ready, summed
from polyattn_cupy.graphs import Graph
from polyattn_cupy.problem_graphs import graph_of, needs_bias, parts_of

# The factors with which a float32 number is a sum of three 16-bit numbers, however large it is.
FACTORS = (2.0**10, 1.0, 2.0**-10)


class _Given(NamedTuple):
    """The arrays of a call that all runs share, with one batch axis."""

    query: Array
    key: Array
    logsumexp: Array
    bias: Array | None


def gradients(
    problem: Problem, x: Operands, residuals: Residuals, cotangents: Cotangents, backend: Backend
) -> Gradients:
    """Return the gradients of a call that cuDNN supports."""
    given = _given(problem, x, residuals.logsumexp, backend)
    value = ready(problem, x.value)
    output, output_gradient = (
        ready(problem, array.astype(value.dtype, copy=False))
        for array in (residuals.output, cotangents.output)
    )
    of_query, of_key, of_value = _run(problem, given, value, output, output_gradient)
    direct = cotangents.logsumexp
    if direct is not None:
        shares = _run(problem, given, *_of_logsumexp(direct, output, value))
        of_query, of_key = of_query + shares[0], of_key + shares[1]
    of_query = summed(problem, of_query, x.query.shape)
    return Gradients(
        query=of_query,
        key=summed(problem, of_key, x.key.shape),
        value=summed(problem, of_value, x.value.shape),
        # query · its gradient = Σ gradient of the score · score, and the scale is above 0.
        scale=backend.xp.sum(of_query * x.query.astype(np.float32)) / problem.scale,
    )


def _given(problem: Problem, x: Operands, logsumexp: Array, backend: Backend) -> _Given:
    query, key = (ready(problem, array) for array in (x.query, x.key))
    bias = None
    if needs_bias(problem):
        bias, _ = made_bias(problem, x, backend)
        # All scores of a row without keys are about -2**40, so that its weights are 0.
        logsumexp = cupy.where(logsumexp == -math.inf, np.float32(0), logsumexp)
    logsumexp = logsumexp.astype(np.float32, copy=False).reshape(query.shape[:3])
    return _Given(query, key, logsumexp, bias)


def _run(
    problem: Problem, given: _Given, value: Array, output: Array, output_gradient: Array
) -> list[Array]:
    """Return those of query, key and value in float32, with one batch axis, part by part."""
    query, key, logsumexp, bias = given
    strides = (array.strides for array in (query, key, value, output, output_gradient))
    graph = graph_of(problem, *strides)
    gradients = [cupy.empty(array.shape, array.dtype) for array in (query, key, value)]
    by_head = {
        graphs.QUERY: query,
        graphs.OUTPUT: output,
        graphs.OUTPUT_GRADIENT: output_gradient,
        graphs.LOGSUMEXP: logsumexp,
        graphs.QUERY_GRADIENT: gradients[0],
    }
    by_group = {
        graphs.KEY: key,
        graphs.VALUE: value,
        graphs.KEY_GRADIENT: gradients[1],
        graphs.VALUE_GRADIENT: gradients[2],
    }
    if bias is not None:
        by_head[graphs.BIAS] = bias
    lengths = _lengths(problem, graph) if graph.lengths else {}
    members = problem.group_size
    for items, groups in parts_of(problem):
        heads = Span(groups.start * members, groups.stop * members)
        arrays = {uid: _cut(array, items, heads) for uid, array in by_head.items()}
        arrays |= {uid: _cut(array, items, groups) for uid, array in by_group.items()}
        arrays[graphs.LOGSUMEXP] = packed(arrays[graphs.LOGSUMEXP])
        plans.run(graph, {uid: array.data.ptr for uid, array in (arrays | lengths).items()})
    return [array.astype(np.float32) for array in gradients]


def _cut(array: Array, items: Span, heads: Span) -> Array:
    """Return some items and heads of an array, which may have one for all."""
    many_items, many_heads = (length > 1 for length in array.shape[:2])
    return array[
        slice(*items) if many_items else slice(None), slice(*heads) if many_heads else slice(None)
    ]


def _lengths(problem: Problem, graph: Graph) -> dict[int, Array]:
    """Return the number of queries and keys of each item of a part: all of them."""
    shape = (graph.query.shape[0], 1, 1, 1)
    rows, keys = (cupy.full(shape, length, np.int32) for length in problem.scores[-2:])
    return {graphs.QUERY_LENGTHS: rows, graphs.KEY_LENGTHS: keys}


def _of_logsumexp(gradient: Array, output: Array, value: Array) -> tuple[Array, Array, Array]:
    """Return a value, an output and its gradient for the share of the logsumexp's gradient."""
    # cuDNN computes p (dO·V − dO·O) as the gradient of a score. That is p · gradient
    # for V = 0 and dO·O = −gradient. The 16-bit numbers in dO add up to the float32 gradient. The
    # gradient of this value is meaningless.
    # In float32 until the end: CuPy's bfloat16 arrays can do little but be converted.
    result, result_gradient = (cupy.zeros(output.shape, np.float32) for _ in range(2))
    rest = gradient.reshape(output.shape[:3]).astype(np.float32)
    for place, factor in enumerate(FACTORS):
        part = (rest / np.float32(factor)).astype(output.dtype).astype(np.float32)
        result[..., place], result_gradient[..., place] = -factor, part
        rest = rest - part * np.float32(factor)
    dtype = output.dtype
    return cupy.zeros(value.shape, dtype), result.astype(dtype), result_gradient.astype(dtype)
