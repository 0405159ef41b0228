"""Compute attention as a function of tokamax is called, on any array."""

from __future__ import annotations

from typing import Any

from polyattn._base.arrays import Array
from polyattn.dialects.jax import attend

__all__ = ["dot_product_attention"]
__dir__ = __all__.copy


def dot_product_attention(
    query: Array, key: Array, value: Array, bias: Array | None = None, mask: Array | None = None,
    *, scale: float | None = None, is_causal: bool = False,
    query_seq_lengths: Array | None = None, key_value_seq_lengths: Array | None = None,
    local_window_size: int | tuple[int, int] | None = None, logits_soft_cap: float | None = None,
    implementation: Any = None,
) -> Array:  # fmt: skip
    """Compute attention as `tokamax.dot_product_attention` is called.

    Parameters
    ----------
    query, key, value : Array
        Shapes (..., L, H, D), (..., S, G, D) and (..., S, G, E), with up to three batch axes.
    bias : Array, optional
        As for `polyattn.dialects.dot_product_attention`, as all arguments here.
    mask : Array of bool, optional
        True where a key takes part; broadcasts to (..., H, L, S).
    scale : float or Array without axes, optional
        Multiplies the scores; 1/√D by default.
    is_causal : bool
        Whether row i sees the keys j <= i.
    query_seq_lengths, key_value_seq_lengths : Array of int, optional
        Number of real rows and keys per batch item, (...,).
    local_window_size : int or tuple of int, optional
        Number of keys that a row sees before and after its position.
    logits_soft_cap : float, optional
        Bounds the scores.
    implementation : str or sequence of str, optional
        Ignored: the kernel is chosen as for `polyattn.attention`.

    Returns
    -------
    Array
        Shape (..., L, H, E).

    Raises
    ------
    NotImplementedError
        If `bias` and `logits_soft_cap` are given: tokamax bounds the scores with the bias, and
        `polyattn.attention` without.

    Examples
    --------
    >>> import numpy as np
    >>> from polyattn.dialects.tokamax import dot_product_attention
    >>> x = np.ones((2, 5, 8, 64), dtype=np.float32)
    >>> dot_product_attention(x, x, x, is_causal=True, logits_soft_cap=50.0).shape
    (2, 5, 8, 64)
    """
    if bias is not None and logits_soft_cap is not None:
        raise NotImplementedError(
            "tokamax bounds the scores with the bias added, polyattn before it is added: leave out"
            " bias or logits_soft_cap, or call polyattn.attention with a score_mod that does both"
        )
    return attend(
        query, key, value, bias, mask, scale, is_causal, query_seq_lengths, key_value_seq_lengths,
        local_window_size, softcap=logits_soft_cap,
    )  # fmt: skip
