"""Rotate queries and keys by their positions, as `flash_attn.layers.rotary` does."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from polyattn._base.arrays import Array, library_of
from polyattn.dialects._shared import check_axes, joined_axes, shape_of
from polyattn.dialects.flash_attn.ops.triton.rotary import apply_rotary

__all__ = [
    "RotaryEmbedding",
    "apply_rotary_emb",
    "apply_rotary_emb_func",
    "apply_rotary_emb_kv_",
    "apply_rotary_emb_qkv_",
    "apply_rotary_emb_torch",
]
__dir__ = __all__.copy


def apply_rotary_emb(
    x: Array, cos: Array, sin: Array, interleaved: bool = False, inplace: bool = False,
    seqlen_offsets: int | Array = 0, cu_seqlens: Array | None = None,
    max_seqlen: int | None = None,
) -> Array:  # fmt: skip
    """Rotate pairs of entries, as `apply_rotary` does, which describes the arguments.

    With `inplace` the result is written into `x`, except where autograd does not let it: use what
    is returned.
    """
    turned = apply_rotary(x, cos, sin, seqlen_offsets, cu_seqlens, max_seqlen, interleaved)
    return _put(x, turned.shape[2], turned) if inplace else turned


apply_rotary_emb_func = apply_rotary_emb_torch = apply_rotary_emb


def apply_rotary_emb_qkv_(
    qkv: Array, cos: Array, sin: Array, cos_k: Array | None = None, sin_k: Array | None = None,
    interleaved: bool = False, seqlen_offsets: int | Array = 0, num_heads_q: int | None = None,
) -> Array:  # fmt: skip
    """Rotate q and k in one array, (B, L, 3, H, D), or (B, L, H + 2 G, D) with `num_heads_q` = H.

    The result is also written into the array, except where autograd does not let it.
    """
    xp, shape = library_of(qkv, "qkv").xp, shape_of(qkv, "qkv")
    if len(shape) == 5:
        check_axes("qkv BL3HD", qkv)
        num_heads_q = shape[3]
    elif len(shape) != 4 or num_heads_q is None or not 0 < num_heads_q < shape[2]:
        raise ValueError(f"a qkv of shape {tuple(shape)} needs num_heads_q, the query heads")
    heads = joined_axes(qkv, 2, -1)
    end = (heads.shape[2] + num_heads_q) // 2
    parts = [(0, end, cos, sin)]  # q and k at once
    if cos_k is not None:
        parts = [(0, num_heads_q, cos, sin), (num_heads_q, end, cos_k, sin_k)]
    turned = [
        apply_rotary(heads[:, :, a:b, :], one, other, seqlen_offsets, interleaved=interleaved)
        for a, b, one, other in parts
    ]
    count = 2 if len(shape) == 5 else end
    whole = xp.concat(turned, axis=2) if len(turned) > 1 else turned[0]
    return _put(qkv, count, xp.reshape(whole, (*shape[:2], count, *shape[3:])))


def apply_rotary_emb_kv_(
    kv: Array, cos: Array, sin: Array, interleaved: bool = False, seqlen_offsets: int | Array = 0
) -> Array:
    """Rotate k of an array (B, L, 2, G, D), as `apply_rotary_emb_qkv_` does q and k."""
    check_axes("kv BL2GD", kv)
    key = apply_rotary(kv[:, :, 0, ...], cos, sin, seqlen_offsets, interleaved=interleaved)
    return _put(kv, 1, key[:, :, None, ...])


def _put(x: Array, count: int, turned: Array) -> Array:
    """Write the first entries of the third axis; return x, or a copy where autograd forbids it."""
    try:
        x[:, :, :count, ...] = turned
    except RuntimeError:  # a leaf, or one of several views that one function made
        return library_of(x).xp.concat((turned, x[:, :, count:, ...]), axis=2)
    return x


class RotaryEmbedding(torch.nn.Module):
    """Rotate queries and keys by angles of their positions, ``base ** (-2 n / dim)`` each.

    With `scale_base` they are scaled by position too (xPos). Angles are computed in float32 at
    least.
    """

    inv_freq: Tensor
    scale: Tensor | None

    def __init__(
        self, dim: int, base: float = 10000.0, interleaved: bool = False,
        scale_base: float | None = None, device: Any = None, *, pos_idx_in_fp32: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        self.dim, self.base, self.interleaved = dim, float(base), interleaved
        self.scale_base = scale_base
        self.register_buffer("inv_freq", self._compute_inv_freq(device), persistent=False)
        scale = None if scale_base is None else self._compute_scale(device)
        self.register_buffer("scale", scale, persistent=False)
        self._seq_len_cached = 0
        self._cos_cached: Any = None
        self._sin_cached: Any = None
        self._cos_k_cached: Any = None
        self._sin_k_cached: Any = None

    def _compute_inv_freq(self, device: Any = None) -> Tensor:
        steps = torch.arange(0, self.dim, 2, device=device, dtype=torch.float32)
        return 1.0 / self.base ** (steps / self.dim)

    def _compute_scale(self, device: Any = None) -> Tensor:
        steps = torch.arange(0, self.dim, 2, device=device, dtype=torch.float32)
        return (steps / self.dim + 0.4) / 1.4

    def _update_cos_sin_cache(self, seqlen: int, device: Any = None, dtype: Any = None) -> Any:
        """Make the tables of so many positions, unless those that there are serve; return them."""
        known = self._cos_cached, self._sin_cached, self._cos_k_cached, self._sin_k_cached
        first, *others = known if self.scale is not None else known[:2]
        if (
            first is not None
            and seqlen <= first.shape[0]
            # Other threads may make tables meanwhile.
            and all(one is not None and one.shape == first.shape for one in others)
            and (first.device, first.dtype) == (device, dtype)
            and not (first.is_inference() and not torch.is_inference_mode_enabled())
        ):
            return known
        wide = torch.promote_types(dtype or torch.float32, torch.float32)
        # A layer of 16 bits rounded its frequencies.
        is_rounded = self.inv_freq.dtype != torch.float32
        frequencies = self._compute_inv_freq(device) if is_rounded else self.inv_freq
        places = torch.arange(seqlen, device=device, dtype=wide)
        angles = torch.outer(places, frequencies.to(wide))
        tables: list[Tensor] = [angles.cos(), angles.sin()]
        of_keys: list[Any] = [None, None]
        if self.scale_base is not None:
            power = (places - seqlen // 2)[:, None] / self.scale_base
            scale = self._compute_scale(device).to(wide) ** power
            of_keys = [(table / scale).to(dtype) for table in tables]
            tables = [table * scale for table in tables]
        made = (*[table.to(dtype) for table in tables], *of_keys)
        self._cos_cached, self._sin_cached, self._cos_k_cached, self._sin_k_cached = made
        self._seq_len_cached = seqlen
        return made

    def forward(
        self, qkv: Tensor, kv: Tensor | None = None, seqlen_offset: int | Tensor = 0,
        max_seqlen: int | None = None, num_heads_q: int | None = None,
    ) -> Any:  # fmt: skip
        """Return qkv, (B, L, 3, H, D) or (B, L, H + 2 G, D), or q and kv, rotated, also in place.

        A tensor of offsets, (B,), needs `max_seqlen`, of all positions.
        """
        if max_seqlen is None and isinstance(seqlen_offset, int):
            max_seqlen = qkv.shape[1] + seqlen_offset
        if max_seqlen is None and self._cos_cached is None:
            raise ValueError("a tensor seqlen_offset needs max_seqlen, the number of positions")
        if max_seqlen is None:
            max_seqlen = self._seq_len_cached
        made = self._update_cos_sin_cache(max_seqlen, device=qkv.device, dtype=qkv.dtype)
        tables: tuple[Any, Any] = made[:2]
        of_keys: tuple[Any, Any] = tables if self.scale is None else made[2:]
        given: Any = {"interleaved": self.interleaved, "seqlen_offsets": seqlen_offset}
        if kv is None:
            return apply_rotary_emb_qkv_(qkv, *tables, *of_keys, **given, num_heads_q=num_heads_q)
        q = apply_rotary_emb(qkv, *tables, inplace=True, **given)
        return q, apply_rotary_emb_kv_(kv, *of_keys, **given)
