"""Reshaping to one batch axis, since torch's fused kernels take no other number."""

from __future__ import annotations

import math

import torch

from polyattn.plugin import Problem

__all__ = ["one_batch_axis", "whole_score_axes"]


def one_batch_axis(problem: Problem, tensor: torch.Tensor) -> torch.Tensor:
    """Return query, key or value with its batch axes broadcast and merged into one."""
    batch, shape = problem.batch, tensor.shape
    if len(shape) == 4 and len(batch) == 1 and shape[0] == batch[0]:
        return tensor
    return tensor.expand(*batch, *shape[-3:]).reshape(math.prod(batch), *shape[-3:])


def whole_score_axes(problem: Problem, tensor: torch.Tensor) -> torch.Tensor:
    """Return a mask or bias with the axes (batch, H, L, S), each whole or 1."""
    rank = max(4, len(problem.batch) + 3)
    tensor = tensor.reshape(*(1,) * (rank - tensor.ndim), *tensor.shape)
    if rank == 4:
        return tensor
    last = tensor.shape[-3:]
    return tensor.expand(*problem.batch, *last).reshape(math.prod(problem.batch), *last)
