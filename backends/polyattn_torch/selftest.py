"""Self-test of a device, once per process: compare small calls with the formula on the CPU.

It is for devices whose kernels have been wrong in release after release, where a table of known
bugs is not enough.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import array_api_compat.torch as xp
import torch

from polyattn._base.arrays import facts_of
from polyattn._base.tracing import constant_when_traced
from polyattn._core.call.checks import examine
from polyattn._core.call.facts import Call
from polyattn.plugin import Backend, Kernel, Operands

#: The kinds of device that are tested.
TESTED = frozenset({"mps"})

# With weights of 1 / 40 and values of about 1, one key too many exceeds this; float16 does not.
TOLERANCE = 5e-3
HEADS, LENGTH, SIZE = 4, 40, 16
#: The calls: what differs from one without options, in float16.
CALLS: dict[str, dict[str, Any]] = {
    "causal float16": {"is_causal": True},
    "grouped heads": {"key_heads": 2},
    "a mask": {"is_masked": True},
    "a mask in float32": {"is_masked": True, "dtype": torch.float32},
    "grouped heads with a mask": {"key_heads": 2, "is_masked": True},
}


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
    for name, differences in CALLS.items():
        try:
            error = _error(device, kernel, **differences)
        except Exception as raised:
            return f"its self-test on {device} failed in {name}: {raised}"
        if not error < TOLERANCE:  # also true of NaN
            return f"its self-test on {device} is off by {error:.2g} in {name}"
    return None


def _error(
    device: str, kernel: Kernel, *, is_causal: bool = False, is_masked: bool = False,
    key_heads: int = HEADS, dtype: torch.dtype = torch.float16,
) -> float:  # fmt: skip
    """Return the largest difference from the formula in float32 on the CPU."""
    generator = torch.Generator().manual_seed(0)  # the program's own is left alone

    def draw(*shape: int) -> torch.Tensor:
        return 2 * torch.rand(shape, generator=generator) - 1

    q, k, v = (draw(2, heads, LENGTH, SIZE).to(dtype) for heads in (HEADS, key_heads, key_heads))
    visible = torch.ones(LENGTH, LENGTH, dtype=torch.bool)
    if is_causal:
        visible = visible.tril()
    if is_masked:
        visible = draw(2, 1, LENGTH, LENGTH) > 0
        visible[..., 3, :] = False  # a row without keys
    mask = visible.to(device) if is_masked else None
    there = Operands(q.to(device), k.to(device), v.to(device), mask=mask)
    query, key, value = map(facts_of, there[:3])
    of_mask = None if mask is None else facts_of(mask)
    problem = examine(Call(query, key, value, of_mask, is_causal=is_causal))
    with torch.no_grad(), torch.autocast(device, enabled=False):
        output, _ = kernel(problem, there, Backend(xp))
    k, v = (x.float().repeat_interleave(HEADS // key_heads, dim=1) for x in (k, v))
    scores = (q.float() @ k.mT / math.sqrt(SIZE)).masked_fill(~visible, -torch.inf)
    expected = scores.softmax(-1).nan_to_num() @ v
    return float((output.cpu().float() - expected).abs().max())
