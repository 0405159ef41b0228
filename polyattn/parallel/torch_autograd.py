"""Gradients of attention over many ranks in torch: one node of autograd for all of it.

Recorded operation by operation, the graphs of ranks would differ, because each skips what its rows
do not see. Then autograd calls the backward of a transfer on some ranks only, and they wait for the
others for ever. With one node, the backward pass of each rank is a second pass of the strategy.
"""

from __future__ import annotations

from typing import Any

import torch

from polyattn._api.partial import Partial
from polyattn.parallel.rank_task import RankTask


def attend(task: RankTask, arrays: list[torch.Tensor]) -> torch.Tensor:
    """Return the output of this rank's rows, recorded by autograd."""
    others = task.arrays()
    needed = any(isinstance(x, torch.Tensor) and x.requires_grad for x in (*arrays, *others))
    if not (needed and torch.is_grad_enabled()):
        output: torch.Tensor = task.forward(*arrays, for_gradient=False)[0]
        return output
    result: torch.Tensor = _RankAttention.apply(task, *arrays, *others)  # type: ignore[no-untyped-call]
    return result


class _RankAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, task: RankTask, *arrays: torch.Tensor) -> torch.Tensor:
        detached = [array.detach() for array in arrays]
        output: torch.Tensor
        output, saved = task.with_arrays(detached[3:]).forward(*detached[:3])
        ctx.task = task.without_arrays()
        ctx.save_for_backward(*arrays, *saved)  # the logsumexp may be None
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        tensors = [None if tensor is None else tensor.detach() for tensor in ctx.saved_tensors]
        *arrays, output, logsumexp = tensors
        task = ctx.task.with_arrays(arrays[3:])
        gradients = task.backward(arrays[:3], Partial(output, logsumexp), gradient)
        return None, gradients.query, gradients.key, gradients.value, *task.of_arrays(gradients)
