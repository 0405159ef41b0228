"""Offer the signatures of other libraries, implemented by `polyattn.attention`.

Each function translates its arguments and keeps their meaning. Our stronger guarantees hold in all
of them: the output of a row that sees no key is 0.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterator
from typing import Any, NamedTuple

from polyattn._api.attention import attention
from polyattn._api.partial import Partial, attention_partial
from polyattn._api.weights import attention_weights
from polyattn._base.arrays import Array, cast, facts_of, index_range, library_of

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
        (..., H, L, S) by the ordinary rule, so one of rank 3 is per head. A CausalBias of torch is
        translated into the mask that it describes.
    dropout_p : float
        The rate at which weights are dropped, of tensors. The seed comes from torch's generator on
        the device of `query`, so ``torch.manual_seed`` repeats a call. Torch's function drops other
        weights: these are those that `polyattn.attention` drops for the seed.
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
        If `dropout_p` is not 0 and `query` is not a tensor of torch, whose generator gives the
        seed.

    Examples
    --------
    >>> import numpy as np
    >>> from polyattn.dialects import scaled_dot_product_attention
    >>> x = np.ones((2, 8, 5, 64), dtype=np.float32)
    >>> scaled_dot_product_attention(x, x, x, is_causal=True).shape
    (2, 8, 5, 64)
    """
    if not 0 <= dropout_p < 1:
        raise ValueError(f"dropout_p must be at least 0 and below 1; got {dropout_p!r}")
    dropout = None if dropout_p == 0 else (dropout_p, _seed(query, dropout_p))
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
        masks = _mask_or_bias(attn_mask, max(map(len, shapes)))
    return attention(query, key, value, scale=scale, dropout=dropout, **masks)


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
        Whether row i sees the keys j <= i.
    query_seq_lengths, key_value_seq_lengths : Array of int, optional
        Number of real (non-padding) rows and keys per batch item, shape (B,). The output of the
        other rows is 0.
    local_window_size : int or tuple of int, optional
        Number of keys that a row sees before and after its position; an integer is for both sides.
    return_residual : bool
        Whether to return the logsumexp too, (B, L, H), in float32 at least.

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
        query, key, value, scale=scale, is_causal=is_causal, query_offset=0, layout="...LHD",
        window=(window, window) if isinstance(window, int) else window,
        bias=_with_all_axes(bias, rank, "bias"),
        mask=_and(
            _with_all_axes(mask, rank, "mask"),
            _padding_mask(xp, query, query_seq_lengths, (-1, 1)),
            _padding_mask(xp, key, key_value_seq_lengths, (1, -1)),
        ),
    )  # fmt: skip


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
    qk_matmul_output_mode: int | None = None,
    kernel: str | None = None,
) -> OnnxAttention:
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
    kernel : str, optional
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
    if (past_key is None) != (past_value is None):
        raise ValueError("give both past_key and past_value, or neither")
    if past_key is not None and nonpad_kv_seqlen is not None:
        raise ValueError("give past_key or nonpad_kv_seqlen, not both")
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
    window = tuple(None if end < 0 else end for end in (left_window_size, right_window_size))
    options = {"is_causal": bool(is_causal), "window": window, "query_offset": offset, **masks}
    options |= {"scale": scale, "softcap": softcap or None}
    output = attention(Q, K, cast(xp, V, Q.dtype), kernel=kernel, **options)
    mode = qk_matmul_output_mode
    step = None if mode is None else _step(xp, Q, K, mode, options)
    return OnnxAttention(_join_heads(xp, output) if packed else output, K, V, step)


def _seed(query: Array, rate: float) -> Array:
    """Return a seed from torch's generator, which also a compiled program draws anew."""
    library = library_of(query, "query")
    if library.name != "torch":
        raise NotImplementedError(
            f"dropout_p={rate!r} needs the random generator of torch, and query is of"
            f" {library.name}: call polyattn.attention with dropout=({rate!r}, seed)"
        )
    return library.xp.randint(2**62, (), device=query.device)


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
        for seen in _seen(xp, query, key, options):
            scores = xp.where(seen, scores, -math.inf)
        scores = scores + cast(xp, options["bias"], wide) if "bias" in options else scores
    return cast(xp, scores, query.dtype)


def _seen(xp: Any, query: Array, key: Array, options: dict[str, Any]) -> Iterator[Array]:
    """Yield bool arrays; a key takes part where all of them hold."""
    rows, columns = (index_range(xp, 0, x.shape[-2], query) for x in (query, key))
    offset = options["query_offset"]
    offset = offset if isinstance(offset, int) else xp.reshape(offset, (-1, 1, 1, 1))
    away = columns - (xp.reshape(rows, (-1, 1)) + offset)
    left, right = options["window"]
    right = 0 if options["is_causal"] else right
    if left is not None:
        yield away >= -left
    if right is not None:
        yield away <= right
    if "mask" in options:
        yield options["mask"]


def _padding_mask(
    xp: Any, array: Array, lengths: Array | None, axes: tuple[int, int]
) -> Array | None:
    """Return which rows or keys are not padding; `axes` is -1 at their axis of the scores."""
    if lengths is None:
        return None
    indices = xp.reshape(index_range(xp, 0, array.shape[-3], array), axes)
    real = indices < xp.reshape(lengths, (-1, 1, 1, 1))
    return real if len(array.shape) == 4 else real[0, ...]


def _and(*masks: Array | None) -> Array | None:
    present = [mask for mask in masks if mask is not None]
    return functools.reduce(operator.and_, present) if present else None


def _mask_or_bias(mask: Array | None, rank: int) -> dict[str, Array]:
    """Return an argument that is a mask or a bias by its dtype, with all axes of the scores."""
    if mask is None:
        return {}
    name = "mask" if facts_of(mask, "attn_mask").dtype == "bool" else "bias"
    return {name: _with_all_axes(mask, rank, "attn_mask")}


def _with_all_axes(mask: Array | None, rank: int, name: str) -> Array | None:
    """Return a mask or bias of three or more axes with all axes of the scores."""
    if mask is None:
        return None
    shape = facts_of(mask, name).shape
    extra = max(0, len(shape) - rank)
    if len(shape) < 3 or len(shape) == rank or any(length != 1 for length in shape[:extra]):
        return mask
    return library_of(mask).xp.reshape(mask, (*(1,) * (rank - len(shape)), *shape[extra:]))


def _causal_bias(bias: Any, lengths: tuple[int, int]) -> dict[str, Any]:
    """Return the options equal to torch's CausalBias, a tensor whose memory is not used."""
    shape = (bias.seq_len_q, bias.seq_len_kv)
    if bias.variant.name == "UPPER_LEFT" or shape[0] == shape[1]:
        return {"is_causal": True, "query_offset": 0}
    if shape != lengths:
        raise ValueError(f"attn_mask is causal_lower_right{shape}, but the scores are {lengths}")
    return {"is_causal": True, "query_offset": shape[1] - shape[0]}


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
