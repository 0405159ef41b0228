"""Compute attention as functions of torch are called."""

from __future__ import annotations

from typing import Any

from polyattn._api.attention import attention
from polyattn._api.weights import attention_weights
from polyattn._base.arrays import Array, facts_of, library_of
from polyattn.dialects._flash import NO_WINDOW, varlen
from polyattn.dialects._packed import Packed
from polyattn.dialects._shared import both, check_axes, dropout_of, mask_or_bias, scaled, shape_of

__all__ = ["multi_head_attention_forward", "scaled_dot_product_attention", "varlen_attn"]
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


def multi_head_attention_forward(
    query: Array, key: Array, value: Array, embed_dim_to_check: int, num_heads: int,
    in_proj_weight: Array | None, in_proj_bias: Array | None, bias_k: Array | None,
    bias_v: Array | None, add_zero_attn: bool, dropout_p: float, out_proj_weight: Array,
    out_proj_bias: Array | None, training: bool = True, key_padding_mask: Array | None = None,
    need_weights: bool = True, attn_mask: Array | None = None,
    use_separate_proj_weight: bool = False, q_proj_weight: Array | None = None,
    k_proj_weight: Array | None = None, v_proj_weight: Array | None = None,
    static_k: Array | None = None, static_v: Array | None = None,
    average_attn_weights: bool = True, is_causal: bool = False,
) -> tuple[Array, Array | None]:  # fmt: skip
    """Compute attention as `torch.nn.functional.multi_head_attention_forward` is called.

    Parameters
    ----------
    query, key, value : Array
        Shapes (L, B, M), (S, B, M) and (S, B, M), or all without B.
    embed_dim_to_check, num_heads : int
        M, and H, which divides it.
    in_proj_weight, in_proj_bias : Array, optional
        The projections of query, key and value one after another, shapes (3 M, M) and (3 M,).
    bias_k, bias_v : Array, optional
        One more key and value that every row sees, shape (1, 1, M).
    add_zero_attn : bool
        Whether to add one more key and value of zeros.
    dropout_p : float
        The rate at which weights are dropped, as for `scaled_dot_product_attention`.
    out_proj_weight, out_proj_bias : Array
        The last projection, shapes (M, M) and (M,).
    training : bool
        Whether to drop weights.
    key_padding_mask : Array, optional
        Shape (B, S) or (S,); bool, True where a key is masked, or float, added to the scores.
    need_weights : bool
        Whether to return the weights.
    attn_mask : Array, optional
        Shape (L, S) or (B·H, L, S); bool, True where a key is masked, or float, added.
    use_separate_proj_weight : bool
        Whether the weights of the projections are the following three.
    q_proj_weight, k_proj_weight, v_proj_weight : Array, optional
        Shapes (M, M), (M, size of a key) and (M, size of a value).
    static_k, static_v : Array, optional
        Projected keys and values, (B·H, S, M/H), in place of `key` and `value`.
    average_attn_weights : bool
        Whether the weights are the mean over the heads.
    is_causal : bool
        A hint that `attn_mask` is causal, which is then needed; the mask decides.

    Returns
    -------
    tuple of Array and (Array or None)
        The output, the shape of `query`, and the weights, (B, L, S) or (B, H, L, S), or None.

    Raises
    ------
    ValueError
        If arguments do not go together.
    """
    if is_causal and attn_mask is None:
        raise ValueError("is_causal is a hint about attn_mask, which is missing: pass it too")
    xp = library_of(query, "query").xp
    length, *some, size = shape_of(query, "query")
    batch = some[0] if some else 1
    if size != embed_dim_to_check or size % num_heads:
        raise ValueError(
            f"query has vectors of {size} for embed_dim_to_check={embed_dim_to_check} and"
            f" num_heads={num_heads}, which must divide it"
        )
    own, keys = "B" if some else "", "S" if static_k is None else "T"
    check_axes(
        f"query L{own}M, key S{own}X, value S{own}Y, in_proj_weight WM, in_proj_bias W, bias_k 11M,"
        " bias_v 11M, out_proj_weight MM, out_proj_bias M, q_proj_weight MM, k_proj_weight MX,"
        " v_proj_weight MY, static_k NTC, static_v NTC,"
        f" key_padding_mask {own}{keys}, attn_mask L{keys}|NL{keys}",
        query, key, value, in_proj_weight, in_proj_bias, bias_k, bias_v, out_proj_weight,
        out_proj_bias, q_proj_weight, k_proj_weight, v_proj_weight, static_k, static_v,
        key_padding_mask, attn_mask,
        M=size, W=3 * size, N=batch * num_heads, C=size // num_heads,
    )  # fmt: skip
    if not some:
        query, key, value = (x[:, None, :] for x in (query, key, value))
        key_padding_mask = None if key_padding_mask is None else key_padding_mask[None, :]
    separate = (q_proj_weight, k_proj_weight, v_proj_weight)
    weights = separate if use_separate_proj_weight else _thirds(in_proj_weight)
    if any(weight is None for weight in weights):
        given = "q_proj_weight, k_proj_weight and v_proj_weight" if use_separate_proj_weight else ""
        raise ValueError(f"the weights of the projections are missing: {given or 'in_proj_weight'}")
    if (bias_k is None) != (bias_v is None) or (bias_k is not None and static_k is not None):
        raise ValueError("give both bias_k and bias_v, and neither static_k nor static_v, or none")
    q, k, v = (
        _heads_first(_linear(xp, *given), num_heads)
        for given in zip((query, key, value), weights, _thirds(in_proj_bias), strict=True)
    )
    k, v = (
        own if static is None else xp.reshape(static, (batch, num_heads, *static.shape[1:]))
        for own, static in ((k, static_k), (v, static_v))
    )
    more = [] if bias_k is None else [[_heads_first(x, num_heads) for x in (bias_k, bias_v)]]
    more += [[xp.zeros_like(x[..., :1, :]) for x in (k, v)]] if add_zero_attn else []
    for extra in more:
        k, v = (_with_one_more(xp, x, one) for x, one in zip((k, v), extra, strict=True))
    options = _masks(xp, attn_mask, key_padding_mask, (batch, num_heads), len(more))
    options["dropout"] = dropout_of(query, dropout_p) if training else None
    output = xp.permute_dims(attention(q, k, v, **options), (2, 0, 1, 3))
    output = _linear(xp, xp.reshape(output, (length, batch, size)), out_proj_weight, out_proj_bias)
    shown: Any = None
    if need_weights:
        shown = attention_weights(q, k, **options)
        shown = xp.astype(xp.mean(shown, axis=1) if average_attn_weights else shown, query.dtype)
    if not some:
        output, shown = output[:, 0, :], None if shown is None else shown[0, ...]
    return output, shown


def _thirds(array: Array | None) -> tuple[Array | None, ...]:
    size = 0 if array is None else array.shape[0] // 3
    return tuple(None if array is None else array[n * size : (n + 1) * size, ...] for n in range(3))


def _linear(xp: Any, x: Array, weight: Array | None, offset: Array | None) -> Array:
    product = xp.matmul(x, xp.matrix_transpose(weight))
    return product if offset is None else product + offset


def _heads_first(x: Array, heads: int) -> Array:
    """Return (L, B, M) as (B, H, L, M / H)."""
    xp, (length, batch, size) = library_of(x).xp, x.shape
    return xp.permute_dims(xp.reshape(x, (length, batch, heads, size // heads)), (1, 2, 0, 3))


def _with_one_more(xp: Any, x: Array, one: Array) -> Array:
    """Return keys or values, (B, H, S, D), and after them one that all items may share."""
    return xp.concat((x, xp.broadcast_to(one, (*x.shape[:2], 1, x.shape[3]))), axis=-2)


def _masks(
    xp: Any, attn_mask: Any, key_padding_mask: Any, batch_and_heads: tuple[int, int], more: int
) -> dict[str, Any]:
    """Return mask and bias from masks whose True hides; the last `more` keys are seen."""
    if key_padding_mask is not None:
        key_padding_mask = key_padding_mask[:, None, None, :]
    if attn_mask is not None and len(attn_mask.shape) == 3:
        attn_mask = xp.reshape(attn_mask, (*batch_and_heads, *attn_mask.shape[1:]))
    options: dict[str, Any] = {"mask": None, "bias": None}
    for name, mask in (("attn_mask", attn_mask), ("key_padding_mask", key_padding_mask)):
        if mask is None:
            continue
        mask = xp.concat((mask, *[xp.zeros_like(mask[..., :1])] * more), axis=-1) if more else mask
        if facts_of(mask, name).dtype == "bool":
            options["mask"] = both(options["mask"], ~mask)
        else:
            options["bias"] = mask if options["bias"] is None else options["bias"] + mask
    return options
