"""Integrate polyattn into Hugging Face diffusers: its attention in place of a backend of theirs."""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

from polyattn.dialects.torch import scaled_dot_product_attention

__all__ = ["register"]
__dir__ = __all__.copy


def register(name: str = "native") -> Any:
    """Let the models of diffusers that use a backend compute attention by polyattn.

    The names of backends are an enumeration that is closed, so one of them changes its meaning.

    Parameters
    ----------
    name : str
        A name of ``AttentionBackendName``: by default "native", which models use that choose none.

    Returns
    -------
    callable
        The function that was there, for ``_AttentionBackendRegistry.register`` to bring it back.

    Raises
    ------
    ValueError
        If diffusers has no such name.

    Examples
    --------
    >>> from polyattn.integrations import diffusers
    >>> before = diffusers.register()
    """
    registry, backend = _AttentionBackendRegistry, AttentionBackendName(name)
    before = registry._backends.get(backend)
    # What shards a sequence by diffusers' own means runs their functions, not this one.
    registry._supports_context_parallel.discard(backend.value)
    registry.register(backend)(_attend)
    return before


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    _parallel_config: Any = None,
) -> torch.Tensor:
    """Return attention of (B, L, H, D); a mask is (B, S) or as for torch's function."""
    if return_lse or _parallel_config is not None:
        raise NotImplementedError(
            "polyattn.integrations.diffusers: return_lse and context parallelism are not supported:"
            " choose a backend of diffusers for them by model.set_attention_backend"
        )
    if attn_mask is not None and attn_mask.ndim == 2 and attn_mask.shape[0] == query.shape[0]:
        attn_mask = attn_mask[:, None, None, :]
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    output: torch.Tensor = scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
    )
    return output.transpose(1, 2)
