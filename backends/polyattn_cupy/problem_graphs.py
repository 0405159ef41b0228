"""The graphs that cuDNN is asked for, from the facts of a problem and the strides of its arrays."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from polyattn.plugin import Problem, Span, band_from, made_shape
from polyattn_cupy.graphs import Band, GradientGraph, Graph, Tensor

# With a bias, cuDNN 9.19 makes NaN of gradients if the last tile of 128 keys is not full
# and the logsumexp is low (pytorch#196678). With lengths given, it leaves out the rest of the tile.
WHOLE_KEYS = 128
# cuDNN's deterministic gradients may need memory for all scores of a run, in 16 bits (1 GiB).
MOST_SCORES = 2**29

_Strides = tuple[int, ...]


@lru_cache(maxsize=256)
def band_of(problem: Problem) -> Band | None:
    """Return the band of causal and window, or None if cuDNN's options cannot express it."""
    offset, last = problem.query_offset, problem.key_length - problem.query_length
    if offset is None or offset not in (0, last):
        return None
    left, right = band_from(problem, offset) or (None, None)
    if left is None and right is None:
        return None
    bottom_right = offset != 0
    if last < 0 and (bottom_right or left is not None):
        return None  # some rows would see no key
    if bottom_right and not problem.masks_by_position_only:
        return None
    return Band(bottom_right, left, right)


@lru_cache(maxsize=256)
def needs_bias(problem: Problem) -> bool:
    """Return whether a bias, mask or band is asked for that cuDNN's options cannot express."""
    if not problem.masks_by_position_only:
        return True
    return band_from(problem, 0) != (None, None) and band_of(problem) is None


def bias_shape(problem: Problem) -> tuple[int, int, int, int]:
    """Return the shape of the bias that is made for a call."""
    made = made_shape(problem, banded=band_from(problem, 0) != (None, None))
    parts = [shape for shape in (problem.mask, problem.bias, made) if shape is not None]
    if "backward" in problem.features and problem.bias is not None:
        parts.append(problem.scores[-2:])  # cuDNN documents gradients of a bias with all rows only
    common = np.broadcast_shapes((1,) * (len(problem.batch) + 3), *parts)
    items = 1 if math.prod(common[:-3]) == 1 else math.prod(problem.batch)
    return items, *common[-3:-1], problem.key_length


@lru_cache(maxsize=1024)
def graph_of(
    problem: Problem,
    query: _Strides | None = None,
    key: _Strides | None = None,
    value: _Strides | None = None,
) -> Graph:
    """Return the graph of a problem, its arrays with these strides in bytes or contiguous."""
    items, (heads, length, keys) = math.prod(problem.batch), problem.scores[-3:]
    groups, size, value_size = problem.key_heads, problem.head_size, problem.value_size
    bias = None
    if needs_bias(problem):
        bias = _tensor(bias_shape(problem), "float32", None)
    return Graph(
        query=_tensor((items, heads, length, size), problem.dtype, query),
        key=_tensor((items, groups, keys, size), problem.dtype, key),
        value=_tensor((items, groups, keys, value_size), problem.dtype, value),
        output=_tensor((items, heads, length, value_size), problem.dtype, None),
        bias=bias,
        band=band_of(problem),
        scale=problem.scale,
        softcap=problem.softcap,
        logsumexp="logsumexp" in problem.features,
    )


@lru_cache(maxsize=1024)
def gradient_graph_of(
    problem: Problem,
    query: _Strides | None = None,
    key: _Strides | None = None,
    value: _Strides | None = None,
    output: _Strides | None = None,
    output_gradient: _Strides | None = None,
) -> GradientGraph:
    """Return the graph of the gradients of one part, as `graph_of` does.

    What is made for a call is contiguous in each part, because a part has some items with all
    heads, or some heads of one item.
    """
    items, groups = _part(problem)
    heads, (length, keys) = problem.group_size * groups, problem.scores[-2:]
    size, value_size, dtype = problem.head_size, problem.value_size, problem.dtype
    bias = None
    if needs_bias(problem):
        all_items, all_heads, *lengths = bias_shape(problem)
        shape = min(all_items, items), min(all_heads, heads), *lengths
        bias = _tensor(shape, "float32", None)
    return GradientGraph(
        query=_tensor((items, heads, length, size), dtype, query),
        key=_tensor((items, groups, keys, size), dtype, key),
        value=_tensor((items, groups, keys, value_size), dtype, value),
        output=_tensor((items, heads, length, value_size), dtype, output),
        output_gradient=_tensor((items, heads, length, value_size), dtype, output_gradient),
        bias=bias,
        bias_gradient="bias" in problem.features,
        lengths=bias is not None and keys % WHOLE_KEYS != 0,
        band=band_of(problem),
        scale=problem.scale,
    )


@lru_cache(maxsize=256)
def parts_of(problem: Problem) -> tuple[tuple[Span, Span], ...]:
    """Return the parts in which gradients are computed: spans of items and of key/value heads.

    All parts have the same shape, so one plan computes them.
    """
    items, groups = _part(problem)
    return tuple(
        (some, part)
        for some in Span(0, math.prod(problem.batch)).split(items)
        for part in Span(0, problem.key_heads).split(groups)
    )


def _part(problem: Problem) -> tuple[int, int]:
    """Return the batch items and key/value heads of a part."""
    items, groups = math.prod(problem.batch), problem.key_heads
    scores = problem.heads // groups * problem.query_length * problem.key_length
    pairs = max(1, MOST_SCORES // scores)
    if pairs < groups:
        return 1, _divisor(groups, pairs)
    return _divisor(items, pairs // groups), groups


def _divisor(number: int, most: int) -> int:
    """Return the greatest divisor of a number that is not above `most`."""
    return max(n for n in range(1, min(number, most) + 1) if number % n == 0)


def _tensor(shape: tuple[int, ...], dtype: str, strides: _Strides | None) -> Tensor:
    """Return the description of a 16-bit array with strides in bytes, or of a contiguous array.

    The stride of an axis of length 1 has no meaning. It is described as that of a contiguous array,
    so that arrays that differ only in it share a plan.
    """
    elements = [1] * 4
    for axis in (2, 1, 0):
        if strides is None or shape[axis] == 1:
            elements[axis] = aligned(elements[axis + 1] * shape[axis + 1])
        else:
            elements[axis] = strides[axis] // 2
    return Tensor(shape, tuple(elements), dtype)


def aligned(count: int) -> int:
    """Round up to a count of elements that ends on the alignment; 16 bits are the smallest."""
    return -(-count // 8) * 8
