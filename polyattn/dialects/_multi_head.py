"""Compute attention with its projections as torch's multi-head attention does."""

from __future__ import annotations

from typing import Any

from polyattn._api.attention import attention
from polyattn._api.weights import attention_weights
from polyattn._base.arrays import Array, facts_of, library_of
from polyattn.dialects._shared import both, dropout_of


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
        Shape (B, S) or (S,); bool, True where a key takes no part, or float, added to the scores.
    need_weights : bool
        Whether to return the weights.
    attn_mask : Array, optional
        Shape (L, S) or (B·H, L, S); bool, True where a key takes no part, or float, added.
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
    is_batched = len(query.shape) == 3
    if not is_batched:
        query, key, value = (x[:, None, :] for x in (query, key, value))
        key_padding_mask = None if key_padding_mask is None else key_padding_mask[None, :]
    length, batch, size = query.shape
    if size != embed_dim_to_check or size % num_heads:
        raise ValueError(
            f"query has vectors of {size} for embed_dim_to_check={embed_dim_to_check} and"
            f" num_heads={num_heads}, which must divide it"
        )
    separate = (q_proj_weight, k_proj_weight, v_proj_weight)
    weights = separate if use_separate_proj_weight else _thirds(in_proj_weight)
    if any(weight is None for weight in weights):
        given = "q_proj_weight, k_proj_weight and v_proj_weight" if use_separate_proj_weight else ""
        raise ValueError(f"the weights of the projections are missing: {given or 'in_proj_weight'}")
    projected = [
        _linear(xp, x, weight, offset)
        for x, weight, offset in zip(
            (query, key, value), weights, _thirds(in_proj_bias), strict=True
        )
    ]
    q, k, v = (_heads_first(xp, x, num_heads) for x in projected)
    if (bias_k is None) != (bias_v is None) or (bias_k is not None and static_k is not None):
        raise ValueError("give both bias_k and bias_v, and neither static_k nor static_v, or none")
    k, v = (
        own if static is None else xp.reshape(static, (batch, num_heads, *static.shape[1:]))
        for own, static in ((k, static_k), (v, static_v))
    )
    more = [] if bias_k is None else [[_heads_first(xp, x, num_heads) for x in (bias_k, bias_v)]]
    more += [[xp.zeros_like(x[..., :1, :]) for x in (k, v)]] if add_zero_attn else []
    for extra in more:
        k, v = (
            xp.concat((x, xp.broadcast_to(one, (*x.shape[:2], 1, x.shape[3]))), axis=-2)
            for x, one in zip((k, v), extra, strict=True)
        )
    options = _masks(xp, attn_mask, key_padding_mask, (batch, num_heads), len(more))
    options["dropout"] = dropout_of(query, dropout_p) if training else None
    output = xp.permute_dims(attention(q, k, v, **options), (2, 0, 1, 3))
    output = _linear(xp, xp.reshape(output, (length, batch, size)), out_proj_weight, out_proj_bias)
    shown: Any = None
    if need_weights:
        shown = attention_weights(q, k, **options)
        shown = xp.astype(xp.mean(shown, axis=1) if average_attn_weights else shown, query.dtype)
    if not is_batched:
        output, shown = output[:, 0, :], None if shown is None else shown[0, ...]
    return output, shown


def _thirds(array: Array | None) -> tuple[Array | None, ...]:
    if array is None:
        return None, None, None
    size = array.shape[0] // 3
    return tuple(array[n * size : (n + 1) * size, ...] for n in range(3))


def _linear(xp: Any, x: Array, weight: Array | None, offset: Array | None) -> Array:
    product = xp.matmul(x, xp.matrix_transpose(weight))
    return product if offset is None else product + offset


def _heads_first(xp: Any, x: Array, heads: int) -> Array:
    """Return (L, B, M) as (B, H, L, M / H)."""
    length, batch, size = x.shape
    return xp.permute_dims(xp.reshape(x, (length, batch, heads, size // heads)), (1, 2, 0, 3))


def _masks(
    xp: Any,
    attn_mask: Array | None,
    key_padding_mask: Array | None,
    batch_and_heads: tuple[int, int],
    more: int,
) -> dict[str, Any]:
    """Return mask and bias from masks whose True hides; the last `more` keys are seen."""
    seen: list[Array] = []
    added: list[Array] = []
    for name, mask in (("attn_mask", attn_mask), ("key_padding_mask", key_padding_mask)):
        if mask is None:
            continue
        is_bool = facts_of(mask, name).dtype == "bool"
        if name == "key_padding_mask":
            mask = mask[:, None, None, :]
        elif len(mask.shape) == 3:
            mask = xp.reshape(mask, (*batch_and_heads, *mask.shape[1:]))
        if more:
            end = xp.zeros_like(mask[..., :1])
            mask = xp.concat((mask, *[end] * more), axis=-1)
        (seen if is_bool else added).append(~mask if is_bool else mask)
    options: dict[str, Any] = {"mask": both(*seen)}
    options["bias"] = sum(added[1:], start=added[0]) if added else None
    return options
