"""A device tried once for each process before it is trusted: small calls against the formula.

For devices whose kernels have been wrong in release after release, where a list of the known
mistakes is not enough.
"""

from __future__ import annotations

import functools
import math

import array_api_compat.torch as xp
import torch

from polyattn.plugin import Backend, Kernel, Operands, Problem

__all__ = ["TESTED", "disagreement", "try_out"]

#: The kinds of device that are tried out.
TESTED = frozenset({"mps"})

# Weights of 1 / 40 and values of about 1: a key too many or too few is seen, float16 is not.
TOLERANCE = 5e-3
HEADS, LENGTH, SIZE = 4, 40, 16


# torch.compile is to take the answer as it is, rather than trace how it is found.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def disagreement(device: str, kernel: Kernel) -> str | None:
    """Return how a device's results differ from the formula's, as a reason.

    Parameters
    ----------
    device : str
        Its kind.
    kernel : Kernel
        What runs there.

    Returns
    -------
    str or None
        The reason; None if they agree, or if the device is not here. The same at every call.
    """
    return _disagreement(device, kernel)


@functools.cache
def _disagreement(device: str, kernel: Kernel) -> str | None:
    available = torch.accelerator.current_accelerator(check_available=True)
    if device != "cpu" and (available is None or available.type != device):
        return None
    return try_out(device, kernel)


def try_out(device: str, kernel: Kernel) -> str | None:
    """Run small calls on a device and compare them with the formula on the CPU.

    Parameters
    ----------
    device : str
        Its name.
    kernel : Kernel
        What runs there.

    Returns
    -------
    str or None
        What is wrong; None if nothing is.
    """
    for name, problem in _problems(device).items():
        try:
            error = _error(problem, kernel)
        except Exception as raised:
            return f"its self-test on {device} failed in {name}: {raised}"
        if not error < TOLERANCE:  # a NaN is none
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
    # Steps through irrational numbers: values that differ, from no generator of anybody's.
    query = _numbers(2, problem.heads, LENGTH, SIZE, step=math.sqrt(2))
    key = _numbers(2, problem.key_heads, LENGTH, SIZE, step=math.sqrt(3))
    value = _numbers(2, problem.key_heads, LENGTH, SIZE, step=math.sqrt(5))
    seen = torch.ones(LENGTH, LENGTH, dtype=torch.bool)
    seen = seen.tril() if problem.is_causal else seen
    mask = None
    if problem.mask is not None:
        mask = _numbers(*problem.mask, step=math.sqrt(7)) > 0
        mask[..., 3, :] = False  # a row without keys
        seen = mask
    dtype = getattr(torch, problem.dtype)
    query, key, value = (x.to(dtype) for x in (query, key, value))
    device = problem.device
    there = Operands(
        query.to(device), key.to(device), value.to(device),
        None if mask is None else mask.to(device), None, None, None, None,
    )  # fmt: skip
    with torch.no_grad(), torch.autocast(device, enabled=False):
        output, _ = kernel(problem, there, Backend(xp))
    difference = output.cpu().float() - _formula(problem, query, key, value, seen)
    return float(difference.abs().max())


def _numbers(*shape: int, step: float) -> torch.Tensor:
    count = torch.arange(math.prod(shape), dtype=torch.float32)
    return (2 * torch.remainder(count * step, 1) - 1).reshape(shape)


def _formula(
    problem: Problem,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    seen: torch.Tensor,
) -> torch.Tensor:
    groups = problem.heads // problem.key_heads
    key, value = (x.float().repeat_interleave(groups, dim=1) for x in (key, value))
    scores = problem.scale * query.float() @ key.mT
    return scores.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num() @ value
