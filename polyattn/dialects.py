"""Signatures that people already use, defined by `polyattn.attention`.

Thin: each translates another convention's arguments into ours and keeps that convention's meaning,
but for what ours promises more of. A row that sees no key is 0 in all of them.
"""

from __future__ import annotations

import functools
import math
import operator
from typing import Any, NamedTuple

from polyattn.api.attention import attention
from polyattn.api.partial import Partial, attention_partial
from polyattn.arrays import Array, cast, facts_of, index_range, library_of

__all__ = [
    "OnnxAttention",
    "dot_product_attention",
    "onnx_attention",
    "scaled_dot_product_attention",
]


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
        (..., H, L, S) by the ordinary rule, so one of rank 3 is per head. torch's CausalBias stands
        for the mask that it describes.
    dropout_p : float
        Must be 0: torch draws from a generator that no other library has.
    is_causal : bool
        Whether row i sees the keys j <= i, both counted from the first.
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
        If `attn_mask` and `is_causal` are both given, heads differ without `enable_gqa`, or a
        causal_lower_right is of other lengths than the call.
    NotImplementedError
        If `dropout_p` is not 0.

    Examples
    --------
    >>> import numpy as np
    >>> from polyattn.dialects import scaled_dot_product_attention
    >>> x = np.ones((2, 8, 5, 64), dtype=np.float32)
    >>> scaled_dot_product_attention(x, x, x, is_causal=True).shape
    (2, 8, 5, 64)
    """
    if dropout_p != 0:
        raise NotImplementedError(f"dropout_p must be 0; got {dropout_p!r}")
    if attn_mask is not None and is_causal:
        raise ValueError("attn_mask and is_causal are not to be given together")
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
        masks = _mask_or_bias(attn_mask, max(map(len, shapes)))
    return attention(query, key, value, scale=scale, **masks)


def dot_product_attention(
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None = None,
    mask: Array | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Array | None = None,
    key_value_seq_lengths: Array | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    return_residual: bool = False,
) -> Array | Partial:
    """Compute attention as `jax.nn.dot_product_attention` is called.

    Parameters
    ----------
    query, key, value : Array
        Shapes (B, L, H, D), (B, S, G, D) and (B, S, G, E), or all without B.
    bias : Array, optional
        Added to the scores; broadcasts to (B, H, L, S), so one of rank 3 is per head.
    mask : Array of bool, optional
        True where a key takes part; broadcasts to (B, H, L, S), so one of rank 3 is per head.
    scale : float, optional
        Multiplies the scores; 1/√D by default.
    is_causal : bool
        Whether row i sees the keys j <= i, both counted from the first.
    query_seq_lengths, key_value_seq_lengths : Array of int, optional
        How many rows and keys of each batch item are none of padding, shape (B,). The rows after
        them are 0.
    local_window_size : int or tuple of int, optional
        How many keys before and after its own position a row sees, one number for both.
    return_residual : bool
        Whether to return the logsumexp as well, (B, L, H), in float32 at least.

    Returns
    -------
    Array or Partial
        Shape (B, L, H, E); with `return_residual` the Partial.

    Examples
    --------
    >>> import numpy as np
    >>> from polyattn.dialects import dot_product_attention
    >>> x = np.ones((2, 5, 8, 64), dtype=np.float32)
    >>> dot_product_attention(x, x, x, local_window_size=(2, 0)).shape
    (2, 5, 8, 64)
    """
    xp = library_of(query, "query").xp
    window, rank = local_window_size, len(query.shape)
    call = attention_partial if return_residual else attention
    return call(
        query,
        key,
        value,
        bias=_spelt_out(bias, rank, "bias"),
        mask=_and(
            _spelt_out(mask, rank, "mask"),
            _within(xp, query, query_seq_lengths, (-1, 1)),
            _within(xp, key, key_value_seq_lengths, (1, -1)),
        ),
        scale=scale,
        is_causal=is_causal,
        window=(window, window) if isinstance(window, int) else window,
        query_offset=0,
        layout="...LHD",
    )


class OnnxAttention(NamedTuple):
    """The outputs of ONNX's Attention operator.

    Attributes
    ----------
    Y : Array
        The attention, in the layout of Q.
    present_key, present_value : Array
        All keys and values, the past ones first, shapes (B, G, S, D) and (B, G, S, E).
    """

    Y: Array
    present_key: Array
    present_value: Array


def onnx_attention(
    Q: Array,  # noqa: N803 -- the operator's own names
    K: Array,  # noqa: N803
    V: Array,  # noqa: N803
    attn_mask: Array | None = None,
    past_key: Array | None = None,
    past_value: Array | None = None,
    nonpad_kv_seqlen: Array | None = None,
    *,
    is_causal: int = 0,
    scale: float | None = None,
    softcap: float = 0.0,
    q_num_heads: int | None = None,
    kv_num_heads: int | None = None,
    left_window_size: int = -1,
    right_window_size: int = -1,
    softmax_precision: int | None = None,
    kernel: str | None = None,
) -> OnnxAttention:
    """Compute attention as the ONNX operator Attention of opsets 23, 24 and 25, errata included.

    Parameters
    ----------
    Q, K, V : Array
        Shapes (B, H, L, D), (B, G, S, D) and (B, G, S, E), or (B, L, H·D), (B, S, G·D) and
        (B, S, G·E) with the numbers of heads.
    attn_mask : Array, optional
        Bool or float; broadcasts to (B, H, L, S), one of rank 3 per head. Where its last axis is
        shorter than all keys, those after it take no part.
    past_key, past_value : Array, optional
        Keys and values before K and V, shapes (B, G, P, D) and (B, G, P, E).
    nonpad_kv_seqlen : Array of int, optional
        How many keys of each batch item are none of padding, shape (B,).
    is_causal : int
        Whether row i sees the keys j <= i + offset: P with a past, the keys that are no padding
        less L with `nonpad_kv_seqlen`, otherwise 0.
    scale : float, optional
        Multiplies the scores; 1/√D by default.
    softcap : float
        Bounds the scores before the mask is added; 0 for no bound.
    q_num_heads, kv_num_heads : int, optional
        H and G, for inputs of rank 3.
    left_window_size, right_window_size : int
        How many keys before and after its position a row sees; -1 for no bound.
    softmax_precision : int, optional
        Accepted; scores and sums are float32 at least.
    kernel : str, optional
        As for `polyattn.attention`.

    Returns
    -------
    OnnxAttention
        The attention, and all keys and values.

    Raises
    ------
    ValueError
        If inputs of rank 3 come without numbers of heads that divide them, or inputs that exclude
        or need each other are given.

    Examples
    --------
    >>> import numpy as np
    >>> from polyattn.dialects import onnx_attention
    >>> x = np.ones((2, 5, 8 * 64), dtype=np.float32)
    >>> outputs = onnx_attention(x, x, x, is_causal=1, q_num_heads=8, kv_num_heads=8)
    >>> outputs.Y.shape, outputs.present_key.shape
    ((2, 5, 512), (2, 8, 5, 64))
    """
    if (past_key is None) != (past_value is None):
        raise ValueError("past_key and past_value are given together or not at all")
    if past_key is not None and nonpad_kv_seqlen is not None:
        raise ValueError("past_key and nonpad_kv_seqlen are not to be given together")
    xp = library_of(Q, "Q").xp
    packed = len(Q.shape) == 3
    if packed:
        if q_num_heads is None or kv_num_heads is None:
            raise ValueError("inputs of rank 3 need q_num_heads and kv_num_heads")
        Q = _split_heads(xp, Q, q_num_heads)  # noqa: N806
        K, V = _split_heads(xp, K, kv_num_heads), _split_heads(xp, V, kv_num_heads)  # noqa: N806
    past = 0
    if past_key is not None and past_value is not None:
        past = past_key.shape[-2]
        K = xp.concat((past_key, K), axis=-2)  # noqa: N806
        V = xp.concat((past_value, V), axis=-2)  # noqa: N806
    keys = K.shape[-2]
    masks = _mask_or_bias(None if attn_mask is None else _padded(xp, attn_mask, keys), 4)
    offset: Any = past
    if nonpad_kv_seqlen is not None:
        offset = nonpad_kv_seqlen - Q.shape[-2]
        real = index_range(xp, 0, keys, K) < xp.reshape(nonpad_kv_seqlen, (-1, 1, 1, 1))
        masks["mask"] = _and(masks.get("mask"), real)
    output = attention(
        Q,
        K,
        cast(xp, V, Q.dtype),
        is_causal=bool(is_causal),
        window=(
            None if left_window_size < 0 else left_window_size,
            None if right_window_size < 0 else right_window_size,
        ),
        query_offset=offset,
        scale=scale,
        softcap=softcap or None,
        kernel=kernel,
        **masks,
    )
    return OnnxAttention(_join_heads(xp, output) if packed else output, K, V)


def _within(xp: Any, array: Array, lengths: Array | None, axes: tuple[int, int]) -> Array | None:
    """Return which rows or keys are none of padding, along the axis of the scores that is -1."""
    if lengths is None:
        return None
    at = xp.reshape(index_range(xp, 0, array.shape[-3], array), axes)
    inside = at < xp.reshape(lengths, (-1, 1, 1, 1))
    return inside if len(array.shape) == 4 else inside[0, ...]


def _and(*masks: Array | None) -> Array | None:
    given = [mask for mask in masks if mask is not None]
    return functools.reduce(operator.and_, given) if given else None


def _mask_or_bias(mask: Array | None, rank: int) -> dict[str, Array]:
    """Return an argument that others use for both, with every axis of the scores spelt out."""
    if mask is None:
        return {}
    name = "mask" if facts_of(mask, "attn_mask").dtype == "bool" else "bias"
    return {name: _spelt_out(mask, rank, "attn_mask")}


def _spelt_out(mask: Array | None, rank: int, name: str) -> Array | None:
    """Return a mask or bias of three axes and more with as many as the scores have."""
    if mask is None:
        return None
    shape = facts_of(mask, name).shape
    if len(shape) < 3 or len(shape) == rank:
        return mask
    extra = max(0, len(shape) - rank)
    if any(length != 1 for length in shape[:extra]):
        return mask
    shape = (*(1,) * (rank - len(shape)), *shape[extra:])
    return library_of(mask).xp.reshape(mask, shape)


def _causal_bias(bias: Any, lengths: tuple[int, int]) -> dict[str, Any]:
    """Return what torch's CausalBias says, as torch takes it; its memory holds nothing."""
    made = (bias.seq_len_q, bias.seq_len_kv)
    if bias.variant.name == "UPPER_LEFT" or made[0] == made[1]:
        return {"is_causal": True, "query_offset": 0}
    if made != lengths:
        raise ValueError(f"attn_mask is causal_lower_right{made}, and the scores are {lengths}")
    return {"is_causal": True, "query_offset": made[1] - made[0]}


def _padded(xp: Any, mask: Array, keys: int) -> Array:
    facts_of(mask, "attn_mask")  # refuses what is no array
    missing = keys - mask.shape[-1]
    if missing <= 0 or mask.shape[-1] == 1:
        return mask
    end = xp.zeros_like(xp.broadcast_to(mask[..., :1], (*mask.shape[:-1], missing)))
    if mask.dtype != xp.bool:
        end = end - math.inf
    return xp.concat((mask, end), axis=-1)


def _split_heads(xp: Any, array: Array, heads: int) -> Array:
    batch, length, width = array.shape
    if heads < 1 or width % heads:
        raise ValueError(f"{heads} heads do not divide a width of {width}: {tuple(array.shape)}")
    return xp.permute_dims(xp.reshape(array, (batch, length, heads, width // heads)), (0, 2, 1, 3))


def _join_heads(xp: Any, array: Array) -> Array:
    batch, heads, length, size = array.shape
    return xp.reshape(xp.permute_dims(array, (0, 2, 1, 3)), (batch, length, heads * size))
