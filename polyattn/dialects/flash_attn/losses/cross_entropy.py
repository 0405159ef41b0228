"""The cross entropy, as `flash_attn.losses` and `flash_attn.ops.triton` have it, in plain torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

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
    x = logits.to(torch.promote_types(logits.dtype, torch.float32)) * logit_scale
    ignored = labels == ignore_index
    total = torch.logsumexp(x, dim=-1)
    right = x.gather(-1, labels.masked_fill(ignored, 0).long()[:, None])[:, 0]
    losses = total - (1 - label_smoothing) * right
    if label_smoothing:
        losses = losses - label_smoothing * x.mean(dim=-1)
    squares = lse_square_scale * total.square()
    losses, squares = (y.masked_fill(ignored, 0.0) for y in (losses + squares, squares))
    return losses, squares.detach()


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
        self.ignore_index, self.reduction, self.return_z_loss = (
            ignore_index, reduction, return_z_loss,
        )  # fmt: skip
        self.options = {
            "label_smoothing": label_smoothing, "logit_scale": logit_scale,
            "lse_square_scale": lse_square_scale, "process_group": process_group,
        }  # fmt: skip

    def forward(self, input: Tensor, target: Tensor, precomputed_lse: Tensor | None = None) -> Any:
        """Return the loss, with `return_z_loss` also its part by the squared logsumexp."""
        results = cross_entropy_loss(input, target, ignore_index=self.ignore_index, **self.options)
        if self.reduction != "none":
            many = (target != self.ignore_index).sum() if self.reduction == "mean" else 1
            results = results[0].sum() / many, results[1].sum() / many
        return results if self.return_z_loss else results[0]
