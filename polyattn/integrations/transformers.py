"""Integrate polyattn into Hugging Face transformers: ``attn_implementation="polyattn"``.

Requirements: at every token that is not padding, a model computes the same as with ``"eager"``. An
option is honoured or refused. The mask function is registered together with the attention, because
transformers passes no masks without one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask

from polyattn._api.attention import attention
from polyattn._api.explain import explain
from polyattn._api.weights import attention_weights
from polyattn._core.call.options import OPTIONS
from polyattn.integrations import subclasses
from polyattn.plugin import Kernel

__all__ = ["register"]
__dir__ = __all__.copy

#: Options of some models that would change the result and are not supported.
REFUSED = {
    "cache": "a paged cache, as of continuous batching",
    "head_mask": "a head_mask",
    "sinks": "sinks that differ from row to row",
}


def register(
    name: str = "polyattn",
    *,
    backend: str | Sequence[str] | None = None,
    kernel: str | Sequence[str] | Kernel | None = None,
) -> None:
    """Make ``attn_implementation=name`` work in transformers.

    A second call with the same name replaces the first, also in existing models.

    Parameters
    ----------
    name : str
        A name of letters, digits and underscores that does not contain one of transformers' own.
    backend : str or sequence of str, optional
        As for `polyattn.attention`.
    kernel : str, sequence of str or polyattn.plugin.Kernel, optional
        As for `polyattn.attention`.

    Raises
    ------
    TypeError
        If an argument has the wrong type.
    ValueError
        If the name has a meaning in transformers.
    UnknownBackendError
        If no plugin provides a backend.

    See Also
    --------
    polyattn.attention : The function that the models call.

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
    # transformers searches names for these words.
    if not re.fullmatch(r"\w+", name) or re.search("eager|sdpa|flash|flex_attention", name):
        raise ValueError(
            "name must consist of letters, digits and underscores, such as 'polyattn_tiled', and"
            f" contain none of transformers' own names; got {name!r}"
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
    """Return which keys each row sees, (batch, 1, L, S), or None for a purely causal mask."""
    if config is not None and not torch.compiler.is_compiling():
        _check_reachable(config.model_type)
    # If all rows see the same keys, make one row and repeat it without a copy.
    one_row = mask_function is bidirectional_mask_function
    mask: torch.Tensor | None = sdpa_mask(
        batch_size, 1 if one_row else q_length, kv_length, q_offset, kv_offset,
        mask_function, attention_mask, **options,
    )  # fmt: skip
    return mask.expand(-1, -1, q_length, -1) if one_row and mask is not None else mask


@cache
def _check_reachable(model_type: str) -> None:
    """Refuse models that ask for our masks but compute attention themselves."""
    models = [
        model
        for model in subclasses(PreTrainedModel)
        if getattr(model.config_class, "model_type", None) == model_type
    ]
    if models and not any(model._can_set_attn_implementation() for model in models):
        raise NotImplementedError(
            f"{model_type} models compute attention by themselves, not through transformers'"
            " AttentionInterface, so polyattn is never called; use attn_implementation='eager'"
        )


def _narrowed(mask: torch.Tensor) -> torch.Tensor:
    """Return a view of length 1 along the axes on which a mask only repeats."""
    for axis in range(mask.ndim):
        if mask.stride(axis) == 0 and mask.shape[axis] > 1:
            mask = mask.narrow(axis, 0, 1)
    return mask


# ---- attention ---------------------------------------------------------------------------------


def _attend(
    backend: str | Sequence[str] | None,
    kernel: str | Sequence[str] | Kernel | None,
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
    """Return the output, (batch, L, H, E), and the weights if requested."""
    _check_others(module, attention_mask, others)
    _check_not_packed(module, attention_mask, others.get("cu_seq_lens_q"))
    options: dict[str, Any] = {"scale": scaling, "softcap": softcap, "sinks": s_aux}
    options |= _visibility(module, query, key, attention_mask, is_causal, sliding_window)
    if position_bias is not None:
        options["bias"] = position_bias + options.get("bias", 0)
    if dropout > 0 and module.training:
        seed = torch.randint(2**62, (), device=query.device)
        options["dropout"] = (dropout, seed)
    output = attention(query, key, value, backend=backend, kernel=kernel, **options)
    weights: Any = None
    if output_attentions:
        weights = attention_weights(query, key, backend=backend, **options)
        weights = weights.to(output.dtype)
    return output.transpose(1, 2).contiguous(), weights


def _visibility(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool | None,
    sliding_window: int | None,
) -> dict[str, Any]:
    """Return which keys each row sees, as options of `attention`."""
    if mask is not None:  # it includes causality and the window
        return {"mask" if mask.dtype == torch.bool else "bias": _narrowed(mask)}
    length, keys = query.shape[-2], key.shape[-2]
    options: dict[str, Any] = {}
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    if is_causal:
        options["is_causal"] = True
        # These are the first tokens in a cache of fixed size, whose end is still empty.
        if 1 < length < keys:
            options["query_offset"] = 0
    if sliding_window is not None and sliding_window < keys:
        if not is_causal:
            raise ValueError(
                f"{type(module).__name__} asks for a sliding window of {sliding_window} among"
                f" {keys} keys, is not causal and has no mask, so it is unclear which keys a row"
                " sees. Give it the mask of create_bidirectional_sliding_window_mask"
            )
        options["window"] = (sliding_window - 1, 0)
    return options


def _check_others(
    module: torch.nn.Module, mask: torch.Tensor | None, others: dict[str, Any]
) -> None:
    """Refuse unsupported arguments that would change the result."""
    name = type(module).__name__
    tensor = isinstance(mask, torch.Tensor)
    if mask is not None and (not tensor or mask.ndim != 4 or "int" in str(mask.dtype)):
        got = f"of shape {tuple(mask.shape)} and {mask.dtype}" if tensor else repr(mask)
        raise ValueError(
            f"{name} passes polyattn an attention mask {got}; it must be a tensor of bool, or of"
            " numbers to add, that broadcasts to the four axes (batch, heads, L, S)"
        )
    for option, what in REFUSED.items():
        if others.get(option) is not None:
            raise NotImplementedError(
                f"{name} passes polyattn {what} ({option}=), which is not supported; use"
                " attn_implementation='eager'"
            )
    for option in OPTIONS.keys() & others.keys():
        if others[option] is not OPTIONS[option].default:
            raise NotImplementedError(
                f"{name} passes polyattn {option}=, which transformers does not have under this"
                " name; use attn_implementation='eager'"
            )


def _check_not_packed(
    module: torch.nn.Module, mask: torch.Tensor | None, packed: torch.Tensor | None
) -> None:
    """Refuse sequences packed into one that nothing separates."""
    if mask is None and packed is not None and len(packed) > 2:
        raise NotImplementedError(
            f"{type(module).__name__} passes polyattn {len(packed) - 1} sequences packed into one"
            " by cu_seq_lens_q=, without a mask that separates them; give the model position_ids"
            " that restart with each sequence"
        )
