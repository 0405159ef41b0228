"""Layer norms and RMS norms after dropout and a sum, as `flash_attn.ops` has them, in plain torch.

They are computed in float32 at least, and rounded once.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from polyattn.dialects._shared import check_rate

__all__ = [
    "DropoutAddLayerNorm",
    "DropoutAddRMSNorm",
    "RMSNorm",
    "dropout_add_layer_norm",
    "dropout_add_rms_norm",
    "layer_norm",
    "layer_norm_fn",
    "rms_norm",
    "rms_norm_fn",
]
__dir__ = __all__.copy


def layer_norm_fn(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None = None,
    x1: Tensor | None = None, weight1: Tensor | None = None, bias1: Tensor | None = None,
    eps: float = 1e-6, dropout_p: float = 0.0, rowscale: Tensor | None = None,
    prenorm: bool = False, residual_in_fp32: bool = False, zero_centered_weight: bool = False,
    is_rms_norm: bool = False, return_dropout_mask: bool = False,
    out_dtype: torch.dtype | None = None, *, layerscale: Tensor | None = None,
) -> Any:  # fmt: skip
    """Normalize the sum of dropout(x · rowscale), dropout(x1) and residual, each (..., N).

    Returns
    -------
    Tensor or tuple
        The norm, by `weight1` and `bias1` too if they are given, in `out_dtype` or that of `x`;
        with `prenorm` also the sum, in the dtype of `residual`, or else float32 with
        `residual_in_fp32`; with `return_dropout_mask` also what dropout keeps of `x` and of `x1`.

    Examples
    --------
    >>> import torch
    >>> from polyattn.dialects.flash_attn.ops.layer_norm import layer_norm_fn
    >>> layer_norm_fn(torch.tensor([3.0, 4.0]), torch.ones(2), None, is_rms_norm=True)
    tensor([0.8485, 1.1314])
    """
    check_rate(dropout_p)
    wide = torch.promote_types(x.dtype, torch.float32)
    # Rows may be flat in these, and no axis is broadcast.
    residual, x1 = (one if one is None else one.reshape(x.shape) for one in (residual, x1))
    rowscale = None if rowscale is None else rowscale.reshape(x.shape[:-1])
    total: Any = None if residual is None else residual.to(wide)
    kept: list[Any] = [None, None]
    for n, one in enumerate((x, x1) if x1 is not None else (x,)):
        one = one.to(wide)
        for scale in (None if rowscale is None else rowscale[..., None], layerscale):
            one = one if scale is None or n else one * scale
        if dropout_p:
            kept[n] = keep = torch.empty_like(one, dtype=torch.bool).bernoulli_(1 - dropout_p)
            one = torch.where(keep, one / (1 - dropout_p), 0.0)
        total = one if total is None else total + one
    results: list[Any] = []
    for own, shift in ((weight, bias), (weight1, bias1)):
        if own is not None:
            own = own.to(wide) + 1 if zero_centered_weight else own.to(wide)
            shift = None if shift is None else shift.to(wide)
            if not is_rms_norm:
                result = F.layer_norm(total, own.shape, own, shift, eps)
            else:
                result = F.rms_norm(total, own.shape, own, eps)
                result = result if shift is None else result + shift
            results.append(result.to(out_dtype or x.dtype))
    if prenorm:
        alone = torch.float32 if residual_in_fp32 else x.dtype
        results.append(total.to(alone if residual is None else residual.dtype))
    results += kept if return_dropout_mask else []
    return results[0] if len(results) == 1 else tuple(results)


#: The same by the root mean square.
rms_norm_fn = partial(layer_norm_fn, is_rms_norm=True)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float) -> Any:
    """Normalize the last axis."""
    return layer_norm_fn(x, weight, bias, eps=epsilon)


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Any:
    """Normalize the last axis by its root mean square."""
    return rms_norm_fn(x, weight, None, eps=epsilon)


def dropout_add_layer_norm(
    x0: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, dropout_p: float,
    epsilon: float, rowscale: Tensor | None = None, layerscale: Tensor | None = None,
    prenorm: bool = False, residual_in_fp32: bool = False, return_dropout_mask: bool = False,
    *, is_rms_norm: bool = False,
) -> Any:  # fmt: skip
    """Normalize dropout(x0 · rowscale) · layerscale + residual, as `layer_norm_fn` does.

    The mask of `return_dropout_mask` is one of uint8, also without dropout.
    """
    results = layer_norm_fn(
        x0, weight, bias, residual, eps=epsilon, dropout_p=dropout_p, rowscale=rowscale,
        prenorm=prenorm, residual_in_fp32=residual_in_fp32, is_rms_norm=is_rms_norm,
        return_dropout_mask=return_dropout_mask, layerscale=layerscale,
    )  # fmt: skip
    if not return_dropout_mask:
        return results
    *outputs, keep, _ = results
    return *outputs, torch.ones_like(x0, dtype=torch.uint8) if keep is None else keep.byte()


#: The same by the root mean square.
dropout_add_rms_norm = partial(dropout_add_layer_norm, is_rms_norm=True)


class RMSNorm(torch.nn.Module):
    """The layer of `rms_norm_fn`, with the parameter ``weight``."""

    def __init__(
        self, hidden_size: int, eps: float = 1e-5, dropout_p: float = 0.0,
        zero_centered_weight: bool = False, device: Any = None, dtype: Any = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.eps, self.zero_centered_weight = eps, zero_centered_weight
        self.drop = torch.nn.Dropout(dropout_p) if dropout_p > 0 else None
        self.weight = torch.nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Let the weight multiply by 1."""
        torch.nn.init.constant_(self.weight, 0.0 if self.zero_centered_weight else 1.0)

    def forward(
        self, x: Tensor, residual: Tensor | None = None, prenorm: bool = False,
        residual_in_fp32: bool = False,
    ) -> Any:  # fmt: skip
        """Normalize x + residual; `prenorm` and `residual_in_fp32` are those of the function."""
        rate = self.drop.p if self.drop is not None and self.training else 0.0
        return rms_norm_fn(
            x, self.weight, None, residual, eps=self.eps, dropout_p=rate, prenorm=prenorm,
            residual_in_fp32=residual_in_fp32, zero_centered_weight=self.zero_centered_weight,
        )  # fmt: skip


class DropoutAddLayerNorm(torch.nn.Module):
    """The layer of `dropout_add_layer_norm`, with the parameters ``weight`` and ``bias``."""

    bias: Tensor | None
    _is_rms_norm = False

    def __init__(
        self, hidden_size: int, prenorm: bool = False, p: float = 0.0, eps: float = 1e-5,
        residual_in_fp32: bool = False, device: Any = None, dtype: Any = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.prenorm, self.p, self.residual_in_fp32 = prenorm, p, residual_in_fp32
        self.eps = self.epsilon = eps
        ones = torch.ones(hidden_size, device=device, dtype=dtype)
        bias = None if self._is_rms_norm else torch.nn.Parameter(torch.zeros_like(ones))
        self.weight = torch.nn.Parameter(ones)
        self.register_parameter("bias", bias)

    def forward(self, x0: Tensor, residual: Tensor | None = None) -> Any:
        """Normalize dropout(x0) + residual."""
        return dropout_add_layer_norm(
            x0, residual, self.weight, self.bias, self.p if self.training else 0.0, self.eps,
            prenorm=self.prenorm, residual_in_fp32=self.residual_in_fp32,
            is_rms_norm=self._is_rms_norm,
        )  # fmt: skip


class DropoutAddRMSNorm(DropoutAddLayerNorm):
    """The layer of `dropout_add_rms_norm`, with the parameter ``weight``."""

    _is_rms_norm = True
