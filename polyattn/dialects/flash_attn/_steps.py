"""Attention with its logsumexp, and its gradients from those, as code of several devices calls it.

The names are private in FlashAttention; the gradients are written into arrays of the caller.
"""

from __future__ import annotations

from typing import Any

from polyattn._api.gradients import attention_backward
from polyattn._api.partial import Partial
from polyattn._base.arrays import Array, cast, library_of
from polyattn.dialects._flash import dense, dense_options, varlen
from polyattn.dialects._packed import Packed, spans_of
from polyattn.dialects._shared import check_axes


def _flash_attn_forward(
    q: Array, k: Array, v: Array, dropout_p: float, softmax_scale: float | None, causal: bool,
    window_size_left: int = -1, window_size_right: int = -1, softcap: float = 0.0,
    alibi_slopes: Array | None = None, return_softmax: bool = False,
) -> tuple[Array, Array, None, None]:  # fmt: skip
    """Return the output, the logsumexp, (B, H, L), and None for weights and state of dropout."""
    _refuse(dropout_p=dropout_p)
    window = window_size_left, window_size_right
    results = dense(
        q, k, v, softmax_scale, causal, window, softcap, slopes=alibi_slopes, logsumexp=True
    )
    return *results, None, None


def _flash_attn_varlen_forward(
    q: Array, k: Array, v: Array, cu_seqlens_q: Array, cu_seqlens_k: Array,
    max_seqlen_q: int, max_seqlen_k: int, dropout_p: float, softmax_scale: float | None,
    causal: bool, window_size_left: int = -1, window_size_right: int = -1, softcap: float = 0.0,
    alibi_slopes: Array | None = None, return_softmax: bool = False,
    block_table: Array | None = None, leftpad_k: Array | None = None,
    seqused_k: Array | None = None, zero_tensors: bool = False,
) -> tuple[Array, Array, None, None]:  # fmt: skip
    """Return the same of packed sequences; the logsumexp is (H, T)."""
    _refuse(dropout_p=dropout_p, leftpad_k=leftpad_k)
    results = varlen(
        q, k, v, Packed(cu_seqlens_q), Packed(cu_seqlens_k, seqused_k), softmax_scale, causal,
        (window_size_left, window_size_right), softcap, slopes=alibi_slopes, table=block_table,
        logsumexp=True,
    )  # fmt: skip
    return *results, None, None


def _flash_attn_backward(
    dout: Array, q: Array, k: Array, v: Array, out: Array, softmax_lse: Array,
    dq: Array | None, dk: Array | None, dv: Array | None,
    dropout_p: float, softmax_scale: float | None, causal: bool,
    window_size_left: int = -1, window_size_right: int = -1, softcap: float = 0.0,
    alibi_slopes: Array | None = None, deterministic: bool = False, rng_state: Any = None,
) -> Array:  # fmt: skip
    """Write the gradients into dq, dk and dv; return the sums of dout · out, (B, H, L).

    Output and logsumexp may be those over more keys than these.
    """
    _refuse(dropout_p=dropout_p)
    window = window_size_left, window_size_right
    options = dense_options(q, k, v, softmax_scale, causal, window, softcap, alibi_slopes)
    axes = "q BLHD, k BSGD, v BSGE, dq? BLHD, dk? BSGD, dv? BSGE, softmax_lse BHL"
    check_axes(axes, q, k, v, dq, dk, dv, softmax_lse)
    xp = library_of(q).xp
    partial = Partial(out, xp.permute_dims(softmax_lse, (0, 2, 1)))
    gradients = attention_backward(q, k, v, partial, dout, layout="...LHD", **options)
    for place, gradient in zip((dq, dk, dv), gradients[:3], strict=True):
        if place is not None:
            place[...] = gradient
    sums = xp.sum(cast(xp, dout, softmax_lse.dtype) * out, axis=-1)
    return xp.permute_dims(sums, (0, 2, 1))


def _flash_attn_varlen_backward(
    dout: Array, q: Array, k: Array, v: Array, out: Array, softmax_lse: Array,
    dq: Array | None, dk: Array | None, dv: Array | None, cu_seqlens_q: Array, cu_seqlens_k: Array,
    max_seqlen_q: int, max_seqlen_k: int, dropout_p: float, softmax_scale: float | None,
    causal: bool, window_size_left: int = -1, window_size_right: int = -1, softcap: float = 0.0,
    alibi_slopes: Array | None = None, deterministic: bool = False, rng_state: Any = None,
    zero_tensors: bool = False,
) -> Array:  # fmt: skip
    """Do the same for packed sequences, one after another; the sums are (H, T)."""
    sums = library_of(q).xp.zeros_like(softmax_lse)
    own, other = spans_of("q", Packed(cu_seqlens_q), q), spans_of("k", Packed(cu_seqlens_k), k)
    for n, ((row, length), (key, count)) in enumerate(zip(own, other, strict=True)):
        rows, keys = slice(row, row + length), slice(key, key + count)
        given: Any = zip(
            (dout, q, k, v, out, dq, dk, dv), (rows, rows, keys, keys, rows, rows, keys, keys),
            strict=True,
        )  # fmt: skip
        dout_, q_, k_, v_, out_, dq_, dk_, dv_ = (
            x if x is None else x[at, ...][None, ...] for x, at in given
        )
        slopes: Any = alibi_slopes
        if slopes is not None and len(slopes.shape) == 2:
            slopes = slopes[n : n + 1, :]
        sums[:, rows] = _flash_attn_backward(
            dout_, q_, k_, v_, out_, softmax_lse[None, :, rows], dq_, dk_, dv_, dropout_p,
            softmax_scale, causal, window_size_left, window_size_right, softcap, slopes,
        )[0, ...]  # fmt: skip
    return sums


def _refuse(**given: Any) -> None:
    for name, value in given.items():
        if value is not None and (hasattr(value, "shape") or value):
            raise NotImplementedError(
                f"{name} is for the public functions, without this underscore"
            )
