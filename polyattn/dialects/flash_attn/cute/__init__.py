"""Compute attention as FlashAttention 4, the module `flash_attn.cute`, is called.

Arguments are those of `polyattn.dialects.flash_attn_interface`, with a window of (None, None).
"""

from __future__ import annotations

from typing import Any

from polyattn._base.arrays import Array
from polyattn.dialects._flash import dense, varlen
from polyattn.dialects._kvcache import Cache, Rotation, with_kvcache, with_packed
from polyattn.dialects._packed import Packed
from polyattn.dialects.flash_attn_interface import flash_attn_combine

__all__ = ["flash_attn_combine", "flash_attn_func", "flash_attn_varlen_func"]
__dir__ = __all__.copy

_Window = tuple[int | None, int | None]


def flash_attn_func(
    q: Array, k: Array, v: Array, qv: Array | None = None, gather_kv_indices: None = None,
    softmax_scale: float | None = None, causal: bool = False,
    window_size: _Window = (None, None), learnable_sink: Array | None = None,
    softcap: float = 0.0, num_splits: int = 1, pack_gqa: bool | None = None,
    deterministic: bool = False, score_mod: None = None, score_mod_bwd: None = None,
    mask_mod: None = None, aux_tensors: None = None, aux_scalars: None = None,
    block_sparse_tensors: None = None, block_sparse_tensors_bwd: None = None,
    return_lse: bool = False,
) -> tuple[Array, Array | None]:  # fmt: skip
    """Compute attention as `flash_attn.cute.flash_attn_func` is called, on any array.

    Functions and indices for its kernels (`gather_kv_indices`, `score_mod`, `mask_mod`,
    `block_sparse_tensors`) are refused, and what only chooses a kernel changes no number.

    Parameters
    ----------
    window_size : tuple of int or None
        Number of keys that a row sees before and after its position; None for no bound.
    learnable_sink : Array of float, optional
        One more logit of each head in the denominator, (H,).
    return_lse : bool
        Whether the second result is the logsumexp, (B, H, L), and not None.

    Returns
    -------
    tuple of Array
        The output, (B, L, H, E), and the logsumexp or None.

    Examples
    --------
    >>> import numpy as np
    >>> from polyattn.dialects.flash_attn.cute import flash_attn_func
    >>> x = np.ones((2, 5, 8, 64), dtype=np.float32)
    >>> output, logsumexp = flash_attn_func(x, x, x, causal=True)
    >>> output.shape, logsumexp
    ((2, 5, 8, 64), None)
    """
    _refuse(
        gather_kv_indices=gather_kv_indices, score_mod=score_mod, mask_mod=mask_mod,
        block_sparse_tensors=block_sparse_tensors,
    )  # fmt: skip
    results = dense(
        q, k, v, softmax_scale, causal, window_size, softcap, qv=qv, sinks=learnable_sink,
        logsumexp=return_lse,
    )  # fmt: skip
    return results if return_lse else (results, None)


def flash_attn_varlen_func(
    q: Array, k: Array, v: Array, qv: Array | None = None, cu_seqlens_q: Array | None = None,
    cu_seqlens_k: Array | None = None, max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None, min_seqlen_k: int | None = None,
    seqused_q: Array | None = None, seqused_k: Array | None = None, gather_kv_indices: None = None,
    page_table: Array | None = None, softmax_scale: float | None = None, causal: bool = False,
    window_size: _Window = (None, None), learnable_sink: Array | None = None,
    softcap: float = 0.0, num_splits: int = 1, pack_gqa: bool | None = None,
    deterministic: bool = False, score_mod: None = None, score_mod_bwd: None = None,
    mask_mod: None = None, block_sparse_tensors: None = None, block_sparse_tensors_bwd: None = None,
    aux_tensors: None = None, aux_scalars: None = None, return_lse: bool = False,
) -> tuple[Array, Array | None]:  # fmt: skip
    """Compute `flash_attn_func` of sequences that are packed, or padded, or in pages.

    Without `cu_seqlens_q` the queries are (B, L, H, D); without `cu_seqlens_k` keys and values are
    (B, S, G, D) or with `page_table` (pages, page, G, D), of which `seqused_k` are used.

    Returns
    -------
    tuple of Array
        The output, (T, H, E) or (B, L, H, E), and the logsumexp, (H, T) or (B, H, L), or None.
    """
    _refuse(
        gather_kv_indices=gather_kv_indices, score_mod=score_mod, mask_mod=mask_mod,
        block_sparse_tensors=block_sparse_tensors,
    )  # fmt: skip
    options: dict[str, Any] = {
        "scale": softmax_scale, "causal": causal, "window": window_size, "softcap": softcap,
        "qv": qv, "sinks": learnable_sink, "logsumexp": return_lse,
    }  # fmt: skip
    if cu_seqlens_k is not None:
        if cu_seqlens_q is None:
            raise ValueError("cu_seqlens_k needs cu_seqlens_q: pass q packed too, (T, H, D)")
        rows, keys = Packed(cu_seqlens_q, seqused_q), Packed(cu_seqlens_k, seqused_k)
        results = varlen(q, k, v, rows, keys, **options)
    elif seqused_q is not None:
        raise NotImplementedError("seqused_q needs cu_seqlens_q and cu_seqlens_k")
    else:
        cache = Cache(k, v, seqused_k, table=page_table)
        rest = (cache, Rotation(None, False))
        if cu_seqlens_q is None:
            results = with_kvcache(q, None, *rest, **options)
        else:
            results = with_packed(q, None, *rest, cu_seqlens_q, None, **options)
    return results if return_lse else (results, None)


def _refuse(**given: Any) -> None:
    for name, value in given.items():
        if value is not None:
            raise NotImplementedError(
                f"{name} of FlashAttention 4 is not supported: call polyattn.attention with a"
                " score_mod or a mask, functions of arrays"
            )
