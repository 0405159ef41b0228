"""Call functions over caches, pages and packed sequences by the names of `polyattn.attention`.

Each adapter takes a function of one signature and our arguments, heads first; what the function has
no argument for, it does not take either.
"""

# ruff: noqa: N806 -- the letters are those of the semantics

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from polyattn._base.arrays import Array, cast, index_range, library_of, numbers_like

Function = Callable[..., Any]
Window = tuple[int | None, int | None]


class NoArgumentError(Exception):
    """Raised by an adapter whose function has no argument for an option."""


def integers(numbers: Sequence[int], like: Array) -> Array:
    """Return numbers as an array of int32, as kernels ask for."""
    xp = library_of(like).xp
    return numbers_like(xp, list(numbers), xp.int32, like)


def numbers_of(lengths: Any, batch: int, otherwise: int) -> list[int]:
    """Return the number of keys of each item."""
    if lengths is None or isinstance(lengths, int):
        return [otherwise if lengths is None else lengths] * batch
    return [int(lengths[n]) for n in range(batch)]


def starts_of(lengths: Sequence[int]) -> list[int]:
    """Return where each sequence of a packed array begins, and where the last one ends."""
    return list(itertools.accumulate(lengths, initial=0))


def packed(
    function: Function, arrays: Sequence[Array], lengths: Any, given: dict[str, Any], names: Any
) -> Any:
    """Call a function of packed sequences with a batch, (B, L, H, D)."""
    q, k, v = arrays
    xp, (B, L), table = library_of(q).xp, q.shape[:2], given.get("block_table")
    numbers = numbers_of(lengths, B, k.shape[1])
    if table is None and B:
        k, v = (xp.concat([x[n, :end, ...] for n, end in enumerate(numbers)]) for x in (k, v))
    elif table is None:
        k, v = (xp.reshape(x, (0, *x.shape[2:])) for x in (k, v))
    elif "seqused_k" in names:
        given["seqused_k"] = integers(numbers, q)
    starts = (integers(starts_of(x), q) for x in ([L] * B, numbers))
    flat = xp.reshape(q, (B * L, *q.shape[2:]))
    return function(flat, k, v, *starts, L, max(numbers, default=0), **given)


def _check(query: Array, *, one_row: bool = False) -> Any:
    """Return the functions of the library; raise for arrays that the functions do not take."""
    if len(query.shape) != 4:
        raise NoArgumentError("arrays of another rank than 4")
    if one_row and query.shape[2] != 1:
        raise NoArgumentError("more rows than one")
    return library_of(query).xp


def _left(window: Window | None) -> int:
    """Return how many keys the newest row sees before it; -1 for all."""
    return -1 if window is None or window[0] is None else window[0]


def _paged(key: Array, lengths: Any, table: Any, batch: int) -> tuple[list[list[int]], list[int]]:
    """Return the pages and the number of keys of each item; a cache is one page of each."""
    if table is None:
        return [[n] for n in range(batch)], numbers_of(lengths, batch, key.shape[2])
    pages = [[int(table[n, p]) for p in range(table.shape[1])] for n in range(batch)]
    return pages, numbers_of(lengths, batch, 0)


def pallas(
    function: Function, query: Array, key: Array, value: Array, *, key_lengths: Any = None,
    block_table: Any = None, scale: float | None = None, softcap: float | None = None,
) -> Array:  # fmt: skip
    """Call a function as JAX's `paged_attention` of Pallas; it takes queries that are scaled."""
    xp = _check(query, one_row=True)
    pages, lengths = _paged(key, key_lengths, block_table, query.shape[0])
    rows = query[:, :, 0, :] * (query.shape[-1] ** -0.5 if scale is None else scale)
    pools = (xp.permute_dims(x, (1, 0, 2, 3)) for x in (key, value))
    table = numbers_like(xp, pages, xp.int32, query)
    output = function(
        rows, *pools, integers(lengths, query), table,
        attn_logits_soft_cap=softcap, pages_per_compute_block=1,
    )  # fmt: skip
    return output[:, :, None, :]


def flashinfer_single(
    function: Function, query: Array, key: Array, value: Array, *, key_lengths: Any = None,
    window: Window | None = None, scale: float | None = None, softcap: float | None = None,
) -> Array:  # fmt: skip
    """Call a function as FlashInfer's `single_decode_with_kv_cache`, once for each item."""
    xp = _check(query, one_row=True)
    options = {"window_left": _left(window), "sm_scale": scale, "logits_soft_cap": softcap}
    outputs = [
        function(
            query[n, :, 0, :], key[n, :, :end, :], value[n, :, :end, :], kv_layout="HND", **options
        )
        for n, end in enumerate(numbers_of(key_lengths, query.shape[0], key.shape[2]))
    ]
    return xp.stack(outputs)[:, :, None, :]


def flashinfer_batch(
    wrapper: Any, query: Array, key: Array, value: Array, *, key_lengths: Any = None,
    block_table: Any = None, window: Window | None = None, scale: float | None = None,
    softcap: float | None = None,
) -> Array:  # fmt: skip
    """Call `plan` and `run` of a class as FlashInfer's `BatchDecodeWithPagedKVCacheWrapper`."""
    xp = _check(query, one_row=True)
    table, lengths = _paged(key, key_lengths, block_table, query.shape[0])
    G, page = key.shape[1:3]
    used = [pages[: -(-end // page)] for pages, end in zip(table, lengths, strict=True)]
    none = numbers_like(xp, [0], xp.uint8, query)
    made = wrapper(xp.broadcast_to(none, (2**27,)) + none, "HND")  # with 128 MiB to work in
    made.plan(
        integers(starts_of([len(pages) for pages in used]), query),
        integers([page for pages in used for page in pages], query),
        integers([(end - 1) % page + 1 if end else 0 for end in lengths], query),
        query.shape[1], G, query.shape[3], page, window_left=_left(window), sm_scale=scale,
        logits_soft_cap=softcap, q_data_type=query.dtype,
    )  # fmt: skip
    return made.run(query[:, :, 0, :], (key, value))[:, :, None, :]


def group_query(
    function: Function, query: Array, key: Array, value: Array, *, key_lengths: Any = None,
    is_causal: bool = False, window: Window | None = None, scale: float | None = None,
    softcap: float | None = None, sinks: Array | None = None, bias: Array | None = None,
) -> Array:  # fmt: skip
    """Call a function as ONNX Runtime's GroupQueryAttention: the newest keys are given twice."""
    xp, (B, H, L, _), (_, G, S, _) = _check(query), query.shape, key.shape
    lengths = numbers_of(key_lengths, B, S)
    if L > S:
        raise NoArgumentError("more rows than keys")
    if L > 1 and not is_causal and window is not None:
        raise NoArgumentError("window without is_causal")

    def flat(x: Array) -> Array:
        turned = xp.permute_dims(x, (0, 2, 1, 3))
        return xp.reshape(turned, (*turned.shape[:2], -1))

    firsts = [max(end - L, 0) for end in lengths]
    new = (xp.stack([x[n, :, at : at + L, :] for n, at in enumerate(firsts)]) for x in (key, value))
    past = (x if key_lengths is not None else x[:, :, : S - L, :] for x in (key, value))
    if bias is not None:
        bias = xp.broadcast_to(bias, (B, H, L, S))[..., : max(lengths)]
    most = xp.reshape(integers([max(lengths)], query), ())
    has_past = key_lengths is not None or S > L
    output = function(
        flat(query), *map(flat, new), *(past if has_past else (None, None)),
        integers([end - 1 for end in lengths], query), most,
        attention_bias=bias, head_sink=sinks, num_heads=H, kv_num_heads=G, scale=scale,
        softcap=softcap, causal=int(is_causal or L == 1),
        local_window_size=-1 if _left(window) < 0 else _left(window) + 1,
    )  # fmt: skip
    output = output[0] if isinstance(output, (tuple, list)) else output
    return xp.permute_dims(xp.reshape(output, (B, L, H, -1)), (0, 2, 1, 3))


def transformers(
    function: Function, query: Array, key: Array, value: Array, *, key_lengths: Any = None,
    is_causal: bool = False, window: Window | None = None, attn_mask: Array | None = None,
    scale: float | None = None,
) -> Array:  # fmt: skip
    """Call a function as `sdpa_attention_forward`; lengths and windows are its mask."""
    xp, (B, H, L, _), (_, G, S, _) = _check(query), query.shape, key.shape
    if is_causal and attn_mask is not None:
        raise NoArgumentError("is_causal beside a mask")  # it looks at one of them only
    if key_lengths is not None or window is not None:
        if attn_mask is not None:
            raise NoArgumentError("key_lengths or window beside a mask")
        ends = xp.reshape(integers(numbers_of(key_lengths, B, S), query), (B, 1, 1, 1))
        rows, keys = (cast(xp, index_range(xp, 0, n, query), ends.dtype) for n in (L, S))
        ahead = keys - (xp.reshape(rows, (L, 1)) + ends - L)
        left, right = window or (None, None)
        right = min(right or 0, 0) if is_causal else right
        attn_mask = (keys < ends) & (ahead <= (S if right is None else right))
        attn_mask = attn_mask & (ahead >= -(S + L if left is None else left))
    module = SimpleNamespace(
        num_key_value_groups=H // G, is_causal=is_causal and attn_mask is None, training=False
    )
    output, _ = function(module, query, key, value, attn_mask, scaling=scale, dropout=0.0)
    return xp.permute_dims(output, (0, 2, 1, 3))


#: The adapters, by parameters that tell a signature.
ADAPTERS: dict[frozenset[str], Function] = {
    frozenset(("k_pages", "v_pages", "page_indices")): pallas,
    frozenset(("kv_layout", "window_left", "sm_scale")): flashinfer_single,
    frozenset(("indptr", "indices", "last_page_len")): flashinfer_batch,
    frozenset(("seqlens_k", "total_sequence_length")): group_query,
    frozenset(("module", "attention_mask", "scaling")): transformers,
}
