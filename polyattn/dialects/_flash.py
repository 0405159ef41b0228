"""Compute the functions of both generations of FlashAttention by `polyattn.attention`."""

from __future__ import annotations

import numbers
from typing import Any

from polyattn._api.attention import attention
from polyattn._api.partial import attention_partial
from polyattn._base.arrays import Array, index_range, library_of
from polyattn.dialects._packed import Packed, PositionRule, chunked, from_pages, packed_attention
from polyattn.dialects._shared import (
    alibi,
    bounds,
    check_axes,
    dropout_of,
    integers,
    scaled,
    shape_of,
)

#: The window that bounds nothing, as it is written in the signatures.
NO_WINDOW = (-1, -1)


def options_of(scale: float | None, softcap: float) -> dict[str, Any]:
    """Return the options that mean the same everywhere."""
    options: dict[str, Any] = {} if scale is None else {"scale": scale}
    if not isinstance(softcap, (int, float, numbers.Real)) or not softcap <= 0:
        options["softcap"] = softcap
    return options


def attended(q: Array, k: Array, v: Array, options: dict[str, Any], logsumexp: bool) -> Any:
    """Return attention of arrays (B, L, H, D), with the logsumexp, (B, H, L), if asked for."""
    if not logsumexp:
        return attention(q, k, v, layout="...LHD", **options)
    return heads_first(*attention_partial(q, k, v, layout="...LHD", **options))


def heads_first(output: Array, total: Array) -> tuple[Array, Array]:
    """Return the output and a logsumexp (B, L, H) as (B, H, L)."""
    return output, library_of(total).xp.permute_dims(total, (0, 2, 1))


def dense(
    q: Array, k: Array, v: Array, scale: float | None, causal: bool, window: Any, softcap: float,
    *, dropout: float = 0.0, slopes: Array | None = None, chunk: int = 0, qv: Array | None = None,
    logsumexp: bool = False,
) -> Any:  # fmt: skip
    """Return attention of arrays (B, L, H, D), with the logsumexp, (B, H, L), if asked for."""
    qv, (q, scale) = scaled(qv, scale)[0], scaled(q, scale)
    options = dense_options(q, k, v, scale, causal, window, softcap, slopes, chunk, qv)
    if dropout:
        options["dropout"] = dropout_of(q, dropout)
    return attended(joined(q, qv), joined(k, None if qv is None else v), v, options, logsumexp)


def dense_options(
    q: Array, k: Array, v: Array, scale: float | None, causal: bool, window: Any, softcap: float,
    slopes: Array | None = None, chunk: int = 0, qv: Array | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Check the shapes of arrays (B, L, H, D), and return the options of `attention`."""
    axes = "q BLHD, k BSGD, v BSGE, qv? BLHE, alibi_slopes H|BH"
    check_axes(axes, q, k, v, qv, slopes)
    options = options_of(scale, softcap)
    if causal:
        options["is_causal"] = True
    if window is not NO_WINDOW and (near := bounds(window)):
        options["window"] = near
    if slopes is not None or chunk:
        options |= by_position(q, k.shape[1], k.shape[1] - q.shape[1], slopes, chunk)
    return options


def joined(one: Array, other: Array | None) -> Array:
    """Return an array with the vectors of another, if there is one, after its own."""
    if other is None:
        return one
    if one.dtype != other.dtype:  # of q or k, which every library would widen
        raise TypeError(f"qv, q, k and v must have one dtype; got {other.dtype} and {one.dtype}")
    return library_of(one).xp.concat((one, other), axis=-1)


def by_position(
    q: Array, keys: int, offset: Any, slopes: Array | None, chunk: int, leftpad: Any = None
) -> dict[str, Any]:
    """Return the options for ALiBi and chunks; `offset` is the position of the first row."""
    options: dict[str, Any] = {} if slopes is None else {"score_mod": alibi(slopes, offset)}
    if chunk:
        xp = library_of(q, "q").xp
        rows, columns = (index_range(xp, 0, n, q) for n in (q.shape[1], keys))
        rows = rows + (offset if isinstance(offset, int) else offset[:, None])
        if leftpad is not None:  # the first chunk begins at the first key
            rows, columns = (x - leftpad[:, None] for x in (rows, columns))
        options["mask"] = chunked(rows, columns, chunk)
    return options


def varlen(
    q: Array, k: Array, v: Array, rows: Packed, keys: Packed,
    scale: float | None, causal: bool, window: Any, softcap: float,
    *, dropout: float = 0.0, slopes: Array | None = None, chunk: int = 0,
    qv: Array | None = None, table: Any = None, logsumexp: bool = False,
) -> Any:  # fmt: skip
    """Return attention of packed arrays (T, H, D), with the logsumexp, (H, T), if asked for."""
    tokens = "S" if table is None else "NP"  # of all sequences, or of each page
    check_axes(
        f"q THD, k {tokens}GD, v {tokens}GE, qv? THE, seqused_q B, seqused_k B, block_table BM,"
        " alibi_slopes H|BH",
        q, k, v, qv, rows.used, keys.used, table, slopes,
        B=shape_of(rows.starts, "cu_seqlens_q")[0] - 1,
    )  # fmt: skip
    if keys.starts is None:
        raise ValueError("cu_seqlens_k is missing: pass where each sequence begins in k")
    near = bounds(window) or (None, None)
    if qv is not None:
        q, k = joined(q, qv), joined(k, v)
    q, scale = scaled(q, scale)
    options = options_of(scale, softcap)
    if dropout:
        options["dropout"] = dropout_of(q, dropout)
    if table is not None:
        ends = integers("cu_seqlens_k", keys.starts, q)
        used = ends[1:] - ends[:-1] if keys.used is None else keys.used
        k, v, keys = from_pages(k, v, integers("block_table", table, q), used)
    rule = PositionRule(bool(causal), near, chunk=chunk, slopes=slopes, logsumexp=logsumexp)
    return packed_attention(q, k, v, rows, keys, rule, **options)
