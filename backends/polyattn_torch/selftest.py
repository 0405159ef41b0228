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

from polyattn._base.tracing import constant_when_traced
from polyattn.plugin import Backend, Kernel, Operands, Problem

#: The kinds of device that are tested.
TESTED = frozenset({"mps"})

# With weights of 1 / 40 and values of about 1, one key too many exceeds this; float16 does not.
TOLERANCE = 5e-3
HEADS, LENGTH, SIZE = 4, 40, 16
MASK = (2, 1, LENGTH, LENGTH)
#: What differs from a plain call in float16.
CALLS: dict[str, dict[str, Any]] = {
    "causal float16": {"is_causal": True, "features": frozenset({"causal"})},
    "grouped heads": {"key_heads": 2, "features": frozenset({"grouped_heads"})},
    "a mask": {"mask": MASK, "features": frozenset({"mask"})},
    "a mask in float32": {"mask": MASK, "features": frozenset({"mask"}), "dtype": "float32"},
    "grouped heads with a mask": {
        "key_heads": 2, "mask": MASK, "features": frozenset({"grouped_heads", "mask"}),
    },
}  # fmt: skip


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
    plain = Problem(
        library="torch", device=device, dtype="float16", batch=(2,), heads=HEADS, key_heads=HEADS,
        query_length=LENGTH, key_length=LENGTH, head_size=SIZE, value_size=SIZE, is_causal=False,
        window=(None, None), query_offset=0, scale=1 / math.sqrt(SIZE), softcap=None, mask=None,
        bias=None, bias_dtype=None, features=frozenset(), requires_grad=False,
        transforms=frozenset(),
    )  # fmt: skip
    for name, changes in CALLS.items():
        try:
            error = _error(plain._replace(**changes), kernel)
        except Exception as raised:
            return f"its self-test on {device} failed in {name}: {raised}"
        if not error < TOLERANCE:  # also true of NaN
            return f"its self-test on {device} is off by {error:.2g} in {name}"
    return None


def _error(problem: Problem, kernel: Kernel) -> float:
    """Return the largest difference from the formula in float32 on the CPU."""
    generator = torch.Generator().manual_seed(0)  # the program's own is left alone

    def draw(*shape: int) -> torch.Tensor:
        return 2 * torch.rand(shape, generator=generator) - 1

    shapes = [(2, heads, LENGTH, SIZE) for heads in (HEADS, problem.key_heads, problem.key_heads)]
    q, k, v = (draw(*shape).to(getattr(torch, problem.dtype)) for shape in shapes)
    mask = None
    if problem.mask is not None:
        mask = draw(*problem.mask) > 0
        mask[..., 3, :] = False  # a row without keys
    device = problem.device
    there = Operands(q.to(device), k.to(device), v.to(device))
    visible = torch.ones(LENGTH, LENGTH, dtype=torch.bool)
    if problem.is_causal:
        visible = visible.tril()
    if mask is not None:
        there, visible = there._replace(mask=mask.to(device)), mask
    with torch.no_grad(), torch.autocast(device, enabled=False):
        output, _ = kernel(problem, there, Backend(xp))
    k, v = (x.float().repeat_interleave(problem.group_size, dim=1) for x in (k, v))
    scores = (problem.scale * q.float() @ k.mT).masked_fill(~visible, -torch.inf)
    expected = scores.softmax(-1).nan_to_num() @ v
    return float((output.cpu().float() - expected).abs().max())
