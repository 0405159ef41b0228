"""Load layers of torch.nn and Keras, whose sizes follow from their weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from polyattn._base.arguments import check_int, few, short
from polyattn._base.arrays import Array
from polyattn.nn.attention import MultiHeadAttention
from polyattn.nn.blocks import EncoderBlock
from polyattn.nn.layers import FeedForward, Linear
from polyattn.nn.load.settings import Settings, check_number
from polyattn.nn.load.stored import (
    Stored,
    fill,
    layer_norm,
    linear,
    reshaped,
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
    inner, size = _shape_of(arrays, 2, "linear1.weight")
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
    size = _shape_of(weights, 2, f"{prefix}out_proj.weight", in_proj if fused else separate[0])[1]
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
    kdim, vdim = (_shape_of(weights, 2, name)[1] for name in separate[1:])
    maps: list[Any] = []
    for number, (name, inputs) in enumerate(zip(separate, (size, kdim, vdim), strict=True)):
        weight = Stored((inputs, size), {name: (size, inputs)}, transposed)
        rows = slice(number * size, (number + 1) * size)
        third = Stored((size,), {bias: (3 * size,)}, partial(some_rows, rows))
        maps.append(Linear(weight, third if bias in weights else None))
    return MultiHeadAttention(*maps, **rest)


def _shape_of(weights: Mapping[str, Array], rank: int, *names: str) -> tuple[int, ...]:
    """Return the shape of the first array that exists, which determines the other shapes."""
    for name in names:
        if name in weights and len(weights[name].shape) == rank:
            return tuple(weights[name].shape)
    have = (f"{short(name)} {tuple(array.shape)}" for name, array in weights.items())
    raise ValueError(
        f"weights have no {names[0]} of {rank} axes, which determines the layer's sizes; they have"
        f" {few(have, len(weights))}"
    )


# ---- Keras -------------------------------------------------------------------------------------

# In the order of get_weights().
KERAS = ("query", "key", "value", "attention_output")


def keras_attention(
    weights: Sequence[Array], config: Mapping[str, Any] | None = None, *, like: Array
) -> MultiHeadAttention:
    """Load a keras.layers.MultiHeadAttention.

    The weights do not show a layer's ``sliding_window`` and ``attention_axes``: a layer that has
    one of them must not be loaded without its config.

    Parameters
    ----------
    weights : sequence of Array
        The result of ``get_weights()``.
    config : mapping, optional
        The result of ``get_config()``.
    like : Array
        As for `torch_attention`.

    Returns
    -------
    MultiHeadAttention
        The layer. It takes Keras's query, key and value, in this order. Keras's
        ``use_causal_mask`` and ``sliding_window`` align the first tokens of two sequences: if their
        lengths differ, pass ``query_offset=0``.

    Raises
    ------
    ValueError
        If names or shapes do not fit, or the layer has a gate or attention axes.

    Examples
    --------
    >>> import numpy as np
    >>> from polyattn import nn
    >>> kernel, output = np.ones((16, 4, 8)), np.ones((4, 8, 16))
    >>> x = np.ones((2, 5, 16), dtype=np.float32)
    >>> nn.load.keras_attention([kernel, kernel, kernel, output], like=x)(x).shape
    (2, 5, 16)
    """
    window = _keras_window(config or {})
    arrays = _keras_names(weights)
    shapes = [_shape_of(arrays, 3, f"{name}/kernel") for name in KERAS]
    (_, heads, head_size), _, (_, _, value_size), (*_, outputs) = shapes
    query, key, value = (
        _keras_map(arrays, name, inputs, (heads, width))
        for name, (inputs, *_), width in zip(
            KERAS, shapes, (head_size, head_size, value_size), strict=False
        )
    )
    kernel, bias = (f"attention_output/{part}" for part in ("kernel", "bias"))
    output = Linear(
        reshaped(kernel, (heads, value_size, outputs), (heads * value_size, outputs)),
        vector(bias, outputs) if "query/bias" in arrays else None,
    )
    maps = (query, key, value, output)
    layer = MultiHeadAttention(*maps, heads, heads, head_size, is_causal=False, window=window)
    return fill(layer, arrays, like=like, origin="a keras.layers.MultiHeadAttention")


def _keras_window(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the window of a layer's config, and refuse what no layer here has."""
    settings = Settings(config)
    # A layer that was built for tokens (batch, L, size) says 1, and attends along that axis.
    if config.get("attention_axes") not in (1, (1,), [1]):
        settings.only("attention_axes", None)
    if "sliding_window" not in settings:
        return None
    width = settings.whole("sliding_window") - 1
    return width, width


def _keras_names(arrays: Sequence[Array]) -> dict[str, Array]:
    parts = {8: ("kernel", "bias"), 4: ("kernel",)}.get(len(arrays))
    if parts is None:
        raise ValueError(
            "a keras.layers.MultiHeadAttention without a gate has 8 weights, or 4 without biases;"
            f" got {len(arrays)}"
        )
    names = [f"{name}/{part}" for name in KERAS for part in parts]
    return dict(zip(names, arrays, strict=True))


def _keras_map(
    weights: Mapping[str, Array], name: str, inputs: int, heads: tuple[int, int]
) -> Linear:
    """Return a map whose outputs have an axis for the heads in Keras."""
    width = heads[0] * heads[1]
    kernel = reshaped(f"{name}/kernel", (inputs, *heads), (inputs, width))
    bias = reshaped(f"{name}/bias", heads, (width,)) if "query/bias" in weights else None
    return Linear(kernel, bias)
