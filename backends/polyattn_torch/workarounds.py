"""The ways round torch's quirks, done to the arrays of a call and undone in its result."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from polyattn.plugin import Problem
from polyattn_torch.attn_mask import as_bias, empty_rows
from polyattn_torch.quirks import Reroute

__all__ = ["Arrays", "detoured", "returned"]


class Arrays(NamedTuple):
    """What an engine is given, each with one batch axis.

    Attributes
    ----------
    query, key, value : Tensor
        As a kernel is given them.
    mask : Tensor or None
        All that hides keys and the bias.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None


def detoured(
    problem: Problem, detours: frozenset[Reroute], x: Arrays
) -> tuple[Arrays, torch.Tensor | None]:
    """Return the arrays as an engine is to have them, and which rows are without keys.

    Parameters
    ----------
    problem : Problem
        The facts of the call.
    detours : frozenset of Reroute
        What is to be done.
    x : Arrays
        The arrays as they are.

    Returns
    -------
    x : Arrays
        The arrays as they are to be.
    empty : Tensor or None
        If rows without keys are to be cleared, which those are: bool, (batch, H, L, 1).
    """
    query, key, value, mask = x
    empty = None
    if mask is not None and Reroute.CLEAR_EMPTY_ROWS in detours:
        empty = empty_rows(mask)
        mask = mask | empty if mask.dtype == torch.bool else torch.where(empty, 0, mask)
    if mask is not None and Reroute.BIAS in detours:
        mask = as_bias(mask, query.dtype)
    if mask is not None and Reroute.EXPAND_MASK in detours:
        mask = mask.expand(query.shape[0], *problem.scores[-3:]).contiguous()
    if Reroute.PAD in detours:
        size = max(problem.head_size, problem.value_size)
        query, key, value = (F.pad(t, (0, size - t.shape[-1])) for t in (query, key, value))
    if Reroute.REPEAT_HEADS in detours:
        groups = problem.heads // problem.key_heads
        key, value = (t.repeat_interleave(groups, dim=1) for t in (key, value))
    if Reroute.CONTIGUOUS in detours:
        query, key, value = (t.contiguous() for t in (query, key, value))
    return Arrays(query, key, value, mask), empty


def returned(
    problem: Problem,
    output: torch.Tensor,
    logsumexp: torch.Tensor | None,
    empty: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return an engine's result as if it had been given the arrays as they were.

    Parameters
    ----------
    problem : Problem
        The facts of the call.
    output, logsumexp
        What the engine returned.
    empty : Tensor or None
        What `detoured` returned.

    Returns
    -------
    output, logsumexp
        The same, less what was padded, and cleared where no key is.
    """
    output = output[..., : problem.value_size]
    if empty is not None:
        output = output.masked_fill(empty, 0)
        if logsumexp is not None:
            logsumexp = logsumexp.masked_fill(empty[..., 0], -torch.inf)
    return output, logsumexp
