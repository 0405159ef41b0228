"""cuDNN's fused attention, for the calls that it computes as docs/semantics.md defines.

cuDNN applies the bands that its options can express. Everything else that hides keys becomes one
bias, made for the call. This bias is finite, so a row that sees no key comes out as an average of
all values, and is corrected afterwards.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import cupy
import numpy as np

from polyattn.plugin import Array, Backend, Indices, Kernel, Operands, Problem, Span, band
from polyattn_cupy import graphs, loading, plans
from polyattn_cupy.graphs import Band, Graph, Tensor
from polyattn_cupy.shapes import empty_result, one_batch_axis, with_score_axes

__all__ = ["Cudnn"]

# The bias of a hidden key, and the least bias. It is float32 for all inputs, because float16 has no
# number that is far below all scores. It is finite and far from the ends of float32, because cuDNN
# subtracts the greatest score of a row from each score, and the difference must not overflow.
UNSEEN = -(2.0**40)
# A bias of more elements than this (256 MiB) would cost more than cuDNN saves.
LARGEST_MADE_BIAS = 2**26
# cuDNN reads 16 bytes at a time and checks neither address nor strides (cudnn-frontend#1571).
ALIGNMENT = 16

_Strides = tuple[int, ...]


class Cudnn(Kernel):
    """cuDNN's attention, through nvidia-cudnn-frontend."""

    name = "cudnn"
    features = frozenset({
        "batch_broadcast", "bias", "causal", "grouped_heads", "logsumexp", "mask", "mask_mod",
        "query_offset", "query_offset_array", "scale", "softcap", "value_size", "window",
    })  # fmt: skip
    # A bias does not hide NaN, and a weight of 0 is multiplied by the value, which may be NaN.
    poison_safe = False

    def reasons_against(self, problem: Problem) -> list[str]:
        """Return why cuDNN cannot compute the problem, or would compute something else."""
        missing = loading.why_no_library()
        if missing is not None:
            return [missing]
        reasons = _static_reasons(problem)
        if not reasons:
            device = int(problem.device.partition(":")[2] or 0)
            reasons += _device_reasons(problem, device)
        return reasons

    def remark(self, problem: Problem) -> str | None:
        """Return the versions of cuDNN and its frontend."""
        return ", ".join(" ".join(item) for item in sorted(loading.versions().items()))

    def __call__(
        self, problem: Problem, operands: Operands, backend: Backend
    ) -> tuple[Array, Array | None]:
        """Return the output, and the logsumexp if the problem asks for it."""
        query, key, value = (_ready(problem, array) for array in operands[:3])
        output, logsumexp = empty_result(problem, query.dtype)
        pointers = {
            graphs.QUERY: query.data.ptr,
            graphs.KEY: key.data.ptr,
            graphs.VALUE: value.data.ptr,
            graphs.OUTPUT: output.data.ptr,
        }
        bias = empty_rows = None
        if logsumexp is not None:
            pointers[graphs.LOGSUMEXP] = logsumexp.data.ptr
        if _needs_bias(problem):
            bias, empty_rows = _made_bias(problem, operands, backend)
            pointers[graphs.BIAS] = bias.data.ptr
        graph = _graph(problem, query.strides, key.strides, value.strides)
        plans.run(graph, pointers)
        if empty_rows is not None:
            # All bits of a 0 are 0, in either dtype.
            bits = output.view(np.uint16).reshape(*query.shape[:3], problem.value_size)
            cupy.copyto(bits, 0, where=empty_rows[..., None])
            if logsumexp is not None:
                cupy.copyto(logsumexp.reshape(query.shape[:3]), -math.inf, where=empty_rows)
        return output, logsumexp


# ---- what cuDNN can compute --------------------------------------------------------------------


def _static_reasons(problem: Problem) -> list[str]:
    reasons = []
    if problem.dtype not in ("float16", "bfloat16"):
        reasons.append("it supports float16 and bfloat16 only")
    sizes = (problem.head_size, problem.value_size)
    if 0 in problem.scores or 0 in sizes:
        reasons.append("it takes no empty arrays")
    if any(size % 8 for size in sizes):
        reasons.append(f"head and value size must be a multiple of 8; got {sizes}")
    if problem.scale <= 0:
        reasons.append(f"it takes only a scale above 0; got {problem.scale}")
    made = math.prod(_bias_shape(problem)) if _needs_bias(problem) else 0
    if problem.softcap is not None and (made or _band(problem) is not None):
        reasons.append("it caps scores only if no key is hidden and no bias added")
    if made > LARGEST_MADE_BIAS:
        reasons.append(f"it would need a bias of {made:,} elements, above {LARGEST_MADE_BIAS:,}")
    return reasons


def _device_reasons(problem: Problem, device: int) -> list[str]:
    capability = plans.compute_capability(device)
    if capability < (8, 0):
        major, minor = capability
        return [f"it needs compute capability 8.0; this device has {major}.{minor}"]
    if (
        capability >= (10, 0)
        and "grouped_heads" in problem.features
        and loading.library().backend_version() < 92600
    ):
        return ["cuDNN before 9.26 groups heads wrongly on this device (pytorch#193893)"]
    refused = plans.why_unsupported(_graph(problem), device)
    return [] if refused is None else [refused]


@lru_cache(maxsize=256)
def _band(problem: Problem) -> Band | None:
    """Return the band of causal and window, or None if cuDNN's options cannot express it."""
    low, high = band(problem)
    offset, last = problem.query_offset, problem.key_length - problem.query_length
    if (low is None and high is None) or offset is None or offset not in (0, last):
        return None
    bottom_right = offset != 0
    if last < 0 and (bottom_right or low is not None):
        return None  # some rows would see no key
    if bottom_right and not problem.features.isdisjoint(("bias", "mask", "mask_mod")):
        return None
    return Band(
        bottom_right, None if low is None else offset - low, None if high is None else high - offset
    )


@lru_cache(maxsize=256)
def _needs_bias(problem: Problem) -> bool:
    """Return whether a bias, mask or band is asked for that cuDNN's options cannot express."""
    if not problem.features.isdisjoint(("bias", "mask", "mask_mod")):
        return True
    return band(problem) != (None, None) and _band(problem) is None


def _bias_shape(problem: Problem) -> tuple[int, int, int, int]:
    """Return the shape of the bias that is made for a call."""
    rank = len(problem.batch) + 3
    parts = [shape for shape in (problem.mask, problem.bias) if shape is not None]
    if "mask_mod" in problem.features:
        parts.append(problem.scores)
    if band(problem) != (None, None):
        lengths = problem.scores[-2:]
        parts.append((*problem.batch, 1, *lengths) if problem.query_offset is None else lengths)
    common = np.broadcast_shapes((1,) * rank, *parts)
    items = 1 if math.prod(common[:-3]) == 1 else math.prod(problem.batch)
    return items, *common[-3:-1], problem.key_length


@lru_cache(maxsize=1024)
def _graph(
    problem: Problem,
    query: _Strides | None = None,
    key: _Strides | None = None,
    value: _Strides | None = None,
) -> Graph:
    """Return the graph of a problem, its arrays with these strides in bytes or contiguous."""
    items, (heads, length, keys) = math.prod(problem.batch), problem.scores[-3:]
    groups, size, value_size = problem.key_heads, problem.head_size, problem.value_size
    bias = None
    if _needs_bias(problem):
        bias = _tensor(_bias_shape(problem), "float32", None)
    return Graph(
        query=_tensor((items, heads, length, size), problem.dtype, query),
        key=_tensor((items, groups, keys, size), problem.dtype, key),
        value=_tensor((items, groups, keys, value_size), problem.dtype, value),
        output=_tensor((items, heads, length, value_size), problem.dtype, None),
        bias=bias,
        band=_band(problem),
        scale=problem.scale,
        softcap=problem.softcap,
        logsumexp="logsumexp" in problem.features,
    )


def _tensor(shape: tuple[int, ...], dtype: str, strides: _Strides | None) -> Tensor:
    """Return the description of an array with strides in bytes, or of a contiguous array.

    The stride of an axis of length 1 has no meaning. It is described as that of a contiguous array,
    so that arrays that differ only in it share a plan.
    """
    elements = [1] * 4
    for axis in (2, 1, 0):
        if strides is None or shape[axis] == 1:
            elements[axis] = _aligned(elements[axis + 1] * shape[axis + 1])
        else:
            elements[axis] = strides[axis] // 2
    return Tensor(shape, tuple(elements), dtype)


# ---- the arrays of a call ----------------------------------------------------------------------


def _ready(problem: Problem, array: Array) -> Array:
    """Return query, key or value with one batch axis, copied if cuDNN cannot read its memory."""
    array = one_batch_axis(problem, array)
    if array.data.ptr % ALIGNMENT or not _is_readable(array.shape, array.strides):
        return array.copy(order="C")
    return array


@lru_cache(maxsize=1024)
def _is_readable(shape: tuple[int, ...], strides: _Strides) -> bool:
    """Return whether cuDNN reads an array of 16-bit numbers with these strides in bytes."""
    *outer, last = strides
    return last == 2 and all(
        length == 1 or (stride > 0 and stride % ALIGNMENT == 0)
        for length, stride in zip(shape, outer, strict=False)
    )


def _aligned(count: int) -> int:
    """Round up to a count of elements that ends on the alignment; 16 bits are the smallest."""
    return -(-count // 8) * 8


def _made_bias(problem: Problem, x: Operands, backend: Backend) -> tuple[Array, Array]:
    """Return bias, masks and band as one bias, and which rows see no key."""
    rows, columns = Span(0, problem.query_length), Span(0, problem.key_length)
    indices = Indices(problem, backend.xp, x, rows, columns)
    seen: Any = None
    for part in indices.visible(banded=band(problem) != (None, None)):
        seen = part if seen is None else seen & part
    shift: Any = np.float32(0)
    if x.bias is not None:
        shift = x.bias.astype(np.float32)
        finite = shift != -math.inf
        seen = finite if seen is None else seen & finite
        shift = with_score_axes(problem, cupy.maximum(shift, np.float32(UNSEEN)))
    seen = with_score_axes(problem, seen)
    shape = _bias_shape(problem)
    bias = cupy.empty((*shape[:-1], _aligned(problem.key_length)), np.float32)[..., : shape[-1]]
    bias[...] = cupy.where(seen, shift, np.float32(UNSEEN))
    return bias, ~seen.any(axis=-1)
