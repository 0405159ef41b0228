"""The names of other functions' arguments, by those of `polyattn.attention`.

The dialects take these names, and the check of other functions gives them.
"""

from __future__ import annotations

from typing import NamedTuple


class Names(NamedTuple):
    """The arguments of a kind of function; its arrays are of rank 4."""

    marks: frozenset[str]  # the parameters that it is known by
    length_first: bool  # (B, L, H, D), and not (B, H, L, D)
    options: dict[str, str]  # "attn_mask" is a mask or a bias, by its dtype
    causal: bool | str = True  # the value of is_causal
    no_bound: int | None = None  # the end of a window that bounds nothing
    packed: bool = False  # whether sequences are packed, (T, H, D), with their starts


def _same(*names: str, **others: str) -> dict[str, str]:
    return {name: name for name in names} | others


_FLASH = Names(
    frozenset(("softmax_scale", "causal", "window_size", "q", "k", "v")),
    True,
    _same("softcap", scale="softmax_scale", is_causal="causal", window="window_size"),
    no_bound=-1,
)


def _with(names: Names, *marks: str, **options: str) -> Names:
    """Return the names of a function that has more."""
    return names._replace(marks=names.marks | {*marks}, options=names.options | options)


_CACHED = _with(_FLASH, "k_cache", key_lengths="cache_seqlens", block_table="block_table")

#: Signatures that have the marks of others are before them.
NAMES = {
    "flash_attn_3_cached": _with(_CACHED, "page_table", block_table="page_table"),
    "flash_attn_cached": _CACHED,
    "flash_attn_packed": _with(
        _FLASH, "cu_seqlens_q", key_lengths="cu_seqlens_k", block_table="block_table"
    )._replace(packed=True),
    "flash_attn": _FLASH,
    "varlen_attn": Names(
        frozenset(("cu_seq_q", "cu_seq_k", "window_size")),
        True,
        _same("scale", "block_table", key_lengths="cu_seq_k", window="window_size")
        | {"is_causal": "window_size"},
        no_bound=-1,
        packed=True,
    ),
    "jax": Names(
        frozenset(("local_window_size", "query_seq_lengths")),
        True,
        _same("bias", "mask", "scale", "is_causal", window="local_window_size"),
        no_bound=2**30,  # stands for a side without a bound
    ),
    "flax": Names(
        frozenset(("broadcast_dropout", "dropout_rng")), True, _same("bias", "mask", "is_causal")
    ),
    "keras": Names(
        frozenset(("flash_attention", "attn_logits_soft_cap")),
        True,
        _same("bias", "mask", "scale", "is_causal", softcap="attn_logits_soft_cap"),
    ),
    "xformers": Names(
        frozenset(("attn_bias", "p", "op")), True, _same("scale", attn_mask="attn_bias")
    ),
    "mlx": Names(
        frozenset(("force_fused", "sinks")),
        False,
        _same("sinks", "scale", attn_mask="mask", is_causal="mask"),
        causal="causal",
    ),
}
