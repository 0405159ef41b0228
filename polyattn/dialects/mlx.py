"""Compute attention as a function of `mlx.core.fast` is called."""

from __future__ import annotations

from typing import Any

from polyattn._api.attention import attention
from polyattn._base.arrays import Array
from polyattn.dialects._shared import check_axes, mask_or_bias

__all__ = ["scaled_dot_product_attention"]
__dir__ = __all__.copy


def scaled_dot_product_attention(
    q: Array, k: Array, v: Array, *, scale: float, mask: str | Array | None = None,
    sinks: Array | None = None, force_fused: bool = False, stream: Any = None,
) -> Array:  # fmt: skip
    """Compute attention as `mlx.core.fast.scaled_dot_product_attention` is called, on any array.

    Parameters
    ----------
    q, k, v : Array
        Shapes (B, H, L, D), (B, G, S, D) and (B, G, S, E); H is a multiple of G.
    scale : float
        Multiplies the scores.
    mask : "causal" or Array, optional
        "causal", where the last row is at the last key; or an array that broadcasts to
        (B, H, L, S), of bool, True where a key takes part, or float, added to the scores.
    sinks : Array of float, optional
        One more logit for each head in the denominator, shape (H,).
    force_fused, stream : bool, object
        Ignored: they change no number here.

    Returns
    -------
    Array
        Shape (B, H, L, E).

    Examples
    --------
    >>> import numpy as np
    >>> from polyattn.dialects.mlx import scaled_dot_product_attention
    >>> x = np.ones((2, 8, 5, 64), dtype=np.float32)
    >>> scaled_dot_product_attention(x, x, x, scale=0.125, mask="causal").shape
    (2, 8, 5, 64)
    """
    check_axes("q BHLD, k BGSD, v BGSE, sinks H", q, k, v, sinks)
    options: dict[str, Any] = {"scale": scale, "sinks": sinks}
    if isinstance(mask, str):
        if mask != "causal":
            raise ValueError(f'mask must be "causal" or an array; got {mask!r}')
        return attention(q, k, v, is_causal=True, **options)
    return attention(q, k, v, **options, **mask_or_bias(mask, 4))
