"""Load layers of torch.nn, whose sizes follow from their weights."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from polyattn._base.arguments import check_int, few, short
from polyattn._base.arrays import Array
from polyattn.nn.attention import MultiHeadAttention
from polyattn.nn.blocks import EncoderBlock
from polyattn.nn.layers import FeedForward, Linear
from polyattn.nn.load.settings import check_number
from polyattn.nn.load.stored import (
    Stored,
    fill,
    layer_norm,
    linear,
    some_rows,
    transposed,
    vector,
    without_prefix,
)


def torch_attention(
    weights: Mapping[str, Array], heads: int, *, like: Array, prefix: str = ""
) -> MultiHeadAttention:
    """Load a torch.nn.MultiheadAttention.

    A layer with ``add_zero_attn`` must not be loaded: its weights do not show that option.

    Parameters
    ----------
    weights : mapping of str to Array
        The state dict.
    heads : int
        The layer's ``num_heads``.
    like : Array
        An array of the library, device and dtype of the parameters.
    prefix : str
        The beginning of the layer's names, if `weights` are those of a larger model.

    Returns
    -------
    MultiHeadAttention
        The layer; batch axes come first whatever ``batch_first`` was. It takes torch's query, key
        and value, in this order, and ``is_causal=`` in a call, as torch's does.

    Raises
    ------
    ValueError
        If names or shapes do not fit, or the layer has ``bias_k`` and ``bias_v``.

    Examples
    --------
    >>> import numpy as np
    >>> from polyattn import nn
    >>> weights = {
    ...     "in_proj_weight": np.ones((48, 16)),
    ...     "in_proj_bias": np.zeros(48),
    ...     "out_proj.weight": np.ones((16, 16)),
    ...     "out_proj.bias": np.zeros(16),
    ... }
    >>> x = np.ones((2, 5, 16), dtype=np.float32)
    >>> nn.load.torch_attention(weights, 4, like=x)(x).shape
    (2, 5, 16)
    """
    arrays = without_prefix(weights, prefix)
    layer = _torch_attention(arrays, heads)
    return fill(layer, arrays, like=like, origin="a torch.nn.MultiheadAttention")


def torch_encoder_layer(
    weights: Mapping[str, Array],
    heads: int,
    *,
    like: Array,
    activation: str = "relu",
    norm_first: bool = False,
    epsilon: float = 1e-5,
    prefix: str = "",
) -> EncoderBlock:
    """Load a torch.nn.TransformerEncoderLayer.

    Parameters
    ----------
    weights, heads, like : mapping, int, Array
        As for `torch_attention`.
    activation : {"relu", "gelu", "gelu_tanh", "silu"}
        The layer's activation.
    norm_first : bool
        The layer's ``norm_first``.
    epsilon : float
        The layer's ``layer_norm_eps``.
    prefix : str
        As for `torch_attention`, such as ``"layers.0."`` in a torch.nn.TransformerEncoder.

    Returns
    -------
    EncoderBlock
        The block, without dropout.

    Raises
    ------
    ValueError
        If names or shapes do not fit.
    """
    epsilon = check_number("epsilon", epsilon, zero=True)
    arrays = without_prefix(weights, prefix)
    attention = _torch_attention(arrays, heads, "self_attn.")
    inner, size = _shape_of(arrays, "linear1.weight")
    bias = "linear1.bias" in arrays
    block = EncoderBlock(
        attention,
        FeedForward(
            linear("linear1", size, inner, bias),
            linear("linear2", inner, size, bias),
            activation=activation,
        ),
        layer_norm("norm1", size, epsilon, bias),
        layer_norm("norm2", size, epsilon, bias),
        norm_first,
    )
    return fill(block, arrays, like=like, origin="a torch.nn.TransformerEncoderLayer")


def _torch_attention(
    weights: Mapping[str, Array], heads: int, prefix: str = ""
) -> MultiHeadAttention:
    extra = [name for name in ("bias_k", "bias_v") if prefix + name in weights]
    if extra:
        raise ValueError(
            f"a layer with {' and '.join(extra)}, of add_bias_kv=True, cannot be loaded:"
            " MultiHeadAttention does not support them"
        )
    names = [f"{prefix}{name}_proj_weight" for name in ("in", "q", "k", "v")]
    in_proj, *separate = names
    fused = separate[0] not in weights
    size = _shape_of(weights, f"{prefix}out_proj.weight", in_proj if fused else separate[0])[1]
    if check_int("heads", heads) < 1 or size % heads:
        raise ValueError(f"{heads} heads do not divide the layer's size of {size}")
    rest: dict[str, Any] = {"heads": heads, "key_heads": heads, "head_size": size // heads}
    rest["is_causal"] = False  # in torch the calls say it
    rest["output"] = linear(f"{prefix}out_proj", size, size, f"{prefix}out_proj.bias" in weights)
    bias = f"{prefix}in_proj_bias"
    if fused:
        stored = Stored((size, 3 * size), {in_proj: (3 * size, size)}, transposed)
        linear_map = Linear(stored, vector(bias, 3 * size) if bias in weights else None)
        return MultiHeadAttention(None, None, None, fused=linear_map, **rest)
    kdim, vdim = (_shape_of(weights, name)[1] for name in separate[1:])
    maps: list[Any] = []
    for number, (name, inputs) in enumerate(zip(separate, (size, kdim, vdim), strict=True)):
        weight = Stored((inputs, size), {name: (size, inputs)}, transposed)
        rows = slice(number * size, (number + 1) * size)
        third = Stored((size,), {bias: (3 * size,)}, partial(some_rows, rows))
        maps.append(Linear(weight, third if bias in weights else None))
    return MultiHeadAttention(*maps, **rest)


def _shape_of(weights: Mapping[str, Array], *names: str) -> tuple[int, ...]:
    """Return the shape of the first matrix that exists, which determines the other shapes."""
    for name in names:
        if name in weights and len(weights[name].shape) == 2:
            return tuple(weights[name].shape)
    have = (f"{short(name)} {tuple(array.shape)}" for name, array in weights.items())
    raise ValueError(
        f"weights have no {names[0]} of 2 axes, which determines the layer's sizes; they have"
        f" {few(have, len(weights))}"
    )
