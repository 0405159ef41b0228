"""Compute attention as FlashAttention 3, the module `flash_attn_interface`, is called.

Arguments that `flash_attn_func` does not describe are those of `polyattn.dialects.flash_attn`.
"""

from __future__ import annotations

import functools
from typing import Any

from polyattn._api.partial import Partial, merge
from polyattn._base.arrays import Array, cast, library_of
from polyattn.dialects._flash import NO_WINDOW, dense, varlen
from polyattn.dialects._kvcache import Cache, Rotation, with_kvcache, with_packed
from polyattn.dialects._packed import Packed
from polyattn.dialects._shared import check_axes, pair, shape_of

__all__ = [
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
]
__dir__ = __all__.copy


def flash_attn_func(
    q: Array, k: Array, v: Array, softmax_scale: float | None = None, causal: bool = False,
    qv: Array | None = None,
    q_descale: Array | None = None, k_descale: Array | None = None,
    v_descale: Array | None = None, window_size: tuple[int, int] = NO_WINDOW,
    attention_chunk: int = 0, softcap: float = 0.0,
    num_splits: int = 1, pack_gqa: bool | None = None, deterministic: bool = False,
    sm_margin: int = 0, return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """Compute attention as `flash_attn_interface.flash_attn_func` is called, on any array.

    Parameters
    ----------
    q, k, v : Array
        Shapes (B, L, H, D), (B, S, G, D) and (B, S, G, E); H is a multiple of G.
    qv : Array, optional
        Queries whose products with the values are added to the scores, (B, L, H, E). The default
        scale is then 1/√(D + E).
    q_descale, k_descale, v_descale : Array, optional
        Refused: multiply the arrays by them first.
    attention_chunk : int
        A row sees the keys of its own chunk of so many positions only; 0 for all.
    num_splits, pack_gqa, deterministic, sm_margin : int, bool, bool and int
        Ignored, as `max_seqlen_q`, `max_seqlen_k` and `scheduler_metadata` are: they change no
        number here.
    return_attn_probs : bool
        Whether to return ``(output, logsumexp)``.

    Returns
    -------
    Array or tuple
        Shape (B, L, H, E); with `return_attn_probs` also the logsumexp, (B, H, L).

    Examples
    --------
    >>> import numpy as np
    >>> from polyattn.dialects.flash_attn_interface import flash_attn_func
    >>> x = np.ones((2, 5, 8, 64), dtype=np.float32)
    >>> flash_attn_func(x, x, x, causal=True, attention_chunk=4).shape
    (2, 5, 8, 64)
    """
    _refuse(q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    return dense(
        q, k, v, softmax_scale, causal, window_size, softcap,
        chunk=attention_chunk, qv=qv, logsumexp=return_attn_probs,
    )  # fmt: skip


def flash_attn_qkvpacked_func(
    qkv: Array, softmax_scale: float | None = None, causal: bool = False,
    q_descale: Array | None = None, k_descale: Array | None = None,
    v_descale: Array | None = None, window_size: tuple[int, int] = NO_WINDOW,
    attention_chunk: int = 0, softcap: float = 0.0,
    deterministic: bool = False, num_heads_q: int | None = None, sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """Compute attention of one array, (B, L, 3, H, D), or (B, L, H + 2 G, D) with `num_heads_q`."""
    shape = shape_of(qkv, "qkv")
    if len(shape) == 5:
        check_axes("qkv BL3HD", qkv)
        q, k, v = (qkv[:, :, n, ...] for n in range(3))
    elif len(shape) != 4 or num_heads_q is None or not 0 < num_heads_q < shape[2]:
        raise ValueError(f"a qkv of shape {shape} needs num_heads_q, the query heads")
    else:
        middle = num_heads_q + (qkv.shape[2] - num_heads_q) // 2
        ends = (0, num_heads_q, middle, None)
        q, k, v = (qkv[:, :, ends[n] : ends[n + 1], :] for n in range(3))
    return flash_attn_func(
        q, k, v, softmax_scale, causal, None, q_descale, k_descale, v_descale, window_size,
        attention_chunk, softcap, return_attn_probs=return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_func(
    q: Array, k: Array, v: Array, cu_seqlens_q: Array, cu_seqlens_k: Array,
    max_seqlen_q: int | None = None, max_seqlen_k: int | None = None,
    seqused_q: Array | None = None, seqused_k: Array | None = None,
    softmax_scale: float | None = None, causal: bool = False, qv: Array | None = None,
    q_descale: Array | None = None, k_descale: Array | None = None,
    v_descale: Array | None = None, window_size: tuple[int, int] = NO_WINDOW,
    attention_chunk: int = 0, softcap: float = 0.0,
    num_splits: int = 1, pack_gqa: bool | None = None, deterministic: bool = False,
    sm_margin: int = 0, return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """Compute attention of packed sequences; rows that `seqused_q` leaves out are 0."""
    _refuse(q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    return varlen(
        q, k, v, Packed(cu_seqlens_q, seqused_q), Packed(cu_seqlens_k, seqused_k),
        softmax_scale, causal, window_size, softcap,
        chunk=attention_chunk, qv=qv, logsumexp=return_attn_probs,
    )  # fmt: skip


def flash_attn_with_kvcache(
    q: Array, k_cache: Array, v_cache: Array, k: Array | None = None, v: Array | None = None,
    qv: Array | None = None, rotary_cos: Array | None = None, rotary_sin: Array | None = None,
    cache_seqlens: int | Array | None = None, cache_batch_idx: Array | None = None,
    cache_leftpad: Array | None = None, page_table: Array | None = None,
    cu_seqlens_q: Array | None = None, cu_seqlens_k_new: Array | None = None,
    max_seqlen_q: int | None = None, rotary_seqlens: Array | None = None,
    q_descale: Array | None = None, k_descale: Array | None = None,
    v_descale: Array | None = None, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = NO_WINDOW, attention_chunk: int = 0, softcap: float = 0.0,
    rotary_interleaved: bool = True, scheduler_metadata: Any = None, num_splits: int = 0,
    pack_gqa: bool | None = None, sm_margin: int = 0, return_softmax_lse: bool = False,
) -> Any:  # fmt: skip
    """Compute attention over a cache, after new keys and values are written into it.

    Rotation begins at `rotary_seqlens`, if given; `page_table` is the block_table of FlashAttention
    2. With `cu_seqlens_q`, q is packed, (T, H, D), as qv is; with `cu_seqlens_k_new`, which has no
    effect without k and v, these are.

    Returns
    -------
    Array or tuple
        Shape (B, L, H, E), or (T, H, E); with `return_softmax_lse` also the logsumexp, (B, H, L) or
        (H, T).
    """
    _refuse(q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    cache = Cache(k_cache, v_cache, cache_seqlens, cache_batch_idx, cache_leftpad, page_table)
    tables = pair("rotary_cos and rotary_sin", rotary_cos, rotary_sin)
    given = (q, pair("k and v", k, v), cache, Rotation(tables, rotary_interleaved, rotary_seqlens))
    options: dict[str, Any] = {
        "scale": softmax_scale, "causal": causal, "window": window_size, "softcap": softcap,
        "chunk": attention_chunk, "qv": qv, "logsumexp": return_softmax_lse,
    }  # fmt: skip
    cu_seqlens_k_new = None if k is None else cu_seqlens_k_new
    if cu_seqlens_q is None and cu_seqlens_k_new is None:
        return with_kvcache(*given, **options)
    return with_packed(*given, cu_seqlens_q, cu_seqlens_k_new, **options)


def flash_attn_combine(
    out_partial: Array, lse_partial: Array, out: Array | None = None, out_dtype: Any = None,
    cu_seqlens: None = None, seqused: None = None, return_lse: bool = True,
) -> tuple[Array, Array | None]:  # fmt: skip
    """Join attention over disjoint sets of keys, as `polyattn.merge` does.

    Parameters
    ----------
    out_partial, lse_partial : Array
        The parts along the first axis: (parts, B, L, H, E) and (parts, B, L, H), or without B.
    out : Array, optional
        An array that the output is written into.
    out_dtype : dtype, optional
        The dtype of the output; that of `out_partial` by default.
    cu_seqlens, seqused : Array, optional
        Ignored: each row is joined by itself.
    return_lse : bool
        Whether the second result is the logsumexp, and not None.

    Returns
    -------
    tuple of Array
        The output, (B, L, H, E), and the logsumexp, (B, L, H).
    """
    check_axes("out_partial NTHE|NBLHE, lse_partial NTH|NBLH", out_partial, lse_partial)
    parts = range(out_partial.shape[0])
    joined, total = merge(*(Partial(out_partial[n, ...], lse_partial[n, ...]) for n in parts))
    if out is not None:
        out[...] = joined
        return out, total if return_lse else None
    joined = joined if out_dtype is None else cast(library_of(joined).xp, joined, out_dtype)
    return joined, total if return_lse else None


def get_scheduler_metadata(
    batch_size: int, max_seqlen_q: int, max_seqlen_k: int, num_heads_q: int, num_heads_kv: int,
    headdim: int, cache_seqlens: Array, *arguments: Any, **options: Any,
) -> Array:  # fmt: skip
    """Return an array without entries for `scheduler_metadata`, which is ignored here."""
    return cache_seqlens[:0]


def _refuse(**scales: Array | None) -> None:
    for name, scale in scales.items():
        if scale is not None:
            raise NotImplementedError(
                f"{name} is not supported: multiply {name[0]} by it, in float32 or bfloat16, first"
            )


def _with_tuples() -> dict[str, Any]:
    """Return the functions that returned the logsumexp too until August 2025, as they were."""
    older = flash_attn_func, flash_attn_qkvpacked_func, flash_attn_varlen_func
    return {one.__name__: functools.partial(one, return_attn_probs=True) for one in older}
