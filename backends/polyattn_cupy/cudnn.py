"""cuDNN's fused attention, for what it computes by the semantics.

Bands that cuDNN knows it applies itself. All else that hides a key becomes one bias that is made
for the call, with which no key is quite absent: a row of which none is seen comes out as an
average, and is put right afterwards.
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
from polyattn_cupy.shapes import one_batch_axis, with_score_axes

__all__ = ["Cudnn"]

# The bias of a key that is not seen. In float32, whatever the inputs: float16 has no number that
# is far below all scores. Finite, since cuDNN subtracts the greatest score of a row from each, and
# far from the ends of float32, where their difference overflows; a bias below it is made it.
UNSEEN = -(2.0**40)
# Above this many numbers (256 MiB of float32) a bias made for the call costs more than it saves.
LARGEST_MADE_BIAS = 2**26
# cuDNN reads 16 bytes at a time and checks neither address nor strides (cudnn-frontend#1571).
ALIGNMENT = 16

_Strides = tuple[int, ...]


class Cudnn(Kernel):
    """cuDNN's attention, through nvidia-cudnn-frontend."""

    name = "cudnn"
    features = frozenset(
        {
            "batch_broadcast",
            "bias",
            "causal",
            "grouped_heads",
            "logsumexp",
            "mask",
            "mask_mod",
            "query_offset",
            "query_offset_array",
            "scale",
            "softcap",
            "value_size",
            "window",
        }
    )
    # A bias hides no NaN, and a weight of 0 is multiplied with whatever a value holds.
    poison_safe = False

    def reasons_against(self, problem: Problem) -> list[str]:
        """Return why cuDNN cannot take the problem, or would compute something else."""
        missing = loading.why_no_library()
        if missing is not None:
            return [missing]
        reasons = _static_reasons(problem)
        if not reasons:
            device = int(problem.device.partition(":")[2] or 0)
            reasons += _device_reasons(problem, device)
        return reasons

    def remark(self, problem: Problem) -> str | None:
        """Name the versions at work."""
        found = loading.versions()
        return ", ".join(f"{name} {version}" for name, version in sorted(found.items()))

    def __call__(
        self, problem: Problem, operands: Operands, backend: Backend
    ) -> tuple[Array, Array | None]:
        """Return the output, and the logsumexp if the problem asks for it."""
        query, key, value = (_ready(problem, array) for array in operands[:3])
        items, heads, length, _ = query.shape
        output = cupy.empty((items, heads, length, problem.value_size), query.dtype)
        pointers = {
            graphs.QUERY: query.data.ptr,
            graphs.KEY: key.data.ptr,
            graphs.VALUE: value.data.ptr,
            graphs.OUTPUT: output.data.ptr,
        }
        logsumexp = bias = unseen = None
        if "logsumexp" in problem.features:
            logsumexp = cupy.empty((items, heads, length), np.float32)
            pointers[graphs.LOGSUMEXP] = logsumexp.data.ptr
        if _needs_bias(problem):
            bias, unseen = _made_bias(problem, operands, backend)
            pointers[graphs.BIAS] = bias.data.ptr
        graph = _graph(problem, query.strides, key.strides, value.strides)
        plans.run(graph, pointers)
        if unseen is not None:
            # As bits, which are all 0 in a 0 of either dtype.
            cupy.copyto(output.view(np.uint16), 0, where=unseen[..., None])
            if logsumexp is not None:
                cupy.copyto(logsumexp, -math.inf, where=unseen)
        shape = (*problem.batch, heads, length)
        if logsumexp is not None:
            logsumexp = logsumexp.reshape(shape)
        return output.reshape(*shape, problem.value_size), logsumexp


# ---- what cuDNN takes --------------------------------------------------------------------------


def _static_reasons(problem: Problem) -> list[str]:
    reasons = []
    if problem.dtype not in ("float16", "bfloat16"):
        reasons.append("it takes float16 and bfloat16 alone")
    sizes = (problem.head_size, problem.value_size)
    if 0 in problem.scores or 0 in sizes:
        reasons.append("it takes no empty arrays")
    if any(size % 8 for size in sizes):
        reasons.append("it takes vectors of a multiple of 8 numbers")
    if problem.scale <= 0:
        reasons.append("it takes a scale above 0")
    made = math.prod(_bias_shape(problem)) if _needs_bias(problem) else 0
    if problem.softcap is not None and (made or _band(problem) is not None):
        reasons.append("it caps scores only where no key is hidden and nothing added")
    if made > LARGEST_MADE_BIAS:
        reasons.append(f"it needs a bias made for it, here of {made:,} numbers")
    return reasons


def _device_reasons(problem: Problem, device: int) -> list[str]:
    capability = plans.compute_capability(device)
    if capability < (8, 0):
        return [f"it needs compute capability 8.0; here is {capability[0]}.{capability[1]}"]
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
    """Return what causal and window hide, if cuDNN can be told, or None."""
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
    """Whether anything shifts or hides scores that cuDNN cannot be told otherwise."""
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
    """Return what cuDNN is told of an array.

    The stride of an axis of length 1 means nothing: it is told as if the array were contiguous, so
    that arrays that differ in it alone share a plan.
    """
    told = [1] * 4
    for axis in (2, 1, 0):
        if strides is None or shape[axis] == 1:
            told[axis] = _aligned(told[axis + 1] * shape[axis + 1])
        else:
            told[axis] = strides[axis] // 2
    return Tensor(shape, tuple(told), dtype)


# ---- what cuDNN is given -----------------------------------------------------------------------


def _ready(problem: Problem, array: Array) -> Array:
    """Return query, key or value with one batch axis, its memory as cuDNN reads it."""
    array = one_batch_axis(problem, array)
    if array.data.ptr % ALIGNMENT or not _is_readable(array.shape, array.strides):
        return array.copy(order="C")
    return array


@lru_cache(maxsize=1024)
def _is_readable(shape: tuple[int, ...], strides: _Strides) -> bool:
    """Whether cuDNN reads an array of 16-bit numbers with these strides in bytes."""
    *outer, last = strides
    return last == 2 and all(
        length == 1 or (stride > 0 and stride % ALIGNMENT == 0)
        for length, stride in zip(shape, outer, strict=False)
    )


def _aligned(count: int) -> int:
    """Return a count of numbers, of 16 bits at least, after which the next is aligned."""
    return -(-count // 8) * 8


def _made_bias(problem: Problem, x: Operands, backend: Backend) -> tuple[Array, Array]:
    """Return all that shifts and hides scores as one bias, and which rows see nothing."""
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
