"""Compute attention as SageAttention is called, in the precision of the arrays."""

from __future__ import annotations

from typing import Any

from polyattn._api.attention import attention
from polyattn._api.partial import attention_partial
from polyattn._base.arrays import Array, library_of
from polyattn.dialects._flash import NO_WINDOW, varlen
from polyattn.dialects._packed import Packed
from polyattn.dialects._shared import check_axes, scaled, shape_of

__all__ = ["sageattn", "sageattn_varlen"]
__dir__ = __all__.copy


def sageattn(
    q: Array, k: Array, v: Array, tensor_layout: str = "HND", is_causal: bool = False,
    sm_scale: float | None = None, return_lse: bool = False, **quantization: Any,
) -> Any:  # fmt: skip
    """Compute attention as `sageattention.sageattn` is called, without quantization.

    Parameters
    ----------
    q, k, v : Array
        Shapes (B, H, L, D), (B, G, S, D) and (B, G, S, E), or as `tensor_layout` says.
    tensor_layout : {"HND", "NHD"}
        Whether the axis of heads is before or after that of rows and keys.
    is_causal : bool
        Whether row i sees the keys j <= i; L must be S.
    sm_scale : float, optional
        Multiplies the scores; 1/√D by default.
    return_lse : bool
        Whether to return the logsumexp too, (B, H, L).
    **quantization : object
        Ignored: arrays are not quantized, and nothing has to be smoothed.

    Returns
    -------
    Array or tuple
        Shape of `q`, with E in place of D.

    Raises
    ------
    ValueError
        If the shapes do not fit, `tensor_layout` is unknown, or a causal call has L != S.

    Examples
    --------
    >>> import numpy as np
    >>> from polyattn.dialects.sageattention import sageattn
    >>> x = np.ones((2, 8, 5, 64), dtype=np.float32)
    >>> sageattn(x, x, x, is_causal=True).shape
    (2, 8, 5, 64)
    """
    if tensor_layout not in ("HND", "NHD"):
        raise ValueError(f'tensor_layout must be "HND" or "NHD"; got {tensor_layout!r}')
    axes = "q BHLD, k BGSD, v BGSE" if tensor_layout == "HND" else "q BLHD, k BSGD, v BSGE"
    check_axes(axes, q, k, v)
    rows, keys = (shape_of(x, "q or k")[1 + (tensor_layout == "HND")] for x in (q, k))
    if is_causal and rows != keys:
        raise ValueError(f"is_causal is for as many rows as keys; got L = {rows} and S = {keys}")
    q, scale = scaled(q, sm_scale)
    layout = "...HLD" if tensor_layout == "HND" else "...LHD"
    call: Any = attention_partial if return_lse else attention
    found = call(q, k, v, layout=layout, is_causal=bool(is_causal), scale=scale)
    if not return_lse:
        return found
    output, lse = found
    return output, lse if layout == "...HLD" else library_of(lse).xp.matrix_transpose(lse)


def sageattn_varlen(
    q: Array, k: Array, v: Array, cu_seqlens_q: Array, cu_seqlens_k: Array, max_seqlen_q: int,
    max_seqlen_k: int, is_causal: bool = False, sm_scale: float | None = None,
    **quantization: Any,
) -> Array:  # fmt: skip
    """Compute attention of packed sequences as `sageattention.sageattn_varlen` is called.

    Parameters
    ----------
    q, k, v : Array
        Shapes (T, H, D), (U, G, D) and (U, G, E), of sequences one after another.
    cu_seqlens_q, cu_seqlens_k : Array of int
        Where each sequence begins, and the last ends, (sequences + 1,).
    max_seqlen_q, max_seqlen_k : int
        Ignored.
    is_causal : bool
        Whether row i sees the keys j <= i, in sequences of as many rows as keys. In others the
        last row is at the last key.
    sm_scale : float, optional
        Multiplies the scores; 1/√D by default.
    **quantization : object
        Ignored, as by `sageattn`.

    Returns
    -------
    Array
        Shape (T, H, E).
    """
    rows, keys = Packed(cu_seqlens_q), Packed(cu_seqlens_k)
    return varlen(q, k, v, rows, keys, sm_scale, is_causal, NO_WINDOW, 0.0)
