"""The functions and layers of `xformers.ops` that code imports, by plain functions of torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from polyattn.dialects.xformers.ops import fmha as fmha
from polyattn.dialects.xformers.ops.fmha import *  # noqa: F403 -- as the original

AttentionMask = fmha.AttentionBias
unbind = torch.unbind


def index_select_cat(sources: Sequence[Tensor], indices: Sequence[Tensor]) -> Tensor:
    """Return rows of each source, (rows, ...), flat, one source after another."""
    return torch.cat([x[i.long()].flatten() for x, i in zip(sources, indices, strict=True)])


def scaled_index_add(
    input: Tensor, index: Tensor, source: Tensor, scaling: Tensor | None = None, alpha: float = 1.0
) -> Tensor:
    """Add `alpha` times `source` times `scaling` to rows of `input`, in place."""
    added = source if scaling is None else source * scaling.to(source.dtype)
    return input.index_add_(0, index, added.to(input.dtype), alpha=alpha)


def swiglu(
    x: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None, w3: Tensor,
    b3: Tensor | None, *, op: Any = None,
) -> Tensor:  # fmt: skip
    """Return ``w3 (silu(w1 x + b1) * (w2 x + b2)) + b3``."""
    linear = nn.functional.linear
    return linear(nn.functional.silu(linear(x, w1, b1)) * linear(x, w2, b2), w3, b3)


class SwiGLU(nn.Module):
    """The layer of two gated linear layers and one after them, with xFormers' names of weights."""

    def __init__(
        self, in_features: int, hidden_features: int, out_features: int | None = None,
        bias: bool = True, *, _pack_weights: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        names = {"w12": 2} if _pack_weights else {"w1": 1, "w2": 1}
        for name, count in names.items():
            self.add_module(name, nn.Linear(in_features, count * hidden_features, bias=bias))
        self.w3 = nn.Linear(hidden_features, out_features or in_features, bias=bias)
        self.in_features, self.hidden_features = in_features, hidden_features
        self.out_features, self.op = self.w3.out_features, None

    def forward(self, x: Tensor) -> Tensor:
        """Return (..., out), of (..., in)."""
        parts = [layer(x) for name, layer in self.named_children() if name != "w3"]
        one, other = parts if len(parts) == 2 else parts[0].chunk(2, dim=-1)
        return self.w3(nn.functional.silu(one) * other)  # type: ignore[no-any-return]
