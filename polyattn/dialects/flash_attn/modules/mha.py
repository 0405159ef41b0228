"""Attention as layers of torch, as `flash_attn.modules.mha` has it, with weights of its names.

Dtypes, devices and head sizes are those of `polyattn.attention`. In `SelfAttention` and
`CrossAttention` a key that `key_padding_mask` hides is absent.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from polyattn._api.attention import attention
from polyattn._core.expressions.scores import default_slopes
from polyattn.dialects._shared import check_axes, dropout_of
from polyattn.dialects.flash_attn import (
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)
from polyattn.dialects.flash_attn.layers.rotary import RotaryEmbedding

__all__ = [
    "MHA",
    "CrossAttention",
    "FlashCrossAttention",
    "FlashSelfAttention",
    "SelfAttention",
    "get_alibi_slopes",
]
__dir__ = __all__.copy


class _Inner(nn.Module):
    """The options of attention without parameters."""

    def __init__(
        self, causal: bool = False, softmax_scale: float | None = None,
        attention_dropout: float = 0.0, window_size: tuple[int, int] = (-1, -1),
        alibi_slopes: Tensor | None = None, deterministic: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.causal, self.softmax_scale, self.window_size = causal, softmax_scale, window_size
        self.drop = nn.Dropout(attention_dropout)
        self.register_buffer("alibi_slopes", alibi_slopes, persistent=False)

    def options(self, causal: bool | None) -> dict[str, Any]:
        """Return the arguments of a function of `flash_attn`."""
        return {
            "dropout_p": self.drop.p if self.training else 0.0, "softmax_scale": self.softmax_scale,
            "causal": self.causal if causal is None else causal, "window_size": self.window_size,
            "alibi_slopes": self.alibi_slopes,
        }  # fmt: skip

    def padded(
        self, q: Tensor, kv: Tensor, causal: bool | None, mask: Tensor | None, ends: bool
    ) -> Tensor:
        """Attend to the keys of a mask, (B, S); with `ends` the last row is at the last of them."""
        check_axes("q BLHD, kv BS2GD, key_padding_mask BS", q, kv, mask)
        given = self.options(causal)
        options: dict[str, Any] = {"is_causal": given["causal"], "scale": self.softmax_scale}
        if mask is not None:
            options["mask"] = mask.bool()[:, None, None, :]
            if given["causal"]:
                options["query_offset"] = mask.sum(-1) - q.shape[1] if ends else 0
        options["dropout"] = dropout_of(q, given["dropout_p"])
        result: Tensor = attention(q, kv[:, :, 0], kv[:, :, 1], layout="...LHD", **options)
        return result


class FlashSelfAttention(_Inner):
    """Attention of q, k and v in one tensor, (B, L, 3, H, D), or packed, (T, 3, H, D)."""

    def forward(
        self, qkv: Tensor, causal: bool | None = None, cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
    ) -> Any:  # fmt: skip
        """Return (B, L, H, D), or (T, H, D) of sequences that begin at `cu_seqlens`."""
        options = self.options(causal)
        if cu_seqlens is None:
            return flash_attn_qkvpacked_func(qkv, **options)
        return flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, max_seqlen, **options)


class FlashCrossAttention(_Inner):
    """Attention of q, (B, L, H, D), to k and v in one tensor, (B, S, 2, G, D), or packed."""

    def forward(
        self, q: Tensor, kv: Tensor, causal: bool | None = None, cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None, cu_seqlens_k: Tensor | None = None,
        max_seqlen_k: int | None = None,
    ) -> Any:  # fmt: skip
        """Return (B, L, H, D), or (T, H, D); keys begin where rows do without `cu_seqlens_k`."""
        options = self.options(causal)
        if cu_seqlens is None:
            return flash_attn_kvpacked_func(q, kv, **options)
        of_keys = cu_seqlens if cu_seqlens_k is None else cu_seqlens_k
        return flash_attn_varlen_kvpacked_func(
            q, kv, cu_seqlens, of_keys, max_seqlen, max_seqlen_k, **options
        )


class SelfAttention(_Inner):
    """Attention of q, k and v in one tensor, (B, L, 3, H, D), to the keys of a mask."""

    def forward(
        self, qkv: Tensor, causal: bool | None = None, key_padding_mask: Tensor | None = None
    ) -> Tensor:
        """Return (B, L, H, D); causal row i sees the keys j <= i."""
        check_axes("qkv BL3HD", qkv)
        return self.padded(qkv[:, :, 0], qkv[:, :, 1:], causal, key_padding_mask, ends=False)


class CrossAttention(_Inner):
    """Attention of q, (B, L, H, D), to k and v, (B, S, 2, G, D), to the keys of a mask."""

    def forward(
        self, q: Tensor, kv: Tensor, causal: bool | None = None,
        key_padding_mask: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Return (B, L, H, D); the last causal row is at the last of the keys that are kept."""
        return self.padded(q, kv, causal, key_padding_mask, ends=True)


class MHA(nn.Module):
    """Attention with its linear maps: ``Wqkv``, or ``Wq`` and ``Wkv``, and ``out_proj``.

    Arguments are those of `flash_attn`'s; `fused_bias_fc` chooses no other function here.
    """

    def __init__(
        self, embed_dim: int, num_heads: int, num_heads_kv: int | None = None,
        cross_attn: bool = False, qkv_proj_bias: bool = True, out_proj_bias: bool = True,
        dropout: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
        layer_idx: int | None = None, dwconv: bool = False, rotary_emb_dim: int = 0,
        rotary_emb_base: float = 10000.0, rotary_emb_scale_base: float | None = None,
        rotary_emb_interleaved: bool = False, use_alibi: bool = False,
        window_size: tuple[int, int] = (-1, -1), fused_bias_fc: bool = False,
        use_flash_attn: bool = False, return_residual: bool = False, checkpointing: bool = False,
        device: Any = None, dtype: Any = None,
    ) -> None:  # fmt: skip
        super().__init__()
        groups = num_heads if num_heads_kv is None else num_heads_kv
        if embed_dim % num_heads or num_heads % groups:
            raise ValueError(
                "num_heads must divide embed_dim, and num_heads_kv num_heads; got embed_dim"
                f" {embed_dim}, num_heads {num_heads} and num_heads_kv {groups}"
            )
        if dwconv:
            raise NotImplementedError("dwconv=True, a convolution before attention, is refused")
        if rotary_emb_dim and cross_attn:
            raise ValueError("rotary_emb_dim is for self-attention: leave out cross_attn")
        if (use_alibi or tuple(window_size) != (-1, -1)) and not use_flash_attn:
            raise ValueError("use_alibi and window_size need use_flash_attn=True")
        self.embed_dim, self.num_heads, self.num_heads_kv = embed_dim, num_heads, groups
        self.head_dim, self.cross_attn, self.causal = embed_dim // num_heads, cross_attn, causal
        self.layer_idx, self.rotary_emb_dim = layer_idx, rotary_emb_dim
        self.use_flash_attn, self.return_residual = use_flash_attn, return_residual
        self.checkpointing = checkpointing
        placed = {"device": device, "dtype": dtype}
        if rotary_emb_dim:
            self.rotary_emb = RotaryEmbedding(
                rotary_emb_dim, rotary_emb_base, rotary_emb_interleaved, rotary_emb_scale_base,
                device,
            )  # fmt: skip
        of_kv = 2 * self.head_dim * groups
        if not cross_attn:
            self.Wqkv = nn.Linear(embed_dim, embed_dim + of_kv, qkv_proj_bias, **placed)
        else:
            self.Wq = nn.Linear(embed_dim, embed_dim, qkv_proj_bias, **placed)
            self.Wkv = nn.Linear(embed_dim, of_kv, qkv_proj_bias, **placed)
        options: dict[str, Any] = {"causal": causal, "softmax_scale": softmax_scale}
        options |= {"attention_dropout": dropout, "window_size": window_size}
        if use_alibi:
            options["alibi_slopes"] = torch.tensor(get_alibi_slopes(num_heads), device=device)
        kinds: Any = (SelfAttention, CrossAttention)
        kinds = (FlashSelfAttention, FlashCrossAttention) if use_flash_attn else kinds
        self.inner_attn, self.inner_cross_attn = (kind(**options) for kind in kinds)
        self.out_proj = nn.Linear(embed_dim, embed_dim, out_proj_bias, **placed)

    def allocate_inference_cache(
        self, batch_size: int, max_seqlen: int, dtype: Any = None
    ) -> Tensor:
        """Return a cache of keys and values, (B, S, 2, G, D), with nothing written."""
        weight, shape = self.out_proj.weight, (2, self.num_heads_kv, self.head_dim)
        return torch.empty(
            batch_size, max_seqlen, *shape, dtype=dtype or weight.dtype, device=weight.device
        )

    def forward(
        self, x: Tensor, x_kv: Tensor | None = None, key_padding_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None, max_seqlen: int | None = None,
        mixer_subset: Any = None, inference_params: Any = None, **kwargs: Any,
    ) -> Any:  # fmt: skip
        """Return attention of x, (B, L, M), or packed, (T, M), with `return_residual` x too.

        `inference_params` has the caches of layers by `layer_idx`, in which the new keys and values
        are written at ``seqlen_offset``, or at ``lengths_per_sample``.
        """
        is_flash, has_mask = self.use_flash_attn, key_padding_mask is not None
        if not self.cross_attn and not (x_kv is None and mixer_subset is None):
            raise ValueError("x_kv and mixer_subset are for cross_attn=True")
        if is_flash and has_mask:
            raise ValueError("key_padding_mask is for use_flash_attn=False: pass cu_seqlens")
        if cu_seqlens is not None and (self.rotary_emb_dim or not is_flash):
            raise ValueError("cu_seqlens needs use_flash_attn=True, and rotary_emb_dim 0")
        has_cache = self.layer_idx is not None and not has_mask and cu_seqlens is None
        if inference_params is not None and not has_cache:
            raise ValueError(
                "inference_params needs layer_idx, and no key_padding_mask and cu_seqlens"
            )
        if inference_params is not None and kwargs:
            raise ValueError(f"{', '.join(kwargs)} cannot be given with inference_params")
        packed = {"cu_seqlens": cu_seqlens, "max_seqlen": max_seqlen}
        kwargs |= packed if is_flash else {"key_padding_mask": key_padding_mask}
        inner: Any = self.inner_cross_attn
        given: tuple[Tensor, ...]
        if self.cross_attn:
            q = self.Wq(x if mixer_subset is None else x[:, mixer_subset])
            kv = self.Wkv(x if x_kv is None else x_kv)
            given = self._heads(q, self.num_heads), self._heads(kv, 2, self.num_heads_kv)
        elif self.num_heads_kv == self.num_heads:
            inner, given = self.inner_attn, (self._heads(self.Wqkv(x), 3, self.num_heads),)
        else:
            heads = self._heads(self.Wqkv(x), self.num_heads + 2 * self.num_heads_kv)
            q, kv = heads[..., : self.num_heads, :], heads[..., self.num_heads :, :]
            given = q, kv.reshape(*kv.shape[:-2], 2, self.num_heads_kv, self.head_dim)
        if self.rotary_emb_dim:
            first, most = self._lengths(inference_params, x.shape[0])
            turned = self.rotary_emb(*given, seqlen_offset=first, max_seqlen=most)
            given = turned if len(given) == 2 else (turned,)
        if inference_params is not None:
            context = self._cached(*given, params=inference_params)
        else:
            run = partial(checkpoint, inner, use_reentrant=False) if self.checkpointing else inner
            context = run(*given, **kwargs)
        output = self.out_proj(context.flatten(-2))
        return (output, x) if self.return_residual else output

    def _lengths(self, params: Any, batch: int) -> tuple[Any, int | None]:
        """Return the position of the first new token, or of each item's, and the capacity."""
        if params is None:
            return 0, None
        start, lengths = params.batch_size_offset, params.lengths_per_sample
        own = params.seqlen_offset if lengths is None else lengths[start : start + batch]
        return own, params.max_seqlen

    def _heads(self, x: Tensor, *axes: int) -> Tensor:
        return x.reshape(*x.shape[:-1], *axes, self.head_dim)

    def _cached(self, q: Tensor, kv: Tensor | None = None, *, params: Any) -> Any:
        """Write new keys and values into the cache of the layer, and attend to all of them."""
        q, kv = (q[:, :, 0], q[:, :, 1:]) if kv is None else (q, kv)
        caches, start = params.key_value_memory_dict, params.batch_size_offset
        if self.layer_idx not in caches:
            shape = (params.max_batch_size, params.max_seqlen)
            caches[self.layer_idx] = self.allocate_inference_cache(*shape, dtype=kv.dtype)
        cache, inner = caches[self.layer_idx][start : start + q.shape[0]], self.inner_cross_attn
        return flash_attn_with_kvcache(
            q, cache[:, :, 0], cache[:, :, 1], kv[:, :, 0], kv[:, :, 1],
            cache_seqlens=self._lengths(params, q.shape[0])[0], softmax_scale=inner.softmax_scale,
            causal=inner.causal, window_size=inner.window_size, alibi_slopes=inner.alibi_slopes,
        )  # fmt: skip


def get_alibi_slopes(nheads: int) -> list[float]:
    """Return the slopes of ALiBi: powers of two, and then every other one of twice as many."""
    return list(default_slopes(nheads))
