"""Workarounds for torch's quirks: change a call's arrays, and undo the change in its result."""

from __future__ import annotations

from typing import NamedTuple

import array_api_compat.torch as xp
import torch
import torch.nn.functional as F

from polyattn.plugin import Problem, Span, cleared, empty_rows
from polyattn_torch.attn_mask import as_bias
from polyattn_torch.quirks import MPS_INNER_LENGTH, Workaround

#: The kinds of device where it is: the chip is not known, and M1 and M2 are wrong.
LONG_SUMS_WRONG = frozenset({"mps"})


class EngineInputs(NamedTuple):
    """The arrays that an engine takes, each with one batch axis."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None  # everything that hides keys, and the bias


def apply_workarounds(
    problem: Problem, workarounds: frozenset[Workaround], inputs: EngineInputs
) -> tuple[EngineInputs, torch.Tensor | None]:
    """Return the changed arrays and, if rows without keys must be cleared, those: (b, H, L, 1)."""
    query, key, value, mask = inputs
    empty = None
    if mask is not None and Workaround.CLEAR_EMPTY_ROWS in workarounds:
        empty = empty_rows(mask, xp)
        mask = mask | empty if mask.dtype == torch.bool else torch.where(empty, 0, mask)
    if mask is not None and Workaround.BIAS in workarounds:
        mask = as_bias(mask, query.dtype)
    if mask is not None and Workaround.EXPAND_MASK in workarounds:
        mask = mask.expand(*query.shape[:-1], key.shape[-2]).contiguous()
    if Workaround.PAD in workarounds:
        size = max(problem.head_size, problem.value_size)
        query, key, value = (padded(x, size) for x in (query, key, value))
    if Workaround.REPEAT_HEADS in workarounds:
        groups = problem.group_size
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    if Workaround.CONTIGUOUS in workarounds:
        query, key, value = (x.contiguous() for x in (query, key, value))
    return EngineInputs(query, key, value, mask), empty


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the matrix product of two stacks of matrices, in parts where a long sum is wrong."""
    length = a.shape[-1]
    if a.device.type not in LONG_SUMS_WRONG or length < MPS_INNER_LENGTH:
        return torch.matmul(a, b)
    parts = Span(0, length).split(MPS_INNER_LENGTH // 2)
    first, *others = (torch.matmul(a[..., s:e], b[..., s:e, :]) for s, e in parts)
    return sum(others, first)


def padded(x: torch.Tensor, size: int) -> torch.Tensor:
    """Return a tensor with vectors of a size, as it is if they have it."""
    # A pad of 0 keeps the strides, and torch.compile takes its result for contiguous where the 0 is
    # a symbol, so that an engine reads other numbers (pytorch#144187).
    return x if x.shape[-1] == size else F.pad(x, (0, size - x.shape[-1]))


def undo_workarounds(
    problem: Problem,
    output: torch.Tensor,
    logsumexp: torch.Tensor | None,
    empty: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return output and logsumexp without padding, and with rows without keys cleared."""
    output = output[..., : problem.value_size]
    return (output, logsumexp) if empty is None else cleared(output, logsumexp, empty, xp)
