"""Compute attention as functions of torch are called."""

from __future__ import annotations

from typing import Any

from polyattn._api.attention import attention
from polyattn._base.arrays import Array
from polyattn.dialects._shared import dropout_of, mask_or_bias

__all__ = ["scaled_dot_product_attention"]


def scaled_dot_product_attention(
    query: Array,
    key: Array,
    value: Array,
    attn_mask: Array | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Array:
    """Compute attention as `torch.nn.functional.scaled_dot_product_attention` is called.

    Parameters
    ----------
    query, key, value : Array
        Shapes (..., H, L, D), (..., G, S, D) and (..., G, S, E), of any array library.
    attn_mask : Array, optional
        Bool, True where a key takes part, or float, added to the scores. It broadcasts to
        (..., H, L, S) by the ordinary rule, so one of rank 3 is per head. A CausalBias of torch is
        translated into the mask that it describes.
    dropout_p : float
        The rate at which weights are dropped. The seed comes from torch's generator on the device
        of `query`, so ``torch.manual_seed`` repeats a call, or from ``numpy.random``. Torch's
        function drops other weights: these are those that `polyattn.attention` drops for the seed.
    is_causal : bool
        Whether row i sees the keys j <= i.
    scale : float, optional
        Multiplies the scores; 1/√D by default.
    enable_gqa : bool
        Whether G may be less than H.

    Returns
    -------
    Array
        Shape (..., H, L, E).

    Raises
    ------
    ValueError
        If `attn_mask` and `is_causal` are both given, heads differ without `enable_gqa`, or the
        lengths of a causal_lower_right are not those of the call.
    NotImplementedError
        If `dropout_p` is not 0 and `query` is neither of torch nor of NumPy, whose generators give
        the seed.

    Examples
    --------
    >>> import numpy as np
    >>> from polyattn.dialects import scaled_dot_product_attention
    >>> x = np.ones((2, 8, 5, 64), dtype=np.float32)
    >>> scaled_dot_product_attention(x, x, x, is_causal=True).shape
    (2, 8, 5, 64)
    """
    dropout = dropout_of(query, dropout_p)
    if attn_mask is not None and is_causal:
        raise ValueError("give attn_mask or is_causal, not both")
    shapes = [tuple(array.shape) for array in (query, key)]
    if not enable_gqa and min(map(len, shapes)) > 2 and shapes[0][-3] != shapes[1][-3]:
        raise ValueError(
            f"query has {shapes[0][-3]} heads and key {shapes[1][-3]}: pass enable_gqa=True"
        )
    if is_causal:
        masks: dict[str, Any] = {"is_causal": is_causal, "query_offset": 0}
    elif type(attn_mask).__name__ == "CausalBias":
        masks = _causal_bias(attn_mask, (shapes[0][-2], shapes[1][-2]))
    else:
        masks = mask_or_bias(attn_mask, max(map(len, shapes)))
    return attention(query, key, value, scale=scale, dropout=dropout, **masks)


def _causal_bias(bias: Any, lengths: tuple[int, int]) -> dict[str, Any]:
    """Return the options equal to torch's CausalBias, a tensor whose memory is not used."""
    shape = (bias.seq_len_q, bias.seq_len_kv)
    if bias.variant.name == "UPPER_LEFT" or shape[0] == shape[1]:
        return {"is_causal": True, "query_offset": 0}
    if shape != lengths:
        raise ValueError(f"attn_mask is causal_lower_right{shape}, but the scores are {lengths}")
    return {"is_causal": True, "query_offset": shape[1] - shape[0]}
