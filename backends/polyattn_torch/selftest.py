"""Self-test of a device, once per process: compare small calls with the formula on the CPU.

It is for devices whose kernels have been wrong in release after release, where a table of known
bugs is not enough.
"""

from __future__ import annotations

import functools
import math

import array_api_compat.torch as xp
import torch

from polyattn.plugin import Array, Backend, Kernel, Operands, Problem
from polyattn_torch.device_info import constant_when_traced

#: The kinds of device that are tested.
TESTED = frozenset({"mps"})

# With weights of 1 / 40 and values of about 1, one key too many exceeds this; float16 does not.
TOLERANCE = 5e-3
HEADS, LENGTH, SIZE = 4, 40, 16


@constant_when_traced
def self_test(device: str, kernel: Kernel) -> str | None:
    """Return how a kind of device fails, or None if it passes or is absent; tested once."""
    return _self_test(device, kernel)


@functools.cache
def _self_test(device: str, kernel: Kernel) -> str | None:
    available = torch.accelerator.current_accelerator(check_available=True)
    if device != "cpu" and (available is None or available.type != device):
        return None
    return try_out(device, kernel)


def try_out(device: str, kernel: Kernel) -> str | None:
    """Run small calls on a device and return the first that fails, or None."""
    for name, problem in _problems(device).items():
        try:
            error = _error(problem, kernel)
        except Exception as raised:
            return f"its self-test on {device} failed in {name}: {raised}"
        if not error < TOLERANCE:  # also true of NaN
            return f"its self-test on {device} is off by {error:.2g} in {name}"
    return None


def _problems(device: str) -> dict[str, Problem]:
    plain = Problem(
        library="torch", device=device, dtype="float16", batch=(2,), heads=HEADS, key_heads=HEADS,
        query_length=LENGTH, key_length=LENGTH, head_size=SIZE, value_size=SIZE, is_causal=False,
        window=(None, None), query_offset=0, scale=1 / math.sqrt(SIZE), softcap=None, mask=None,
        bias=None, bias_dtype=None, features=frozenset(), requires_grad=False,
        transforms=frozenset(),
    )  # fmt: skip
    causal = plain._replace(is_causal=True, features=frozenset({"causal"}))
    grouped = plain._replace(key_heads=2, features=frozenset({"grouped_heads"}))
    mask = (2, 1, LENGTH, LENGTH)
    masked = plain._replace(mask=mask, features=frozenset({"mask"}))
    return {
        "causal float16": causal,
        "grouped heads": grouped,
        "a mask": masked,
        "a mask in float32": masked._replace(dtype="float32"),
        "grouped heads with a mask": grouped._replace(
            mask=mask, features=frozenset({"grouped_heads", "mask"})
        ),
    }


def _error(problem: Problem, kernel: Kernel) -> float:
    """Return the largest difference from the formula."""
    # Multiples of irrational numbers: distinct values without touching a random generator.
    query = _numbers(2, problem.heads, LENGTH, SIZE, step=math.sqrt(2))
    key = _numbers(2, problem.key_heads, LENGTH, SIZE, step=math.sqrt(3))
    value = _numbers(2, problem.key_heads, LENGTH, SIZE, step=math.sqrt(5))
    visible = torch.ones(LENGTH, LENGTH, dtype=torch.bool)
    visible = visible.tril() if problem.is_causal else visible
    mask = None
    if problem.mask is not None:
        mask = _numbers(*problem.mask, step=math.sqrt(7)) > 0
        mask[..., 3, :] = False  # a row without keys
        visible = mask
    dtype = getattr(torch, problem.dtype)
    query, key, value = (x.to(dtype) for x in (query, key, value))
    device = problem.device
    operands = Operands(query.to(device), key.to(device), value.to(device))
    if mask is not None:
        operands = operands._replace(mask=mask.to(device))
    with torch.no_grad(), torch.autocast(device, enabled=False):
        output, _ = kernel(problem, operands, Backend(xp))
    difference = output.cpu().float() - _formula(problem, query, key, value, visible)
    return float(difference.abs().max())


def _numbers(*shape: int, step: float) -> torch.Tensor:
    count = torch.arange(math.prod(shape), dtype=torch.float32)
    return (2 * torch.remainder(count * step, 1) - 1).reshape(shape)


def _formula(
    problem: Problem, query: Array, key: Array, value: Array, visible: torch.Tensor
) -> Array:
    groups = problem.group_size
    key, value = (x.float().repeat_interleave(groups, dim=1) for x in (key, value))
    scores = problem.scale * query.float() @ key.mT
    return scores.masked_fill(~visible, -torch.inf).softmax(-1).nan_to_num() @ value
