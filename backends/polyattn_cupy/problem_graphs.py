"""cuDNN's graph of a call, from the facts of its problem and the strides of its arrays."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np

from polyattn.plugin import CachePadding, Problem, Span
from polyattn.plugin.internal import band_from, made_shape
from polyattn_cupy.graphs import CudnnBand, Graph, Tensor
from polyattn_cupy.made_masks import mask_shape

# With a bias, cuDNN 9.19 makes NaN of gradients if the last tile of 128 keys is not full
# and the logsumexp is low (pytorch#196678). With lengths given, it leaves out the rest of the tile.
WHOLE_KEYS = 128
# cuDNN's deterministic gradients may need memory for all scores of a run, in 16 bits (1 GiB).
MOST_SCORES = 2**29


@lru_cache(maxsize=256)
def band_of(problem: Problem) -> CudnnBand | None:
    """Return the band of causal and window, or None if cuDNN's options cannot express it."""
    offset, last = problem.query_offset, problem.key_length - problem.query_length
    if offset is None or offset not in (0, last) or counts_keys(problem):
        return None
    left, right = band_from(problem, offset) or (None, None)
    if left is None and right is None:
        return None
    bottom_right = offset != 0
    if last < 0 and (bottom_right or left is not None):
        return None  # some rows would see no key
    if bottom_right and not problem.masks_by_position_only:
        return None
    return CudnnBand(bottom_right, left, right)


@lru_cache(maxsize=256)
def counts_keys(problem: Problem) -> bool:
    """Return whether cuDNN gets the number of keys of each item, and no mask beside it."""
    mask = problem.mask_spec
    if mask is None or mask.first_keys is None or problem.features & {"backward", "bias"}:
        return False
    # The newest row of a cache sees all keys before its own.
    is_newest = isinstance(mask, CachePadding) and problem.query_length == 1
    return band_from(problem, 0) == (None, None) or (is_newest and problem.window[0] is None)


@lru_cache(maxsize=256)
def needs_bias(problem: Problem) -> bool:
    """Return whether a call has a bias, or a mask or band that cuDNN's options cannot express."""
    if counts_keys(problem):
        return False
    if not problem.masks_by_position_only:
        return True
    return band_from(problem, 0) != (None, None) and band_of(problem) is None


def bias_shape(problem: Problem) -> tuple[int, int, int, int]:
    """Return the shape of the bias that is made for a call."""
    banded = band_from(problem, 0) != (None, None)
    made = made_shape(problem, banded=banded, mask=mask_shape(problem))
    parts = [shape for shape in (problem.mask, problem.bias, made) if shape is not None]
    common = np.broadcast_shapes((1,) * (len(problem.batch) + 3), *parts)
    items = 1 if math.prod(common[:-3]) == 1 else math.prod(problem.batch)
    # cuDNN's gradients were wrong beside a bias with one row for all (cuDNN 9.19, on an H200).
    rows = problem.query_length if "backward" in problem.features else common[-2]
    return items, common[-3], rows, problem.key_length


@lru_cache(maxsize=1024)
def graph_of(problem: Problem, *strides: tuple[int, ...]) -> Graph:
    """Return the graph of a call, or of the gradients of one part of it, by strides in bytes."""
    # Without strides arrays are contiguous, as is what is made for a call: a part has some items
    # with all heads, or some heads of one item.
    is_gradient = "backward" in problem.features
    items, groups = math.prod(problem.batch), problem.key_heads
    heads, length, keys = problem.scores[-3:]
    if is_gradient:
        items, groups = _part(problem)
        heads = problem.group_size * groups
    sizes = {"query": problem.head_size, "key": problem.head_size, "value": problem.value_size}
    sizes |= {"output": problem.value_size, "output_gradient": problem.value_size}
    given = dict(zip(sizes, strides, strict=False))
    arrays: dict[str, Any] = {}
    for name, size in sizes.items():
        lead = (groups, keys) if name in ("key", "value") else (heads, length)
        arrays[name] = _tensor((items, *lead, size), problem.dtype, given.get(name))
    bias = None
    if needs_bias(problem):
        all_items, all_heads, *lengths = bias_shape(problem)
        shape = min(all_items, items), min(all_heads, heads), *lengths
        bias = _tensor(shape, "float32", None)
    return Graph(
        **{**arrays, "output_gradient": arrays["output_gradient"] if is_gradient else None},
        bias=bias,
        lengths=counts_keys(problem)
        or (is_gradient and bias is not None and keys % WHOLE_KEYS != 0),
        band=band_of(problem),
        scale=problem.scale,
        softcap=problem.softcap,
        logsumexp=not is_gradient and "logsumexp" in problem.features,
    )


@lru_cache(maxsize=256)
def parts_of(problem: Problem) -> tuple[tuple[Span, Span], ...]:
    """Return the parts in which gradients are computed: spans of items and of key/value heads."""
    # All parts have the same shape, so one plan computes them.
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


def _tensor(shape: tuple[int, ...], dtype: str, strides: tuple[int, ...] | None) -> Tensor:
    """Return the description of a 16-bit array with strides in bytes, or of a contiguous array."""
    # An axis of length 1 is described as contiguous, so that arrays that differ in it share a plan.
    elements = [1] * 4
    for axis in (2, 1, 0):
        if strides is None or shape[axis] == 1:
            elements[axis] = aligned(elements[axis + 1] * shape[axis + 1])
        else:
            elements[axis] = strides[axis] // 2
    return Tensor(shape, tuple(elements), dtype)


def aligned(count: int) -> int:
    """Round up to a multiple of 8 elements, which are 16 bytes or more."""
    return -(-count // 8) * 8
