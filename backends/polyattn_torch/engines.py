"""torch's attention engines, called by name where scaled_dot_product_attention does not suffice.

That function returns the output only, and its is_causal means one band only. The operators are
private to torch: one that is missing, or has other arguments, is a reason and not an error. The
logsumexp of an engine is not differentiable.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from polyattn._base.tracing import constant_when_traced
from polyattn.plugin import Problem, Span, band, column_span
from polyattn_torch.attn_mask import as_bias, is_square_causal
from polyattn_torch.device_info import DeviceInfo
from polyattn_torch.workarounds import EngineInputs, padded

Result = tuple[torch.Tensor, torch.Tensor | None]


class TorchEngine(NamedTuple):
    """One way in which torch computes attention."""

    name: str
    limit: Callable[[Problem, DeviceInfo], str | None]  # why it cannot take a problem
    call: Callable[[Problem, EngineInputs], Result]  # output and logsumexp

    def reason_against(self, problem: Problem, device: DeviceInfo) -> str | None:
        """Return why it cannot take a problem, or None."""
        # Flash on the CPU divides by the lengths in integers, which ends the process (torch 2.13).
        return (
            "it does not support empty arrays" if problem.is_empty else self.limit(problem, device)
        )


def operator(name: str, *arguments: str) -> Any:
    """Return an operator of ``torch.ops.aten``, or None if it does not take these arguments."""
    overload = getattr(getattr(torch.ops.aten, name, None), "default", None)
    if overload is None or not {*arguments} <= {a.name for a in overload._schema.arguments}:
        return None
    return overload


_QKV = ("query", "key", "value")
_WINDOW = ("window_size_left", "window_size_right")
_cpu = operator(
    "_scaled_dot_product_flash_attention_for_cpu", *_QKV, "is_causal", "attn_mask", "scale"
)
FLASH_ARGUMENTS = (
    *_QKV, "cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal",
    "return_debug_mask", "scale", *_WINDOW,
)  # fmt: skip
_flash = operator("_flash_attention_forward", *FLASH_ARGUMENTS)
_flash_backward = operator("_flash_attention_backward", *_WINDOW)
_cudnn = operator(
    "_scaled_dot_product_cudnn_attention", *_QKV, "attn_bias", "compute_log_sumexp", "is_causal",
    "scale",
)  # fmt: skip
_efficient = operator(
    "_scaled_dot_product_efficient_attention", *_QKV, "attn_bias", "compute_log_sumexp",
    "is_causal", "scale",
)  # fmt: skip

ABSENT = "this release of torch does not have its operator with these arguments"
HALF = ("float16", "bfloat16")
HALF_ONLY = "it supports float16 and bfloat16 only"
LENGTHS = "it needs known lengths"


def in_onnx_export() -> bool:
    """Return whether torch.onnx.export is tracing the call."""
    return torch.compiler.is_compiling() and _is_onnx_exported()


@constant_when_traced
def _is_onnx_exported() -> bool:
    # Not asked for before it is imported, as it is in an export: that takes long.
    return "torch.onnx" in sys.modules and torch.onnx.is_in_onnx_export()


# ---- flash attention on the CPU ----


def _against_cpu(problem: Problem, device: DeviceInfo) -> str | None:
    if _cpu is None:
        return ABSENT
    if in_onnx_export():
        return "torch.onnx.export cannot export it"
    if problem.dtype in HALF:
        return "it is off by 5e-5 in 16 bits, for which it uses a faster exp"
    return None


def _call_cpu(problem: Problem, x: EngineInputs) -> Result:
    # It assumes that the numbers of a vector are adjacent, whatever their stride (torch 2.13).
    accumulator = getattr(torch, problem.accumulator)
    return _cpu(  # type: ignore[no-any-return]
        *map(in_rows, x[:3]), 0.0, x.mask is None and is_square_causal(problem),
        attn_mask=None if x.mask is None else as_bias(x.mask, accumulator), scale=problem.scale,
    )  # fmt: skip


# ---- flash attention on CUDA ----


class Window(NamedTuple):
    """A band as FlashAttention counts it: from the last row and the last of `keys`."""

    keys: Span  # no row sees a key outside of these
    left: int  # how far a row sees, -1 for no bound
    right: int
    empty: int  # how many of the first rows see nothing


def _window(problem: Problem) -> Window | None:
    """Return FlashAttention's parameters for the band, or None where they cannot express it."""
    low, high = band(problem)
    if problem.query_offset is None:
        return None
    keys = column_span(problem, Span(0, problem.query_length))
    shift = keys.length - problem.query_length
    left = -1 if low is None else shift - (low - keys.start)
    right = -1 if high is None else high - keys.start - shift
    if keys.length == 0 or (low is not None and left < 0) or (high is not None and right < 0):
        return None
    return Window(keys, left, right, 0 if high is None else max(0, -high))


def _against_flash(problem: Problem, device: DeviceInfo) -> str | None:
    if _flash is None or (problem.requires_grad and _flash_backward is None):
        return ABSENT
    if (device.capability or (0, 0)) < (8, 0):
        return "it needs compute capability 8.0"
    if problem.dtype not in HALF:
        return HALF_ONLY
    if max(problem.head_size, problem.value_size) > 256:
        return "it supports vectors of up to 256 numbers"
    if not problem.masks_by_position_only:
        return "of masks it supports causal and window only"
    if problem.transforms:
        return "torch.func cannot transform it"
    if problem.is_symbolic:
        return LENGTHS
    return None if _window(problem) else "its window parameters cannot express this band"


def _call_flash(problem: Problem, x: EngineInputs) -> Result:
    window = _window(problem)
    assert window is not None
    size = _round_up(max(problem.head_size, problem.value_size), 8)
    keys = slice(*window.keys)
    query, key, value = (
        aligned(padded(array, size)).transpose(1, 2)
        for array in (x.query, x.key[:, :, keys], x.value[:, :, keys])
    )
    output, logsumexp, *_ = _flash(
        query, key, value, None, None, problem.query_length, window.keys.length, 0.0,
        (window.left, window.right) == (-1, 0), False, scale=problem.scale,
        window_size_left=window.left, window_size_right=window.right,
    )  # fmt: skip
    output = output.transpose(1, 2)[..., : problem.value_size]
    if "logsumexp" not in problem.features:
        return output, None
    if window.empty:
        logsumexp[..., : window.empty] = -torch.inf  # FlashAttention gives +inf
    return output, logsumexp


# ---- cuDNN ----


def _against_cudnn(problem: Problem, device: DeviceInfo) -> str | None:
    if _cudnn is None:
        return ABSENT
    if not device.prefers_cudnn:
        return "torch does not prefer it on this device"
    if problem.dtype not in HALF:
        return HALF_ONLY
    if any(size > 128 or size % 8 for size in (problem.head_size, problem.value_size)):
        return "it supports vectors of up to 128 numbers, in multiples of 8"
    if problem.requires_grad or problem.transforms:
        return "it is used for inference only"
    if problem.is_symbolic:
        return LENGTHS
    return "it does not support S = 1" if problem.key_length == 1 else None


def _call_cudnn(problem: Problem, x: EngineInputs) -> Result:
    bias = None if x.mask is None else as_bias(x.mask, x.query.dtype)
    output, logsumexp, *_ = _cudnn(
        *map(aligned, x[:3]), bias, True, 0.0,
        x.mask is None and is_square_causal(problem), False, scale=problem.scale,
    )  # fmt: skip
    return output, logsumexp.reshape(output.shape[:-1])


def aligned(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose vectors are whole and begin at multiples of 16 bytes, as a copy can."""
    # On others cuDNN computes other numbers (cudnn-frontend#1571), and the memory-efficient kernel
    # reads misaligned addresses (pytorch#183484), as FlashAttention does.
    # torch.compile cannot read where a tensor begins, and copies inputs that are not aligned.
    unit = 16 // x.element_size()
    start = 0 if torch.compiler.is_compiling() else x.storage_offset()
    if start % unit == 0 and x.is_contiguous():
        return x
    *steps, last = x.stride()
    if x.shape[-1] % unit:  # a copy would be no better
        steps = []
    is_aligned = last == 1 and not any(step % unit for step in (start, *steps))
    return x if is_aligned else x.clone(memory_format=torch.contiguous_format)


# ---- memory-efficient attention ----


def _against_efficient(problem: Problem, device: DeviceInfo) -> str | None:
    if _efficient is None:
        return ABSENT
    if device.capability is None:
        return "no such device is available"
    if problem.dtype not in (*HALF, "float32"):
        return f"it does not support {problem.dtype}"
    return LENGTHS if problem.is_symbolic else None


def _call_efficient(problem: Problem, x: EngineInputs) -> Result:
    step = 4 if problem.dtype == "float32" else 8
    query, key, value = (
        aligned(padded(array, _round_up(array.shape[-1], step)).contiguous()) for array in x[:3]
    )
    if key.shape[1] < problem.heads:  # copies, since expanded keys go wrong (pytorch#191937)
        groups = problem.heads // key.shape[1]
        key, value = (array.repeat_interleave(groups, 1) for array in (key, value))
    wants_logsumexp = "logsumexp" in problem.features
    output, logsumexp, *_ = _efficient(
        query, key, value, None if x.mask is None else _whole_bias(problem, x.mask, query),
        wants_logsumexp or problem.requires_grad, 0.0,
        x.mask is None and is_square_causal(problem), scale=problem.scale,
    )  # fmt: skip
    # Its logsumexp has rows up to a multiple of 32.
    logsumexp = logsumexp[..., : problem.query_length] if wants_logsumexp else None
    return output[..., : problem.value_size], logsumexp


def _whole_bias(problem: Problem, mask: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Return the mask as a bias with all axes expanded and rows that start at multiples of 16."""
    length = problem.key_length
    bias = as_bias(mask, query.dtype).expand(*mask.shape[:-1], length)
    bias = padded(bias.contiguous(), _round_up(length, 16))[..., :length]
    return bias.expand(query.shape[0], *problem.scores[-3:])


# ---- shared helpers ----


def in_rows(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor in which the numbers of each vector are adjacent."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _round_up(size: int, step: int) -> int:
    return -(-size // step) * step


FLASH_CPU = TorchEngine("flash", _against_cpu, _call_cpu)
FLASH = TorchEngine("flash", _against_flash, _call_flash)
CUDNN = TorchEngine("cudnn", _against_cudnn, _call_cudnn)
EFFICIENT = TorchEngine("efficient", _against_efficient, _call_efficient)

#: The engines that give the logsumexp on a kind of device, best first.
WITH_LOGSUMEXP = {"cpu": (FLASH_CPU,), "cuda": (CUDNN, FLASH, EFFICIENT)}
