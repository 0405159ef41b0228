"""Compute attention as FlashAttention 2, the package `flash_attn`, is called.

`polyattn.dialects.flash_attn_interface` is FlashAttention 3. ``install`` lets code that imports
either find it here.
"""

from __future__ import annotations

import sys
from typing import Any

from polyattn._base.arrays import Array
from polyattn.dialects._flash import NO_WINDOW, dense, varlen
from polyattn.dialects._kvcache import Cache, Rotation, with_kvcache
from polyattn.dialects._packed import Packed
from polyattn.dialects._shared import check_axes, pair
from polyattn.dialects.flash_attn import bert_padding
from polyattn.dialects.flash_attn._steps import (
    _flash_attn_backward,
    _flash_attn_forward,
    _flash_attn_varlen_backward,
    _flash_attn_varlen_forward,
)
from polyattn.dialects.flash_attn.bert_padding import (
    index_first_axis,
    index_put_first_axis,
    pad_input,
    unpad_input,
)
from polyattn.run.install import install
from polyattn.run.stand_ins import PACKAGES

__all__ = [
    "bert_padding",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "index_first_axis",
    "index_put_first_axis",
    "install",
    "pad_input",
    "unpad_input",
]
__dir__ = __all__.copy

__version__ = PACKAGES["flash_attn"][1]

# What code takes from the submodule of FlashAttention that has all of these functions.
flash_attn_interface = sys.modules[__name__]
_wrapped_flash_attn_forward = _flash_attn_forward
_wrapped_flash_attn_backward = _flash_attn_backward
_wrapped_flash_attn_varlen_forward = _flash_attn_varlen_forward
_wrapped_flash_attn_varlen_backward = _flash_attn_varlen_backward


def flash_attn_func(
    q: Array, k: Array, v: Array,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = NO_WINDOW, softcap: float = 0.0,
    alibi_slopes: Array | None = None, deterministic: bool = False, return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """Compute attention as `flash_attn.flash_attn_func` is called, on any array.

    Parameters
    ----------
    q, k, v : Array
        Shapes (B, L, H, D), (B, S, G, D) and (B, S, G, E); H is a multiple of G.
    dropout_p : float
        The rate at which weights are dropped; the seed comes from the generator of torch or NumPy.
    softmax_scale : float, optional
        Multiplies the scores; 1/√D by default.
    causal : bool
        Whether row i sees the keys j <= i + S − L: the last row is at the last key.
    window_size : tuple of int
        Number of keys that a row sees before and after its position; −1 for no bound.
    softcap : float
        Bounds the scores; 0 for no bound.
    alibi_slopes : Array of float, optional
        Slopes of ALiBi, shape (H,) or (B, H): the slope times the distance is subtracted.
    deterministic : bool
        Ignored: all gradients are deterministic where the kernel is.
    return_attn_probs : bool
        Whether to return ``(output, logsumexp, None)``. The third result of FlashAttention, the
        weights of its tests, is refused with `dropout_p` and None otherwise.

    Returns
    -------
    Array or tuple
        Shape (B, L, H, E); with `return_attn_probs` also the logsumexp, (B, H, L), and None.

    Raises
    ------
    NotImplementedError
        If `return_attn_probs` asks for the weights of a call with dropout.

    Examples
    --------
    >>> import numpy as np
    >>> from polyattn.dialects.flash_attn import flash_attn_func
    >>> x = np.ones((2, 5, 8, 64), dtype=np.float32)
    >>> flash_attn_func(x, x, x, causal=True, window_size=(2, 0)).shape
    (2, 5, 8, 64)
    """
    if return_attn_probs:
        _refuse_weights(dropout_p)
    results = dense(
        q, k, v, softmax_scale, causal, window_size, softcap,
        dropout=dropout_p, slopes=alibi_slopes, logsumexp=return_attn_probs,
    )  # fmt: skip
    return (*results, None) if return_attn_probs else results


def flash_attn_kvpacked_func(
    q: Array, kv: Array,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = NO_WINDOW, softcap: float = 0.0,
    alibi_slopes: Array | None = None, deterministic: bool = False, return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """Compute attention as `flash_attn_func`, of keys and values in one array, (B, S, 2, G, D)."""
    check_axes("kv BS2GD", kv)
    return flash_attn_func(
        q, kv[:, :, 0, ...], kv[:, :, 1, ...],
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_qkvpacked_func(
    qkv: Array,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = NO_WINDOW, softcap: float = 0.0,
    alibi_slopes: Array | None = None, deterministic: bool = False, return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """Compute attention as `flash_attn_func`, of q, k and v in one array, (B, L, 3, H, D)."""
    check_axes("qkv BL3HD", qkv)
    return flash_attn_kvpacked_func(
        qkv[:, :, 0, ...], qkv[:, :, 1:, ...],
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_func(
    q: Array, k: Array, v: Array,
    cu_seqlens_q: Array, cu_seqlens_k: Array,
    max_seqlen_q: int | None = None, max_seqlen_k: int | None = None,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = NO_WINDOW, softcap: float = 0.0,
    alibi_slopes: Array | None = None, deterministic: bool = False, return_attn_probs: bool = False,
    block_table: Array | None = None,
) -> Any:  # fmt: skip
    """Compute attention of each of several packed sequences (a ragged batch).

    Parameters
    ----------
    q, k, v : Array
        Shapes (T, H, D), (U, G, D) and (U, G, E); with `block_table`, k and v are pools of pages,
        (pages, page, G, D) and (pages, page, G, E).
    cu_seqlens_q, cu_seqlens_k : Array of int
        Where each sequence begins in q and in k, and the last one ends, shape (B + 1,). They are
        read on the host, so that each sequence is computed by itself, but in a traced program and
        on JAX.
    max_seqlen_q, max_seqlen_k : int, optional
        Ignored.
    dropout_p, softmax_scale, causal, window_size, softcap : float, float, bool, tuple and float
        As for `flash_attn_func`.
    alibi_slopes, deterministic, return_attn_probs : Array, bool and bool
        As for `flash_attn_func`.
    block_table : Array of int, optional
        The pages of each sequence, shape (B, most pages); `cu_seqlens_k` gives the lengths.

    Returns
    -------
    Array or tuple
        Shape (T, H, E); with `return_attn_probs` also the logsumexp, (H, T), and None.

    Examples
    --------
    >>> import numpy as np
    >>> from polyattn.dialects.flash_attn import flash_attn_varlen_func
    >>> x, ends = np.ones((9, 8, 64), dtype=np.float32), np.array([0, 2, 9])
    >>> flash_attn_varlen_func(x, x, x, ends, ends, 7, 7, causal=True).shape
    (9, 8, 64)
    """
    if return_attn_probs:
        _refuse_weights(dropout_p)
    results = varlen(
        q, k, v, Packed(cu_seqlens_q), Packed(cu_seqlens_k),
        softmax_scale, causal, window_size, softcap,
        dropout=dropout_p, slopes=alibi_slopes, table=block_table, logsumexp=return_attn_probs,
    )  # fmt: skip
    return (*results, None) if return_attn_probs else results


def flash_attn_varlen_kvpacked_func(
    q: Array, kv: Array,
    cu_seqlens_q: Array, cu_seqlens_k: Array,
    max_seqlen_q: int | None = None, max_seqlen_k: int | None = None,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = NO_WINDOW, softcap: float = 0.0,
    alibi_slopes: Array | None = None, deterministic: bool = False, return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """Compute attention as `flash_attn_varlen_func`, of k and v in one array, (U, 2, G, D)."""
    check_axes("kv S2GD", kv)
    return flash_attn_varlen_func(
        q, kv[:, 0, ...], kv[:, 1, ...], cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_qkvpacked_func(
    qkv: Array, cu_seqlens: Array, max_seqlen: int | None = None,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = NO_WINDOW, softcap: float = 0.0,
    alibi_slopes: Array | None = None, deterministic: bool = False, return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """Compute attention as `flash_attn_varlen_func`, of q, k and v in one array, (T, 3, H, D)."""
    check_axes("qkv T3HD", qkv)
    return flash_attn_varlen_kvpacked_func(
        qkv[:, 0, ...], qkv[:, 1:, ...], cu_seqlens, cu_seqlens, max_seqlen, max_seqlen,
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_with_kvcache(
    q: Array, k_cache: Array, v_cache: Array, k: Array | None = None, v: Array | None = None,
    rotary_cos: Array | None = None, rotary_sin: Array | None = None,
    cache_seqlens: int | Array | None = None, cache_batch_idx: Array | None = None,
    cache_leftpad: Array | None = None, block_table: Array | None = None,
    softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = NO_WINDOW, softcap: float = 0.0,
    rotary_interleaved: bool = True, alibi_slopes: Array | None = None, num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:  # fmt: skip
    """Compute attention over a cache of keys and values, after new ones are written into it.

    Parameters
    ----------
    q : Array
        Shape (B, L, H, D).
    k_cache, v_cache : Array
        Shapes (B', S, G, D) and (B', S, G, E), or pools of pages, (pages, page, G, D) and
        (pages, page, G, E), with `block_table`. With `k` and `v` they are written in place: they
        are arrays of torch, NumPy or CuPy.
    k, v : Array, optional
        New keys and values, shapes (B, N, G, D) and (B, N, G, E), written from `cache_seqlens` on.
    rotary_cos, rotary_sin : Array, optional
        Cosines and sines of the positions, shape (positions, D'/2). `k` is rotated by the positions
        from `cache_seqlens` on; q too if `causal` or a window is given, and otherwise all of q by
        the first of them.
    cache_seqlens : int or Array of int, optional
        Number of keys of each sequence before the new ones, shape (B,), or of all; by default all.
    cache_batch_idx : Array of int, optional
        The item of the cache of each sequence, shape (B,).
    cache_leftpad : Array of int, optional
        The first key of each sequence, shape (B,).
    block_table : Array of int, optional
        The pages of each sequence, shape (B, most pages), of any size.
    softmax_scale, causal, window_size, softcap : float, bool, tuple and float
        As for `flash_attn_func`; S is the number of keys of the sequence.
    rotary_interleaved : bool
        Whether the pairs that are rotated are neighbours, or one of each half.
    alibi_slopes : Array of float, optional
        As for `flash_attn_func`.
    num_splits : int
        Ignored.
    return_softmax_lse : bool
        Whether to return ``(output, logsumexp)``.

    Returns
    -------
    Array or tuple
        Shape (B, L, H, E); with `return_softmax_lse` also the logsumexp, (B, H, L).

    Raises
    ------
    NotImplementedError
        If `k` is given and the arrays of the library cannot be written, such as those of JAX.
    ValueError
        If arguments do not go together, or the cache is too small. It is as it was then.

    Examples
    --------
    >>> import numpy as np
    >>> from polyattn.dialects.flash_attn import flash_attn_with_kvcache
    >>> cache, new = np.zeros((2, 16, 8, 64)), np.ones((2, 1, 8, 64))
    >>> flash_attn_with_kvcache(new, cache, cache, new, new, cache_seqlens=np.array([3, 7])).shape
    (2, 1, 8, 64)
    >>> cache[:, :, 0, 0].sum(axis=1)
    array([1., 1.])
    """
    cache = Cache(k_cache, v_cache, cache_seqlens, cache_batch_idx, cache_leftpad, block_table)
    tables = pair("rotary_cos and rotary_sin", rotary_cos, rotary_sin)
    rotation = Rotation(tables, rotary_interleaved)
    return with_kvcache(
        q, pair("k and v", k, v), cache, rotation,
        scale=softmax_scale, causal=causal, window=window_size, softcap=softcap,
        slopes=alibi_slopes, logsumexp=return_softmax_lse,
    )  # fmt: skip


def _refuse_weights(dropout_p: float) -> None:
    if dropout_p:
        raise NotImplementedError(
            "return_attn_probs with dropout_p returns weights for the tests of FlashAttention only:"
            " call polyattn.attention_weights with dropout= for them, or return_attn_probs=False"
        )
