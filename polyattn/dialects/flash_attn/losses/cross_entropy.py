"""The cross entropy, as `flash_attn.losses` and `flash_attn.ops.triton` have it, in plain torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["CrossEntropyLoss", "cross_entropy_loss"]
__dir__ = __all__.copy


def cross_entropy_loss(
    logits: Tensor, labels: Tensor, precomputed_lse: Tensor | None = None,
    label_smoothing: float = 0.0, logit_scale: float = 1.0, lse_square_scale: float = 0.0,
    ignore_index: int = -100, inplace_backward: bool = False, process_group: Any = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the loss of each row of logits, (N, C), and its part by the squared logsumexp.

    Both are (N,), in float32 at least, and 0 where the label is `ignore_index`; the second has no
    gradient. `precomputed_lse` and `inplace_backward` change no number. A `process_group` of
    several processes is refused.

    Examples
    --------
    >>> import torch
    >>> from polyattn.dialects.flash_attn.losses.cross_entropy import cross_entropy_loss
    >>> cross_entropy_loss(torch.zeros(2, 4), torch.tensor([3, -100]))[0]
    tensor([1.3863, 0.0000])
    """
    if process_group is not None and torch.distributed.get_world_size(process_group) > 1:
        raise NotImplementedError(
            "process_group of several processes is not supported: gather the logits of all classes"
            " and call without it"
        )
    if labels.is_floating_point():
        raise TypeError(f"labels must be integers, one of each row; got {labels.dtype}")
    x = logits.to(torch.promote_types(logits.dtype, torch.float32))
    x = x if logit_scale == 1 else x * logit_scale
    losses = F.cross_entropy(
        x, labels.long(), ignore_index=ignore_index, label_smoothing=label_smoothing,
        reduction="none",
    )  # fmt: skip
    if not lse_square_scale:
        return losses, torch.zeros_like(losses)
    squares = lse_square_scale * torch.logsumexp(x, dim=-1).square()
    squares = squares.masked_fill(labels == ignore_index, 0.0)
    return losses + squares, squares.detach()


class CrossEntropyLoss(torch.nn.Module):
    """The layer of `cross_entropy_loss`, whose mean is over labels that are not `ignore_index`."""

    def __init__(
        self, ignore_index: int = -100, reduction: str = "mean", label_smoothing: float = 0.0,
        logit_scale: float = 1.0, lse_square_scale: float = 0.0, inplace_backward: bool = False,
        process_group: Any = None, return_z_loss: bool = False,
    ) -> None:  # fmt: skip
        if reduction not in ("mean", "sum", "none"):
            raise ValueError(f"reduction must be 'mean', 'sum' or 'none'; got {reduction!r}")
        super().__init__()
        self.ignore_index, self.reduction = ignore_index, reduction
        self.label_smoothing, self.logit_scale = label_smoothing, logit_scale
        self.lse_square_scale, self.return_z_loss = lse_square_scale, return_z_loss
        self.process_group = process_group

    def forward(self, input: Tensor, target: Tensor, precomputed_lse: Tensor | None = None) -> Any:
        """Return the loss, with `return_z_loss` also its part by the squared logsumexp."""
        results = cross_entropy_loss(
            input, target, None, self.label_smoothing, self.logit_scale, self.lse_square_scale,
            self.ignore_index, process_group=self.process_group,
        )  # fmt: skip
        if self.reduction != "none":
            many = (target != self.ignore_index).sum() if self.reduction == "mean" else 1
            results = results[0].sum() / many, results[1].sum() / many
        return results if self.return_z_loss else results[0]
