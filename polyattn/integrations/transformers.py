"""polyattn inside Hugging Face transformers: ``attn_implementation="polyattn"``.

What must hold: a model computes what it computes with ``"eager"``, at every token that is not
padding. What a model asks for is honoured or refused, and the masks are registered together with
the attention, for without a mask function transformers hands down no masks at all.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cache, partial
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    sdpa_mask,
)

from polyattn.api.attention import attention
from polyattn.api.explain import explain
from polyattn.api.weights import attention_weights
from polyattn.plugin import Kernel

__all__ = ["register"]

#: What some models hand down that would change the result, and that is not done here.
REFUSED = {
    "cache": "a paged cache, as of continuous batching",
    "head_mask": "a head_mask",
    "sinks": "sinks that differ from row to row",
}


def register(
    name: str = "polyattn",
    *,
    backend: str | Sequence[str] | None = None,
    kernel: str | Kernel | None = None,
) -> None:
    """Make ``attn_implementation=name`` work in transformers.

    Called again with the same name, it replaces what the name stood for, in models that have it
    too.

    Parameters
    ----------
    name : str
        The name: letters, digits and underscores, and none of transformers' own.
    backend : str or sequence of str, optional
        As for `polyattn.attention`.
    kernel : str or polyattn.plugin.Kernel, optional
        As for `polyattn.attention`.

    Raises
    ------
    TypeError
        If an argument is of the wrong kind.
    ValueError
        If the name is one that transformers has a meaning for.
    UnknownBackendError
        If no plugin has a backend's name.

    See Also
    --------
    polyattn.attention : What the models call then.

    Examples
    --------
    >>> import torch
    >>> from transformers import BertConfig, BertModel
    >>> from polyattn.integrations.transformers import register
    >>> register()
    >>> config = BertConfig(
    ...     hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64,
    ...     attn_implementation="polyattn",
    ... )
    >>> model = BertModel(config).eval()
    >>> model(torch.tensor([[5, 6, 7]])).last_hidden_state.shape
    torch.Size([1, 3, 32])
    """
    _check_name(name)
    explain((1, 1, 1, 8), (1, 1, 1, 8), (1, 1, 1, 8), backend=backend, kernel=kernel)
    AttentionInterface.register(name, partial(_attend, backend, kernel))
    AttentionMaskInterface.register(name, _mask)


def _check_name(name: Any) -> None:
    if not isinstance(name, str):
        raise TypeError(f"name must be a string such as 'polyattn'; got {name!r}")
    # transformers looks for these words anywhere in a name.
    if not re.fullmatch(r"\w+", name) or re.search("eager|sdpa|flash|flex_attention", name):
        raise ValueError(
            "name must be of letters, digits and underscores, and none of transformers' own, as"
            f" 'polyattn' or 'polyattn_tiled'; got {name!r}"
        )


# ---- masks -------------------------------------------------------------------------------------


def _mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: Any = 0,
    mask_function: Any = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    *,
    config: Any = None,
    **options: Any,
) -> torch.Tensor | None:
    """Return which keys each row sees, (batch, 1, L, S), or None where causality says it all."""
    if config is not None and not torch.compiler.is_compiling():
        _check_reachable(config.model_type)
    # All rows see the same keys: one row is kept, and repeated without a copy.
    alike = mask_function is bidirectional_mask_function
    mask: torch.Tensor | None = sdpa_mask(
        batch_size, 1 if alike else q_length, kv_length, q_offset, kv_offset,
        mask_function, attention_mask, **options,
    )  # fmt: skip
    return mask.expand(-1, -1, q_length, -1) if alike and mask is not None else mask


@cache
def _check_reachable(model_type: str) -> None:
    """Refuse models that take our masks, and whose own attention would misread them."""
    models = [
        model
        for model in _kinds(PreTrainedModel)
        if getattr(model.config_class, "model_type", None) == model_type
    ]
    if models and not any(model._can_set_attn_implementation() for model in models):
        raise NotImplementedError(
            f"{model_type} models compute attention by themselves, not through transformers'"
            " AttentionInterface, so polyattn is never called; use attn_implementation='eager'"
        )


def _kinds(kind: type[Any]) -> Iterator[type[Any]]:
    for one in kind.__subclasses__():
        yield one
        yield from _kinds(one)


def _narrowed(mask: torch.Tensor) -> torch.Tensor:
    """Return a mask with one of what only repeats along an axis, as a view."""
    for axis in range(mask.ndim):
        if mask.stride(axis) == 0 and mask.shape[axis] > 1:
            mask = mask.narrow(axis, 0, 1)
    return mask


# ---- attention ---------------------------------------------------------------------------------


def _attend(
    backend: str | Sequence[str] | None,
    kernel: str | Kernel | None,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    output_attentions: bool | None = False,
    **others: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the output, (batch, L, H, E), and the weights if they are asked for."""
    kind = query.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        # As it does for torch's own attention: rotary positions leave query and key in float32.
        dtype = torch.get_autocast_dtype(kind)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    _check_others(module, attention_mask, others)
    options: dict[str, Any] = {"scale": scaling, "softcap": softcap, "sinks": s_aux}
    options |= _shown(module, query, key, attention_mask, is_causal, sliding_window)
    if position_bias is not None:
        options["bias"] = position_bias + options.get("bias", 0)
    if dropout and module.training:
        seed = torch.randint(2**62, (), device=query.device)
        options["dropout"] = (dropout, seed)
    output = attention(query, key, value, backend=backend, kernel=kernel, **options)
    weights: Any = None
    if output_attentions:
        weights = attention_weights(query, key, backend=backend, **options)
        weights = weights.to(query.dtype)
    return output.transpose(1, 2).contiguous(), weights


def _shown(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool | None,
    sliding_window: int | None,
) -> dict[str, Any]:
    """Return which keys each row sees, as options of `attention`."""
    if mask is not None:  # which holds causality and the window too
        return {"mask" if mask.dtype == torch.bool else "bias": _narrowed(mask)}
    length, keys = query.shape[-2], key.shape[-2]
    options: dict[str, Any] = {}
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    if is_causal:
        options["is_causal"] = True
        # The first tokens in a cache of fixed size, whose end is empty yet.
        if 1 < length < keys:
            options["query_offset"] = 0
    if sliding_window is not None and sliding_window < keys:
        if not is_causal:
            raise ValueError(
                f"{type(module).__name__} asks for a sliding window of {sliding_window} among"
                f" {keys} keys, is not causal and has no mask: which keys a row sees is not said."
                " Give it the mask of create_bidirectional_sliding_window_mask"
            )
        options["window"] = (sliding_window - 1, 0)
    return options


def _check_others(
    module: torch.nn.Module, mask: torch.Tensor | None, others: dict[str, Any]
) -> None:
    """Refuse what would change the result, and is not done here."""
    name = type(module).__name__
    tensor = isinstance(mask, torch.Tensor)
    if mask is not None and (not tensor or mask.ndim != 4 or "int" in str(mask.dtype)):
        got = f"of shape {tuple(mask.shape)} and {mask.dtype}" if tensor else repr(mask)
        raise ValueError(
            f"{name} hands polyattn an attention mask {got}; it must be a tensor of bool, or of"
            " numbers to add, of the shape (batch, heads, L, S), where 1 may stand for any of them"
        )
    for option, what in REFUSED.items():
        if others.get(option) is not None:
            raise NotImplementedError(
                f"{name} hands polyattn {what} ({option}=), which it does not honour; use"
                " attn_implementation='eager'"
            )
    packed = others.get("cu_seq_lens_q")
    if mask is None and packed is not None and len(packed) > 2:
        raise NotImplementedError(
            f"{name} hands polyattn {len(packed) - 1} sequences packed into one by cu_seq_lens_q=,"
            " and no mask that keeps them apart; give the model position_ids that start anew with"
            " each"
        )
