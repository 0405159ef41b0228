"""Compute attention as functions of torch are called."""

from __future__ import annotations

from typing import Any

from polyattn._api.attention import attention
from polyattn._base.arrays import Array
from polyattn.dialects._flash import NO_WINDOW, varlen
from polyattn.dialects._packed import Packed
from polyattn.dialects._shared import dropout_of, mask_or_bias, scaled, shape_of

__all__ = ["scaled_dot_product_attention", "varlen_attn"]
__dir__ = __all__.copy


def scaled_dot_product_attention(
    query: Array, key: Array, value: Array, attn_mask: Array | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None,
    enable_gqa: bool = False,
) -> Array:  # fmt: skip
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
        Whether row i sees only the keys j <= i. With `attn_mask` both count, as in torch's fused
        kernel of the CPU; its other kernels raise.
    scale : float or Array without axes, optional
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
        If `is_causal` is given with a CausalBias, heads differ without `enable_gqa`, or the lengths
        of a causal_lower_right are not those of the call.
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
    shapes = [shape_of(query, "query"), shape_of(key, "key")]
    if not enable_gqa and min(map(len, shapes)) > 2:
        _check_same_heads(shapes[0][-3], shapes[1][-3])
    if type(attn_mask).__name__ == "CausalBias":
        if is_causal:
            raise ValueError("give a CausalBias as attn_mask or is_causal, not both")
        masks = _causal_bias(attn_mask, (shapes[0][-2], shapes[1][-2]))
    else:
        masks = mask_or_bias(attn_mask, max(map(len, shapes)))
        masks |= {"is_causal": True, "query_offset": 0} if is_causal else {}
    dropout = dropout_of(query, dropout_p)
    query, scale = scaled(query, scale)
    return attention(query, key, value, scale=scale, dropout=dropout, **masks)


def _check_same_heads(of_query: int, of_key: int) -> None:
    if of_query != of_key:
        raise ValueError(f"query has {of_query} heads and key {of_key}: pass enable_gqa=True")


def _causal_bias(bias: Any, lengths: tuple[int, int]) -> dict[str, Any]:
    """Return the options equal to torch's CausalBias, a tensor whose memory is not used."""
    shape = (bias.seq_len_q, bias.seq_len_kv)
    if bias.variant.name == "UPPER_LEFT" or shape[0] == shape[1]:
        return {"is_causal": True, "query_offset": 0}
    if shape != lengths:
        raise ValueError(f"attn_mask is causal_lower_right{shape}, but the scores are {lengths}")
    return {"is_causal": True, "query_offset": shape[1] - shape[0]}


def varlen_attn(
    query: Array, key: Array, value: Array, cu_seq_q: Array, cu_seq_k: Array | None = None,
    max_q: int | None = None, max_k: int | None = None, *, return_aux: Any = None,
    scale: float | None = None, window_size: tuple[int, int] = NO_WINDOW,
    enable_gqa: bool = False, seqused_k: Array | None = None, block_table: Array | None = None,
    num_splits: int | None = None,
) -> Any:  # fmt: skip
    """Compute attention as `torch.nn.attention.varlen.varlen_attn` is called, on any array.

    Parameters
    ----------
    query, key, value : Array
        Shapes (T, H, D), (U, G, D) and (U, G, E), of sequences one after another; with
        `block_table`, key and value are (pages, page, G, D) and (pages, page, G, E).
    cu_seq_q, cu_seq_k : Array of int
        Where each sequence begins in query and in key, and the last one ends, shape (B + 1,). With
        `block_table` the second may be None.
    max_q, max_k : int, optional
        Ignored.
    return_aux : AuxRequest, optional
        The logsumexp is returned too if its field ``lse`` is true.
    scale : float, optional
        Multiplies the scores; 1/√D by default.
    window_size : tuple of int
        Number of keys that a row sees before and after its position, where the last row is at the
        last key; −1 for no bound. (−1, 0) is causal.
    enable_gqa : bool
        Whether G may be less than H.
    seqused_k : Array of int, optional
        Number of keys of each sequence that take part, shape (B,).
    block_table : Array of int, optional
        The pages of each sequence, shape (B, most pages); needs `seqused_k`.
    num_splits : int, optional
        Ignored: it changes no number here.

    Returns
    -------
    Array or tuple
        Shape (T, H, E); with `return_aux` also the logsumexp, (H, T).

    Raises
    ------
    ValueError
        If heads differ without `enable_gqa`, or lengths are missing.
    """
    if not enable_gqa:
        _check_same_heads(shape_of(query, "query")[-2], shape_of(key, "key")[-2])
    if block_table is not None and seqused_k is None:
        raise ValueError("block_table needs seqused_k, the lengths of the sequences")
    if block_table is None and cu_seq_k is None:
        raise ValueError("cu_seq_k is missing, which only block_table replaces")
    logsumexp = bool(return_aux is not None and return_aux.lse)
    keys = Packed([] if cu_seq_k is None else cu_seq_k, seqused_k)
    return varlen(
        query, key, value, Packed(cu_seq_q), keys, scale, False, window_size, 0.0,
        table=block_table, logsumexp=logsumexp,
    )  # fmt: skip
