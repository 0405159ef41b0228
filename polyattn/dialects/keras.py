"""Compute attention as a function of `keras.ops` is called."""

from __future__ import annotations

from typing import Any

from polyattn._api.attention import attention
from polyattn._base.arrays import Array, cast, library_of
from polyattn.dialects._shared import check_axes, scaled, with_all_axes

__all__ = ["dot_product_attention"]
__dir__ = __all__.copy


def dot_product_attention(
    query: Array, key: Array, value: Array, bias: Array | None = None, mask: Array | None = None,
    scale: float | None = None, is_causal: bool = False, flash_attention: bool | None = None,
    attn_logits_soft_cap: float | None = None,
) -> Array:  # fmt: skip
    """Compute attention as `keras.ops.dot_product_attention` is called, on any array.

    Parameters
    ----------
    query, key, value : Array
        Shapes (B, L, H, D), (B, S, G, D) and (B, S, G, E); H is a multiple of G.
    bias : Array of float, optional
        Added to the scores; broadcasts to (B, H, L, S).
    mask : Array of bool, optional
        True, or not 0, where a key takes part; broadcasts to (B, H, L, S). It may be given with
        `bias` and `is_causal`.
    scale : float or Array without axes, optional
        Multiplies the scores; 1/√D by default.
    is_causal : bool
        Whether row i sees the keys j <= i.
    flash_attention : bool, optional
        Ignored: the kernel is chosen as for `polyattn.attention`.
    attn_logits_soft_cap : float, optional
        Bounds the scores before mask and bias.

    Returns
    -------
    Array
        Shape (B, L, H, E).

    Examples
    --------
    >>> import numpy as np
    >>> from polyattn.dialects.keras import dot_product_attention
    >>> x = np.ones((2, 5, 8, 64), dtype=np.float32)
    >>> dot_product_attention(x, x, x, is_causal=True).shape
    (2, 5, 8, 64)
    """
    check_axes("query BLHD, key BSGD, value BSGE", query, key, value)
    options: dict[str, Any] = {"query_offset": 0} if is_causal else {}
    if mask is not None:
        xp = library_of(mask, "mask").xp
        options["mask"] = with_all_axes(cast(xp, mask, xp.bool), 4, "mask")
    query, scale = scaled(query, scale)
    return attention(
        query, key, value, layout="...LHD", scale=scale, is_causal=bool(is_causal),
        bias=with_all_axes(bias, 4, "bias"), softcap=attn_logits_soft_cap, **options,
    )  # fmt: skip
