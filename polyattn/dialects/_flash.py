"""Compute the functions of both generations of FlashAttention by `polyattn.attention`."""

from __future__ import annotations

from typing import Any

from polyattn._api.attention import attention
from polyattn._api.partial import attention_partial
from polyattn._base.arrays import Array, index_range, library_of
from polyattn.dialects._packed import Packed, Rule, chunked, from_pages, packed_attention
from polyattn.dialects._shared import alibi, bounds, dropout_of, scaled

#: The window that bounds nothing, as it is written in the signatures.
NO_WINDOW = (-1, -1)


def options_of(q: Array, scale: Any, softcap: float) -> tuple[Array, dict[str, Any]]:
    """Return the queries, and the options that mean the same everywhere."""
    q, scale = scaled(q, scale)
    options: dict[str, Any] = {} if scale is None else {"scale": scale}
    if softcap > 0:
        options["softcap"] = softcap
    return q, options


def attended(q: Array, k: Array, v: Array, options: dict[str, Any], logsumexp: bool) -> Any:
    """Return attention of arrays (B, L, H, D), with the logsumexp, (B, H, L), if asked for."""
    if not logsumexp:
        return attention(q, k, v, layout="...LHD", **options)
    output, total = attention_partial(q, k, v, layout="...LHD", **options)
    return output, library_of(total).xp.permute_dims(total, (0, 2, 1))


def dense(
    q: Array, k: Array, v: Array, scale: float | None, causal: bool, window: Any, softcap: float,
    *, dropout: float = 0.0, slopes: Array | None = None, chunk: int = 0, logsumexp: bool = False,
) -> Any:  # fmt: skip
    """Return attention of arrays (B, L, H, D), with the logsumexp, (B, H, L), if asked for."""
    q, options = options_of(q, scale, softcap)
    if causal:
        options["is_causal"] = True
    if window is not NO_WINDOW and (near := bounds(window)):
        options["window"] = near
    if dropout:
        options["dropout"] = dropout_of(q, dropout)
    if slopes is not None or chunk:
        options |= by_position(q, k.shape[1], k.shape[1] - q.shape[1], slopes, chunk)
    return attended(q, k, v, options, logsumexp)


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
    table: Array | None = None, logsumexp: bool = False,
) -> Any:  # fmt: skip
    """Return attention of packed arrays (T, H, D), with the logsumexp, (H, T), if asked for."""
    q, options = options_of(q, scale, softcap)
    if dropout:
        options["dropout"] = dropout_of(q, dropout)
    if table is not None:
        ends: Any = keys.starts
        used = ends[1:] - ends[:-1] if keys.used is None else keys.used
        k, v, keys = from_pages(k, v, table, used)
    near = bounds(window) or (None, None)
    rule = Rule(bool(causal), near, chunk=chunk, slopes=slopes, logsumexp=logsumexp)
    return packed_attention(q, k, v, rows, keys, rule, **options)
