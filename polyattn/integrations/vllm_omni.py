"""Integrate polyattn into vLLM-Omni: a backend of its diffusion models, and a sparse kernel."""

from __future__ import annotations

from typing import Any

import torch

from polyattn.dialects.torch import scaled_dot_product_attention

__all__ = ["attend", "register"]
__dir__ = __all__.copy


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    params: dict[str, Any],
    is_causal: bool,
    softmax_scale: float,
) -> torch.Tensor:
    """Compute attention as a plugin of the slot ``SPARSE_ATTN``: ``extra={"backend": "polyattn"}``.

    Parameters
    ----------
    query, key, value : Tensor
        Shapes (B, L, H, D), (B, S, G, D) and (B, S, G, E).
    params : dict
        ``attn_mask`` is used, a bool tensor (B, S) or as for torch's function; others are not.
    is_causal : bool
        Whether row i sees the keys j <= i.
    softmax_scale : float
        Multiplies the scores.

    Returns
    -------
    Tensor
        Shape (B, L, H, E).
    """
    if params.get("full_attn_spans") is not None:
        raise NotImplementedError(
            "polyattn.integrations.vllm_omni: full_attn_spans is not supported; give a mask"
        )
    mask = params.get("attn_mask")
    if mask is not None and mask.ndim == 2 and mask.shape == (query.shape[0], key.shape[1]):
        mask = mask.bool()[:, None, None, :]
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    output: torch.Tensor = scaled_dot_product_attention(
        query, key, value, mask, is_causal=is_causal, scale=softmax_scale, enable_gqa=True
    )
    return output.transpose(1, 2)


attend.capabilities = {"supports_attention_mask": True}  # type: ignore[attr-defined]


def register(name: str = "TORCH_SDPA") -> type:
    """Put a backend that computes by polyattn in place of one of ``DiffusionAttentionBackendEnum``.

    Returns its class.
    """
    from vllm_omni.diffusion.attention.backends import abstract, registry

    class Attend(abstract.AttentionImpl):  # type: ignore[misc]
        def __init__(
            self, num_heads: int, head_size: int, softmax_scale: float, causal: bool = False,
            num_kv_heads: int | None = None, prefix: str = "", **_: Any,
        ) -> None:  # fmt: skip
            self.causal, self.softmax_scale = causal, softmax_scale

        def forward(self, query: Any, key: Any, value: Any, attn_metadata: Any = None) -> Any:
            names = ("attn_mask", "full_attn_spans")
            params = {name: getattr(attn_metadata, name, None) for name in names}
            return attend(query, key, value, params, self.causal, self.softmax_scale)

    class PolyattnBackend(abstract.AttentionBackend):  # type: ignore[misc]
        get_name = staticmethod(lambda: "POLYATTN")
        get_impl_cls = staticmethod(lambda: Attend)
        get_metadata_cls = staticmethod(lambda: abstract.AttentionMetadata)
        get_builder_cls = staticmethod(lambda: None)
        get_supported_head_sizes = staticmethod(list[int])
        supports_attention_mask = classmethod(lambda cls, attention_spec=None: True)

    globals()["PolyattnBackend"] = PolyattnBackend  # found by its name
    backend = registry.DiffusionAttentionBackendEnum[name]
    registry.register_diffusion_backend(backend, f"{__name__}.PolyattnBackend")
    return PolyattnBackend
