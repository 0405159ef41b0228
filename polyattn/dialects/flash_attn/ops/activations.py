"""Activations and their gradients, as `flash_attn.ops.activations` has them, in plain torch.

They are computed in float32 at least, and rounded once.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor
from torch.func import vjp
from torch.nn import functional as F

__all__ = [
    "FastGeLUFunction",
    "GeLUFunction",
    "SwiGLUFunction",
    "bias_gelu",
    "bias_gelu_back",
    "bias_gelu_impl",
    "fast_gelu_impl",
    "gelu_bwd",
    "gelu_fwd",
    "relu_bwd",
    "sqrelu_bwd",
    "sqrelu_fwd",
    "swiglu",
    "swiglu_bwd",
    "swiglu_fwd",
]
__dir__ = __all__.copy


def gelu_fwd(x: Tensor) -> Tensor:
    """Return the GELU of x, by its approximation with tanh."""
    return F.gelu(_wide(x), approximate="tanh").to(x.dtype)


def gelu_bwd(g: Tensor, x: Tensor) -> Tensor:
    """Return the gradient of `gelu_fwd`, where g is that of its result."""
    gradient: Tensor = vjp(gelu_fwd, x)[1](g)[0]
    return gradient


def bias_gelu(y: Tensor, bias: Tensor) -> Tensor:
    """Return `gelu_fwd` of y + bias, in the dtype of y."""
    return F.gelu(_wide(y) + _wide(bias), approximate="tanh").to(y.dtype)


def bias_gelu_back(g: Tensor, y: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of `bias_gelu`, where g is that of its result."""
    gradients: tuple[Tensor, Tensor] = vjp(bias_gelu, y, bias)[1](g)
    return gradients


def relu_bwd(g: Tensor, x: Tensor) -> Tensor:
    """Return g where x >= 0, and 0 elsewhere; the derivative that torch takes at 0 is 0."""
    return torch.where(x >= 0, g, 0.0).to(x.dtype)


def sqrelu_fwd(x: Tensor) -> Tensor:
    """Return the square of x where x is positive, and 0 elsewhere."""
    return F.relu(x).square()


def sqrelu_bwd(g: Tensor, x: Tensor) -> Tensor:
    """Return the gradient of `sqrelu_fwd`, where g is that of its result."""
    return (2 * _wide(g) * F.relu(x)).to(x.dtype)


def swiglu(x: Tensor, y: Tensor) -> Tensor:
    """Return SiLU(x) · y, in the dtype of x.

    Examples
    --------
    >>> import torch
    >>> from polyattn.dialects.flash_attn.ops.activations import swiglu
    >>> swiglu(torch.tensor([0.0, 2.0]), torch.tensor([3.0, 3.0]))
    tensor([0.0000, 5.2848])
    """
    return (F.silu(_wide(x)) * _wide(y)).to(x.dtype)


def swiglu_bwd(x: Tensor, y: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of `swiglu`, where g is that of its result."""
    gradients: tuple[Tensor, Tensor] = vjp(swiglu, x, y)[1](g)
    return gradients


swiglu_fwd, fast_gelu_impl, bias_gelu_impl = swiglu, gelu_fwd, bias_gelu
#: The same as functions of torch.autograd are called.
SwiGLUFunction = SimpleNamespace(apply=swiglu)
FastGeLUFunction, GeLUFunction = SimpleNamespace(apply=gelu_fwd), SimpleNamespace(apply=bias_gelu)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
