"""Compute attention as the operator of ONNX does."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from polyattn import masks
from polyattn._api.attention import attention
from polyattn._api.weights import attention_weights
from polyattn._base.arrays import Array, cast, facts_of, index_range, library_of
from polyattn.dialects._shared import both, check_axes, integers, mask_or_bias, pair, shape_of

__all__ = ["OnnxAttention", "onnx_attention"]
__dir__ = __all__.copy


class OnnxAttention(NamedTuple):
    """The outputs of ONNX's Attention operator.

    Attributes
    ----------
    Y : Array
        The attention, in the layout of Q.
    present_key, present_value : Array
        All keys and values, past ones first, shapes (B, G, S, D) and (B, G, S, E).
    qk_matmul_output : Array or None
        The scores, shape (B, H, L, S), if `qk_matmul_output_mode` is given.
    """

    Y: Array
    present_key: Array
    present_value: Array
    qk_matmul_output: Array | None = None


def onnx_attention(
    Q: Array, K: Array, V: Array,  # noqa: N803 -- the operator's own names
    attn_mask: Array | None = None, past_key: Array | None = None,
    past_value: Array | None = None, nonpad_kv_seqlen: Array | None = None, *,
    is_causal: int = 0, scale: float | None = None, softcap: float = 0.0,
    q_num_heads: int | None = None, kv_num_heads: int | None = None,
    left_window_size: int = -1, right_window_size: int = -1,
    softmax_precision: int | None = None, qk_matmul_output_mode: int | None = None,
    kernel: str | Sequence[str] | None = None,
) -> OnnxAttention:  # fmt: skip
    """Compute attention as the ONNX operator Attention of opsets 23, 24 and 25, errata included.

    Parameters
    ----------
    Q, K, V : Array
        Shapes (B, H, L, D), (B, G, S, D) and (B, G, S, E), or (B, L, H·D), (B, S, G·D) and
        (B, S, G·E) with the numbers of heads.
    attn_mask : Array, optional
        Bool or float; broadcasts to (B, H, L, S), one of rank 3 per head. If its last axis is
        shorter than the keys, the remaining keys take no part.
    past_key, past_value : Array, optional
        Keys and values before K and V, shapes (B, G, P, D) and (B, G, P, E).
    nonpad_kv_seqlen : Array of int, optional
        Number of real (non-padding) keys per batch item, shape (B,).
    is_causal : int
        Whether row i sees the keys j <= i + offset; the offset is P with a past,
        `nonpad_kv_seqlen` − L if that is given, otherwise 0.
    scale : float, optional
        Multiplies the scores; 1/√D by default.
    softcap : float
        Bounds the scores before the mask is added; 0 for no bound.
    q_num_heads, kv_num_heads : int, optional
        H and G, for inputs of rank 3.
    left_window_size, right_window_size : int
        Number of keys that a row sees before and after its position; -1 for no bound.
    softmax_precision : int, optional
        Accepted; scores and sums are float32 at least.
    qk_matmul_output_mode : {None, 0, 1, 2, 3}
        The step whose result is the fourth output: the scaled scores, those after `softcap`, those
        after mask and bias too, or the weights; None for no such output, which takes no time.
    kernel : str or sequence of str, optional
        As for `polyattn.attention`.

    Returns
    -------
    OnnxAttention
        The attention, all keys and values, and the scores.

    Raises
    ------
    ValueError
        If inputs of rank 3 lack numbers of heads that divide them, or the combination of inputs is
        not allowed.

    Examples
    --------
    >>> import numpy as np
    >>> from polyattn.dialects import onnx_attention
    >>> x = np.ones((2, 5, 8 * 64), dtype=np.float32)
    >>> outputs = onnx_attention(x, x, x, is_causal=1, q_num_heads=8, kv_num_heads=8)
    >>> outputs.Y.shape, outputs.present_key.shape
    ((2, 5, 512), (2, 8, 5, 64))
    """
    before = pair("past_key and past_value", past_key, past_value)
    if before is not None and nonpad_kv_seqlen is not None:
        raise ValueError("give past_key or nonpad_kv_seqlen, not both")
    xp = library_of(Q, "Q").xp
    packed = len(shape_of(Q, "Q")) == 3
    if packed:
        check_axes("Q BLX, K BSY, V BSZ", Q, K, V)
        if q_num_heads is None or kv_num_heads is None:
            raise ValueError("inputs of rank 3 need q_num_heads and kv_num_heads")
        Q = _split_heads(xp, Q, q_num_heads)  # noqa: N806
        K, V = _split_heads(xp, K, kv_num_heads), _split_heads(xp, V, kv_num_heads)  # noqa: N806
    nonpad_kv_seqlen = integers("nonpad_kv_seqlen", nonpad_kv_seqlen, Q)
    axes = "Q BHLD, K BGSD, V BGSE, past_key? BGPD, past_value? BGPE, nonpad_kv_seqlen B"
    check_axes(axes, Q, K, V, past_key, past_value, nonpad_kv_seqlen)
    past = 0
    if before is not None:
        past = before[0].shape[-2]
        K, V = (xp.concat(x, axis=-2) for x in zip(before, (K, V), strict=True))  # noqa: N806
    keys = K.shape[-2]
    given = mask_or_bias(None if attn_mask is None else _padded(xp, attn_mask, keys), 4)
    offset: Any = past
    padding: Any = None
    if nonpad_kv_seqlen is not None:
        offset = nonpad_kv_seqlen - Q.shape[-2]
        real = index_range(xp, 0, keys, K) < xp.reshape(nonpad_kv_seqlen, (-1, 1, 1, 1))
        padding = masks.padding(nonpad_kv_seqlen)  # which hides NaN on all kernels
        padding = padding & masks.dense(given["mask"]) if "mask" in given else padding
        given["mask"] = both(given.get("mask"), real)
    window = tuple(None if end < 0 else end for end in (left_window_size, right_window_size))
    options = {"is_causal": bool(is_causal), "window": window, "query_offset": offset, **given}
    options |= {"scale": scale, "softcap": softcap or None}
    seen = options if padding is None else options | {"mask": padding}
    output = attention(Q, K, cast(xp, V, Q.dtype), kernel=kernel, **seen)
    mode = qk_matmul_output_mode
    step = None if mode is None else _step(xp, Q, K, mode, options)
    return OnnxAttention(_join_heads(xp, output) if packed else output, K, V, step)


def _step(xp: Any, query: Array, key: Array, mode: int, options: dict[str, Any]) -> Array:
    """Return what the operator has computed after a step."""
    if mode not in (0, 1, 2, 3):
        raise ValueError(f"qk_matmul_output_mode must be 0, 1, 2 or 3; got {mode!r}")
    if mode == 3:
        return cast(xp, attention_weights(query, key, **options), query.dtype)
    wide = xp.float64 if query.dtype == xp.float64 else xp.float32
    own_key = cast(xp, xp.repeat(key, query.shape[1] // key.shape[1], axis=1), wide)
    scale = 1 / math.sqrt(query.shape[-1]) if options["scale"] is None else options["scale"]
    scores = xp.matmul(cast(xp, query, wide) * scale, xp.matrix_transpose(own_key))
    cap = options["softcap"] if mode else None
    scores = scores if cap is None else cap * xp.tanh(scores / cap)
    if mode == 2:
        rows, columns = (index_range(xp, 0, x.shape[-2], query) for x in (query, key))
        offset = options["query_offset"]
        rows = rows[:, None] + (offset if isinstance(offset, int) else offset[:, None, None, None])
        left, right = options["window"]
        near = masks.window(left, 0 if options["is_causal"] else right)(0, 0, rows, columns)
        scores = xp.where(both(near, options.get("mask")), scores, -math.inf)
        scores = scores + cast(xp, options["bias"], wide) if "bias" in options else scores
    return cast(xp, scores, query.dtype)


def _padded(xp: Any, mask: Array, keys: int) -> Array:
    facts_of(mask, "attn_mask")  # refuses anything but an array
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
