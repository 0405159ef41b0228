"""Tensors with one batch axis, which is all that torch's fused kernels take."""

from __future__ import annotations

import math

import torch

from polyattn.plugin import Problem

__all__ = ["one_batch_axis", "whole_score_axes"]


def one_batch_axis(problem: Problem, tensor: torch.Tensor) -> torch.Tensor:
    """Return query, key or value with its batch axes broadcast and made one."""
    batch, shape = problem.batch, tensor.shape
    if len(shape) == 4 and len(batch) == 1 and shape[0] == batch[0]:
        return tensor
    return tensor.expand(*batch, *shape[-3:]).reshape(math.prod(batch), *shape[-3:])


def whole_score_axes(problem: Problem, tensor: torch.Tensor) -> torch.Tensor:
    """Return a mask or bias with all of the axes (batch, H, L, S), each whole or 1."""
    if tensor.ndim > 4:
        last = tensor.shape[-3:]
        return tensor.expand(*problem.batch, *last).reshape(-1, *last)
    return tensor.reshape(*(1,) * (4 - tensor.ndim), *tensor.shape)
