"""Known bugs of torch's scaled_dot_product_attention, as rows of data, and a workaround for each.

`QUIRKS` are bugs in results, `SHORTCUTS` the slow steps of torch that we avoid by private names. A
predicate depends only on the problem and on the device's description, so it can be tested on a
machine without the device or the release. Predicates check the device first. An unknown length may
be any.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import Enum
from typing import NamedTuple

from polyattn.plugin import Problem, may_have_empty_rows
from polyattn_torch.attn_mask import is_square_causal, takes_mask
from polyattn_torch.device_info import DeviceInfo


class Workaround(Enum):
    """The way in which `Sdpa` avoids a quirk; `explain` shows the text."""

    REFUSE = "left to the array-API kernels"
    AVOID_CUDNN = "not by cuDNN"
    BIAS = "the mask as a bias in the query's dtype"
    CLEAR_EMPTY_ROWS = "rows without keys computed over all keys, then cleared"
    CONTIGUOUS = "views copied"
    EXPAND_MASK = "the mask expanded to all axes"
    EXPLICIT_MASK = "a mask in place of is_causal"
    PAD = "vectors padded to one size"
    REPEAT_HEADS = "key/value heads repeated"


class Quirk(NamedTuple):
    """One bug."""

    where: str  # device, engine and releases
    predicate: Callable[[Problem, DeviceInfo], bool]  # whether a problem triggers it
    effect: str  # the wrong result, as a clause about torch
    workaround: Workaround
    upstream: str  # where it is reported


class Shortcut(NamedTuple):
    """A slow step of torch's own code, which a function of ours avoids by torch's private names."""

    avoided: str
    by: str  # our function
    cost: str  # of the step that is avoided
    seen: str  # releases with the step and the names


SHORTCUTS = (
    Shortcut(
        "torch.autograd.Function.apply",
        "polyattn_torch.autograd.apply_function",
        "it reads the signature of `forward` at each call: 14 µs of 40 for a small recorded call",
        "torch 2.9 to 2.13",
    ),
    Shortcut(
        "torch.compiler.assume_constant_result",
        "polyattn._base.tracing.constant_when_traced",
        "it imports all of the compiler: seconds, also where nothing is compiled",
        "torch 2.9 to 2.13",
    ),
)


def workarounds_for(problem: Problem, device: DeviceInfo) -> frozenset[Workaround]:
    """Return every workaround that a problem needs."""
    return frozenset([quirk.workaround for quirk in QUIRKS if quirk.predicate(problem, device)])


def refusals(problem: Problem, device: DeviceInfo) -> list[str]:
    """Return the quirks without a workaround, as reasons."""
    return [
        f"{quirk.effect} ({quirk.upstream})"
        for quirk in QUIRKS
        if quirk.workaround is Workaround.REFUSE and quirk.predicate(problem, device)
    ]


#: The inner length from which a product on MPS reads beyond its arrays: in stacks of matrices
#: still in torch 2.15, for two matrices until 2.14.
MPS_INNER_LENGTH = 2**15 - 1


# ---- predicates ----


def _is_half(problem: Problem) -> bool:
    return problem.dtype in ("float16", "bfloat16")


def _is_grouped(problem: Problem) -> bool:
    return "grouped_heads" in problem.features


def _misreads_the_bias(problem: Problem, device: DeviceInfo) -> bool:
    return (
        device.kind != "cpu"
        and _is_half(problem)
        and problem.bias_dtype not in (None, problem.dtype)
    )


def _has_a_nan_gradient(problem: Problem, device: DeviceInfo) -> bool:
    return (
        device.prefers_cudnn
        and not device.torch < (2, 11)
        and (problem.requires_grad or "grad" in problem.transforms)
        and _is_half(problem)
        and (problem.key_length is None or problem.key_length % 128 == 64)
        and takes_mask(problem)
    )


def _has_empty_rows_in_cudnn(problem: Problem, device: DeviceInfo) -> bool:
    return (
        device.prefers_cudnn
        and (device.cudnn or ()) < (9, 25)
        and _is_half(problem)
        and may_have_empty_rows(problem)
    )


def _corrupts_few_groups(problem: Problem, device: DeviceInfo) -> bool:
    return (
        device.prefers_cudnn
        and (device.capability or (0, 0))[0] == 10
        and (device.cudnn or ()) < (9, 26)
        and _is_half(problem)
        and _is_grouped(problem)
        and problem.key_heads < 8
    )


def _misreads_expanded_keys(problem: Problem, device: DeviceInfo) -> bool:
    return (
        device.kind == "cuda"
        and (problem.key_length is None or problem.key_length % 32 == 1)
        and takes_mask(problem)
    )


def _overruns_its_mask(problem: Problem, device: DeviceInfo) -> bool:
    return (
        device.kind == "cuda"
        and not (device.prefers_cudnn and _is_half(problem))
        and (problem.is_symbolic or problem.query_length * problem.key_length >= 2**31)
        and takes_mask(problem)
    )


def _mps_leaks(problem: Problem, device: DeviceInfo) -> bool:
    return (
        device.kind == "mps"
        and device.torch < (2, 13)
        and _is_half(problem)
        and (problem.query_length is None or problem.query_length > 1)
        and is_square_causal(problem)
    )


def _mps_mask(problem: Problem, device: DeviceInfo) -> bool:
    return device.kind == "mps" and (takes_mask(problem) or _mps_leaks(problem, device))


def _mps_large_scores(problem: Problem, device: DeviceInfo) -> bool:
    if device.kind != "mps" or problem.is_symbolic:
        return device.kind == "mps"
    return math.prod(problem.scores) * (2 if _is_half(problem) else 4) > 2**32


def _mps_long_sums(problem: Problem, device: DeviceInfo) -> bool:
    return (
        device.kind == "mps"
        and (problem.query_length is None or problem.query_length > 8)  # fewer: another kernel
        and (problem.key_length is None or problem.key_length >= MPS_INNER_LENGTH)
    )


def _loses_an_empty_logsumexp(problem: Problem, device: DeviceInfo) -> bool:
    return (
        device.kind in ("cpu", "cuda")
        and "logsumexp" in problem.features
        and may_have_empty_rows(problem)
    )


def _cuts_off_the_bias(problem: Problem, device: DeviceInfo) -> bool:
    return (
        problem.bias is not None
        and 0 in (*problem.scores, problem.value_size)
        and (problem.requires_grad or "grad" in problem.transforms)
    )


def _cpu_sizes(problem: Problem, device: DeviceInfo) -> bool:
    return (
        device.kind == "cpu"
        and problem.value_size != problem.head_size
        and 0 not in (problem.value_size, problem.head_size)
        and not problem.transforms
        # In 16 bits the slow path is more accurate: flash rounds the weights.
        and not _is_half(problem)
    )


# ---- the table ----

QUIRKS = (
    Quirk(
        "CUDA, cuDNN, torch >= 2.11; unknown on other accelerators",
        _misreads_the_bias,
        "it reads the bits of a bias of another dtype as 16-bit numbers",
        Workaround.REFUSE,  # a cast to 16 bits would round the bias
        "pytorch#191612",
    ),
    Quirk(
        "CUDA, cuDNN, torch >= 2.11",
        _has_a_nan_gradient,
        "the query's gradient is NaN with a mask and S % 128 == 64",
        Workaround.AVOID_CUDNN,
        "pytorch#196678",
    ),
    Quirk(
        "CUDA, cuDNN < 9.25",
        _has_empty_rows_in_cudnn,
        "a row without keys is undefined and its gradients are NaN",
        Workaround.CLEAR_EMPTY_ROWS,
        "cudnn-frontend#262, #943",
    ),
    Quirk(
        "CUDA, compute capability 10, cuDNN < 9.26",
        _corrupts_few_groups,
        "grouped heads with fewer than 8 key/value heads give wrong numbers",
        Workaround.REPEAT_HEADS,
        "pytorch#193893",
    ),
    Quirk(
        "CUDA, memory-efficient",
        _misreads_expanded_keys,
        "expanded keys and values give wrong numbers with a mask and S % 32 == 1",
        Workaround.CONTIGUOUS,
        "pytorch#191937",
    ),
    Quirk(
        "CUDA, memory-efficient",
        _overruns_its_mask,
        "it overruns a mask of 2³¹ elements",
        Workaround.REFUSE,
        "pytorch#162588",
    ),
    Quirk(
        "MPS, torch < 2.11",
        lambda problem, device: device.kind == "mps" and device.torch < (2, 11),
        "it reads beyond its arrays on MPS before torch 2.11",
        Workaround.REFUSE,
        "pytorch#174861",
    ),
    Quirk(
        "MPS, torch < 2.13",
        _mps_leaks,
        "is_causal in 16 bits lets up to 3 later keys through",
        Workaround.EXPLICIT_MASK,
        "pytorch#195910",
    ),
    Quirk(
        "MPS",
        lambda problem, device: device.kind == "mps" and problem.value_size != problem.head_size,
        "value vectors of another size give wrong shapes and numbers",
        Workaround.PAD,
        "pytorch#176767",
    ),
    Quirk(
        "MPS, torch >= 2.8",
        lambda _, device: device.kind == "mps",
        "views give wrong numbers",
        Workaround.CONTIGUOUS,
        "pytorch#181133",
    ),
    Quirk(
        "MPS",
        _mps_mask,
        "a mask with axes of length 1 gives wrong numbers",
        Workaround.EXPAND_MASK,
        "pytorch#184180",
    ),
    Quirk(
        "MPS",
        _mps_mask,
        "a mask whose dtype is not the query's may be misread",
        Workaround.BIAS,
        "no report; a precaution",
    ),
    Quirk(
        "MPS",
        lambda problem, device: device.kind == "mps" and "scale" in problem.features,
        "it uses the scale of an earlier call on MPS",
        Workaround.REFUSE,
        "pytorch#184122",
    ),
    Quirk(
        "MPS",
        lambda problem, device: device.kind == "mps" and _is_grouped(problem),
        "grouped heads give wrong numbers, or crash with a mask",
        Workaround.REPEAT_HEADS,
        "pytorch#149132",
    ),
    Quirk(
        "MPS",
        lambda problem, device: (
            device.kind == "mps" and (problem.is_symbolic or math.prod(problem.scores) > 2**32)
        ),
        "more than 2³² scores give wrong numbers",
        Workaround.REFUSE,
        "pytorch#179352",
    ),
    Quirk(
        "MPS",
        _mps_large_scores,
        "scores of more than 4 GiB end the process",
        Workaround.REFUSE,
        "pytorch#149261",
    ),
    Quirk(
        "MPS, M1 and M2",
        _mps_long_sums,
        "a sum over 32,767 keys or more also takes what is behind them in memory",
        Workaround.REFUSE,  # `workarounds.product` cuts such a sum for the array-API kernels
        "pytorch#193487, #195163",
    ),
    Quirk(
        "CPU, flash (gives 0); CUDA (engines differ)",
        _loses_an_empty_logsumexp,
        "the logsumexp of a row without keys is not -inf",
        Workaround.CLEAR_EMPTY_ROWS,
        "seen in torch 2.13",
    ),
    Quirk(
        "CPU, flash",
        lambda problem, device: (
            device.kind == "cpu" and problem.scale <= 0 and is_square_causal(problem)
        ),
        "with is_causal, a scale of 0 or below turns the -inf of hidden keys into NaN or +inf",
        Workaround.EXPLICIT_MASK,
        "seen in torch 2.13",
    ),
    Quirk(
        "CUDA, flash and memory-efficient; unknown on other accelerators",
        lambda problem, device: device.kind != "cpu" and problem.scale <= 0,
        "a scale of 0 or below turns the -inf of hidden keys into NaN or +inf",
        Workaround.REFUSE,
        "read in torch 2.13",
    ),
    Quirk(
        "all devices",
        _cuts_off_the_bias,
        "an empty output does not depend on the bias, whose gradient is 0",
        Workaround.REFUSE,
        "seen in torch 2.13",
    ),
    Quirk(
        "CPU",
        _cpu_sizes,
        "value vectors of another size take its slow path, which holds all scores",
        Workaround.PAD,
        "seen in torch 2.13",
    ),
)
