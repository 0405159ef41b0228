"""The engines behind scaled_dot_product_attention, called by name for what it does not hand on.

That is the logsumexp, and a band that its is_causal does not mean. The operators are private to
torch: one that is not there, or has other arguments, is a reason and no error. What an engine gives
has no derivative in its logsumexp.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from polyattn.plugin import Problem, Span, band, column_span
from polyattn_torch.attn_mask import as_bias, is_square_causal
from polyattn_torch.device_info import Facts

__all__ = ["CUDNN", "EFFICIENT", "FLASH", "FLASH_CPU", "WITH_LOGSUMEXP", "Engine", "operator"]

Result = tuple[torch.Tensor, torch.Tensor | None]


class Engine(NamedTuple):
    """One way in which torch computes attention.

    Attributes
    ----------
    name : str
        What torch calls it.
    against : callable
        Why it cannot take a problem, or None, by (problem, facts).
    call : callable
        The output and logsumexp, by (problem, query, key, value, mask), each with one batch axis.
    """

    name: str
    against: Callable[[Problem, Facts], str | None]
    call: Callable[..., Result]


def operator(name: str, *arguments: str) -> Any:
    """Return an operator of torch, if it is there and takes these arguments.

    Parameters
    ----------
    name : str
        Its name in ``torch.ops.aten``.
    *arguments : str
        The names of the arguments that it is to be given.

    Returns
    -------
    OpOverload or None
        None if it is not there or takes others.
    """
    overload = getattr(getattr(torch.ops.aten, name, None), "default", None)
    if overload is None or not {*arguments} <= {a.name for a in overload._schema.arguments}:
        return None
    return overload


_QKV = ("query", "key", "value")
_WINDOW = ("window_size_left", "window_size_right")
_cpu = operator(
    "_scaled_dot_product_flash_attention_for_cpu", *_QKV, "is_causal", "attn_mask", "scale"
)
_flash = operator(
    "_flash_attention_forward", *_QKV, "cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p",
    "is_causal", "return_debug_mask", "scale", *_WINDOW,
)  # fmt: skip
_flash_backward = operator("_flash_attention_backward", *_WINDOW)
_cudnn = operator(
    "_scaled_dot_product_cudnn_attention", *_QKV, "attn_bias", "compute_log_sumexp", "is_causal",
    "scale",
)  # fmt: skip
_efficient = operator(
    "_scaled_dot_product_efficient_attention", *_QKV, "attn_bias", "compute_log_sumexp",
    "is_causal", "scale",
)  # fmt: skip

_ABSENT = "this release of torch does not have it as it is called here"
_HALF = ("float16", "bfloat16")


def _is_empty(problem: Problem) -> bool:
    return 0 in problem.scores or 0 in (problem.head_size, problem.value_size)


# ---- flash attention on the CPU ----


def _against_cpu(problem: Problem, facts: Facts) -> str | None:
    if _cpu is None:
        return _ABSENT
    if problem.dtype in _HALF:
        return "it is off by 5e-5 for 16-bit numbers, of which it takes a quicker exp"
    # It divides by the lengths in integers, which ends the process (torch 2.13).
    return "it takes no empty arrays" if _is_empty(problem) else None


def _call_cpu(
    problem: Problem,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
) -> Result:
    # It reads the numbers of a vector as neighbours, whatever their stride (torch 2.13).
    accumulator = getattr(torch, problem.accumulator)
    return _cpu(  # type: ignore[no-any-return]
        *map(_in_rows, (query, key, value)), 0.0, mask is None and is_square_causal(problem),
        attn_mask=None if mask is None else as_bias(mask, accumulator), scale=problem.scale,
    )  # fmt: skip


# ---- flash attention on CUDA ----


class Window(NamedTuple):
    """A band as FlashAttention counts it: from the last row and the last of these keys.

    Attributes
    ----------
    keys : Span
        Outside of these no row sees any.
    left, right : int
        How far a row sees, -1 for no bound.
    empty : int
        How many rows, the first, see nothing.
    """

    keys: Span
    left: int
    right: int
    empty: int


def _window(problem: Problem) -> Window | None:
    """Return the band so, or None where it cannot be."""
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


def _against_flash(problem: Problem, facts: Facts) -> str | None:
    if _flash is None or (problem.requires_grad and _flash_backward is None):
        return _ABSENT
    if (facts.capability or (0, 0)) < (8, 0):
        return "it needs compute capability 8.0"
    if problem.dtype not in _HALF:
        return "it takes 16-bit numbers alone"
    if max(problem.head_size, problem.value_size) > 256:
        return "it takes vectors of up to 256"
    if not problem.features.isdisjoint(("mask", "mask_mod", "mask_expression", "bias")):
        return "it takes no mask"
    if problem.transforms:
        return "torch.func has no rule for it"
    if _is_empty(problem):
        return "it takes no empty arrays"
    return None if _window(problem) else "it cannot be told of a band that lies so"


def _call_flash(
    problem: Problem, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: None
) -> Result:
    window = _window(problem)
    assert window is not None
    size = _up(max(problem.head_size, problem.value_size), 8)
    keys = slice(*window.keys)
    query, key, value = (
        _in_rows(_padded(x, size)).transpose(1, 2)
        for x in (query, key[:, :, keys], value[:, :, keys])
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


def _against_cudnn(problem: Problem, facts: Facts) -> str | None:
    if _cudnn is None:
        return _ABSENT
    if not facts.prefers_cudnn:
        return "torch does not prefer it here"
    if problem.dtype not in _HALF:
        return "it takes 16-bit numbers alone"
    if any(size > 128 or size % 8 for size in (problem.head_size, problem.value_size)):
        return "it takes vectors of up to 128, by 8"
    if problem.requires_grad or problem.transforms:
        return "it is called for inference alone"
    if _is_empty(problem) or problem.key_length == 1:
        return "it takes no empty arrays and no single key"
    return None


def _call_cudnn(
    problem: Problem,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
) -> Result:
    bias = None if mask is None else as_bias(mask, query.dtype)
    output, logsumexp, *_ = _cudnn(
        *map(_aligned, (query, key, value)), bias, True, 0.0,
        mask is None and is_square_causal(problem), False, scale=problem.scale,
    )  # fmt: skip
    return output, logsumexp.reshape(output.shape[:-1])


def _aligned(x: torch.Tensor) -> torch.Tensor:
    # Off 16 bytes it computes other numbers on Hopper (cudnn-frontend#1571).
    steps = (*x.stride()[:-1], x.storage_offset())
    is_aligned = x.stride(-1) == 1 and not any(step % 8 for step in steps)
    return x if is_aligned else x.clone(memory_format=torch.contiguous_format)


# ---- memory-efficient attention ----


def _against_efficient(problem: Problem, facts: Facts) -> str | None:
    if _efficient is None:
        return _ABSENT
    if facts.capability is None:
        return "there is no such device here"
    if problem.dtype not in (*_HALF, "float32"):
        return f"it does not take {problem.dtype}"
    return "it takes no empty arrays" if _is_empty(problem) else None


def _call_efficient(
    problem: Problem,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
) -> Result:
    step = 4 if problem.dtype == "float32" else 8
    query, key, value = (
        _padded(x, _up(x.shape[-1], step)).contiguous() for x in (query, key, value)
    )
    groups = problem.heads // key.shape[1]
    # Its keys must not be expanded ones (pytorch#191937).
    key, value = (x.repeat_interleave(groups, 1) if groups > 1 else x for x in (key, value))
    wants_logsumexp = "logsumexp" in problem.features
    output, logsumexp, *_ = _efficient(
        query, key, value, None if mask is None else _whole_bias(problem, mask, query),
        wants_logsumexp or problem.requires_grad, 0.0, mask is None and is_square_causal(problem),
        scale=problem.scale,
    )  # fmt: skip
    # Its logsumexp has rows up to a multiple of 32.
    logsumexp = logsumexp[..., : problem.query_length] if wants_logsumexp else None
    return output[..., : problem.value_size], logsumexp


def _whole_bias(problem: Problem, mask: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Return the mask as a bias with rows that begin at multiples of 16, all axes whole."""
    length = problem.key_length
    bias = as_bias(mask, query.dtype).expand(*mask.shape[:-1], length)
    bias = _padded(bias.contiguous(), _up(length, 16))[..., :length]
    return bias.expand(query.shape[0], *problem.scores[-3:])


# ---- what they share ----


def _in_rows(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _up(size: int, step: int) -> int:
    return -(-size // step) * step


def _padded(x: torch.Tensor, size: int) -> torch.Tensor:
    return F.pad(x, (0, size - x.shape[-1])) if size != x.shape[-1] else x


FLASH_CPU = Engine("flash", _against_cpu, _call_cpu)
FLASH = Engine("flash", _against_flash, _call_flash)
CUDNN = Engine("cudnn", _against_cudnn, _call_cudnn)
EFFICIENT = Engine("efficient", _against_efficient, _call_efficient)

#: Which engines give the logsumexp on a kind of device, best first.
WITH_LOGSUMEXP = {"cpu": (FLASH_CPU,), "cuda": (CUDNN, FLASH, EFFICIENT)}
