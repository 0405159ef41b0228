"""cuDNN's fused attention, for the calls that it computes as docs/semantics.md defines.

cuDNN applies the bands that its options can express, and numbers of keys. Everything else that
hides keys becomes one bias, made for the call. This bias is finite, so a row that sees no key comes
out as an average of all values, and is corrected afterwards.
"""

from __future__ import annotations

import math
from typing import ClassVar

import cupy
import numpy as np

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
from polyattn.plugin.internal import why_too_large
from polyattn_cupy import graphs, loading, plans
from polyattn_cupy.arrays import empty_result, key_counts, made_bias, ready
from polyattn_cupy.cudnn_gradients import gradients
from polyattn_cupy.problem_graphs import band_of, bias_shape, counts_keys, graph_of, needs_bias

# Gradients have vectors of at most this size.
LARGEST_SIZE = 256


class CupyCudnn(Kernel):
    """cuDNN's attention, through nvidia-cudnn-frontend."""

    name = "cudnn"
    features = frozenset({
        "batch_broadcast", "bias", "causal", "grouped_heads", "logsumexp", "mask",
        "mask_expression", "mask_mod", "query_offset", "query_offset_array", "scale", "softcap",
        "value_size", "window",
    })  # fmt: skip
    # It has the gradient of a bias in 16 bits only.
    differentiates: ClassVar = {"backward": frozenset({
        "batch_broadcast", "causal", "grouped_heads", "mask", "mask_expression", "mask_mod",
        "query_offset", "query_offset_array", "scale", "value_size", "window",
    })}  # fmt: skip
    # A bias does not hide NaN, and a weight of 0 is multiplied by the value, which may be NaN.
    poison_safe = False
    rounds_once = False
    takes_empty = False

    def reasons_against(self, problem: Problem) -> list[str]:
        missing = loading.why_no_library()
        if missing is not None:
            return [missing]
        return _static_reasons(problem) or _device_reasons(problem)

    def only_on_request(self, problem: Problem) -> str | None:
        made = math.prod(bias_shape(problem)) if needs_bias(problem) else 0
        return why_too_large(made)

    def remark(self, problem: Problem) -> str | None:
        """Return the versions of cuDNN and its frontend."""
        return ", ".join(" ".join(item) for item in sorted(loading.versions().items()))

    def __call__(
        self, problem: Problem, operands: Operands, backend: Backend
    ) -> tuple[Array, Array | None]:
        query, key, value = (ready(problem, array) for array in operands[:3])
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
        if needs_bias(problem):
            bias, seen = made_bias(problem, operands, backend)
            empty_rows = ~seen.any(axis=-1)
            pointers[graphs.BIAS] = bias.data.ptr
        elif counts_keys(problem):
            rows, keys = key_counts(problem, operands)
            empty_rows = cupy.broadcast_to(keys[..., 0] == 0, query.shape[:3])
            keys = cupy.clip(keys, 1, None)  # or cuDNN would divide by 0
            pointers |= {graphs.QUERY_LENGTHS: rows.data.ptr, graphs.KEY_LENGTHS: keys.data.ptr}
        graph = graph_of(problem, query.strides, key.strides, value.strides)
        plans.run(graph, pointers)
        if empty_rows is not None:
            # All bits of a 0 are 0, in either dtype.
            bits = output.view(np.uint16).reshape(*query.shape[:3], problem.value_size)
            cupy.copyto(bits, 0, where=empty_rows[..., None])
            if logsumexp is not None:
                cupy.copyto(logsumexp.reshape(query.shape[:3]), -math.inf, where=empty_rows)
        return output, logsumexp

    def backward(
        self, problem: Problem, operands: Operands, residuals: Residuals, cotangents: Cotangents,
        backend: Backend,
    ) -> Gradients:  # fmt: skip
        """Return the gradients, in float32 of numbers that cuDNN rounds to 16 bits."""
        return gradients(problem, operands, residuals, cotangents, backend)


# ---- what cuDNN can compute --------------------------------------------------------------------


def _static_reasons(problem: Problem) -> list[str]:
    reasons = []
    if problem.dtype not in ("float16", "bfloat16"):
        reasons.append("it supports float16 and bfloat16 only")
    sizes = (problem.head_size, problem.value_size)
    if any(size % 8 for size in sizes):
        reasons.append(f"head and value size must be a multiple of 8; got {sizes}")
    if problem.scale <= 0:
        reasons.append(f"it needs a scale above 0; got {problem.scale}")
    if "backward" in problem.features:
        reasons += _reasons_against_gradients(problem)
    hides = needs_bias(problem) or counts_keys(problem) or band_of(problem) is not None
    if problem.softcap is not None and hides:
        reasons.append("it supports softcap only without masks and bias")
    if problem.softcap is not None and "logsumexp" in problem.features:
        reasons.append("its tanh is too inexact for the logsumexp of capped scores")
    return reasons


def _reasons_against_gradients(problem: Problem) -> list[str]:
    reasons = []
    sizes = (problem.head_size, problem.value_size)
    if max(sizes) > LARGEST_SIZE:
        reasons.append(
            f"it computes gradients for head and value sizes up to {LARGEST_SIZE}; got {sizes}"
        )
    if problem.scores[-2:] == (1, 1):
        reasons.append("its gradients need more than one query or more than one key")
    return reasons


def _device_reasons(problem: Problem) -> list[str]:
    device = int(problem.device.partition(":")[2] or 0)
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
    refused = plans.why_unsupported(graph_of(problem), device)
    return [] if refused is None else [refused]
