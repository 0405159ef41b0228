"""Layers of torch.nn and Keras, whose weights tell all sizes but the number of torch's heads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from polyattn.arguments import check_int
from polyattn.arrays import Array
from polyattn.nn.attention import MultiHeadAttention
from polyattn.nn.blocks import EncoderBlock
from polyattn.nn.layers import FeedForward, Linear
from polyattn.nn.load.settings import check_number
from polyattn.nn.load.stored import Stored, fill, layer_norm, linear, turned, vector, within

__all__ = ["keras_attention", "torch_attention", "torch_encoder_layer"]


def torch_attention(
    weights: Mapping[str, Array], heads: int, *, like: Array, prefix: str = ""
) -> MultiHeadAttention:
    """Make a layer of the weights of a torch.nn.MultiheadAttention.

    Parameters
    ----------
    weights : mapping of str to Array
        Its state dict.
    heads : int
        Its ``num_heads``.
    like : Array
        An array of the library, device and dtype that the parameters are to have.
    prefix : str
        What its names begin with, where `weights` are a larger model's.

    Returns
    -------
    MultiHeadAttention
        The layer, with batch axes first whatever ``batch_first`` was. Where ``kdim`` and ``vdim``
        differ, its context is what torch calls key and value, side by side in the last axis.

    Raises
    ------
    ValueError
        If names or shapes do not fit, all of which are listed, or the layer has ``bias_k`` and
        ``bias_v``. What ``add_zero_attn`` adds leaves no trace in the weights: such a layer cannot
        be told from one without, and must not be loaded.

    See Also
    --------
    torch_encoder_layer : The layer around it.

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
    own = within(weights, prefix)
    layer = _torch_attention(own, heads)
    return fill(layer, own, like=like, origin="a torch.nn.MultiheadAttention")


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
    """Make a block of the weights of a torch.nn.TransformerEncoderLayer.

    Parameters
    ----------
    weights : mapping of str to Array
        Its state dict.
    heads : int
        Its ``nhead``.
    like : Array
        An array of the library, device and dtype that the parameters are to have.
    activation : {"relu", "gelu", "gelu_tanh", "silu"}
        Its activation, "relu" by default as torch's.
    norm_first : bool
        Its ``norm_first``, which the weights do not tell either.
    epsilon : float
        Its ``layer_norm_eps``.
    prefix : str
        What its names begin with, such as ``"layers.0."`` in a torch.nn.TransformerEncoder.

    Returns
    -------
    EncoderBlock
        The block, without dropout.

    Raises
    ------
    ValueError
        If names or shapes do not fit, all of which are listed.

    See Also
    --------
    torch_attention : The attention in it.
    """
    epsilon = check_number("epsilon", epsilon, zero=True)
    own = within(weights, prefix)
    attention = _torch_attention(own, heads, "self_attn.")
    inner, size = _lengths(own, 2, "linear1.weight")
    bias = "linear1.bias" in own
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
    return fill(block, own, like=like, origin="a torch.nn.TransformerEncoderLayer")


def _torch_attention(
    weights: Mapping[str, Array], heads: int, prefix: str = ""
) -> MultiHeadAttention:
    extra = [name for name in ("bias_k", "bias_v") if prefix + name in weights]
    if extra:
        raise ValueError(
            f"{' and '.join(extra)}, of add_bias_kv=True, have no place in MultiHeadAttention:"
            " only a layer without can be loaded"
        )
    names = [f"{prefix}{name}_proj_weight" for name in ("in", "q", "k", "v")]
    in_proj, *separate = names
    together = separate[0] not in weights
    anchor = in_proj if together else separate[0]
    size = _lengths(weights, 2, f"{prefix}out_proj.weight", anchor)[1]
    if check_int("heads", heads) < 1 or size % heads:
        raise ValueError(f"{heads} heads do not divide the layer's size of {size}")
    rest: dict[str, Any] = {"heads": heads, "key_heads": heads, "head_size": size // heads}
    rest["output"] = linear(f"{prefix}out_proj", size, size, f"{prefix}out_proj.bias" in weights)
    bias = f"{prefix}in_proj_bias"
    if together:
        stored = Stored((size, 3 * size), {in_proj: (3 * size, size)}, turned)
        one = Linear(stored, vector(bias, 3 * size) if bias in weights else None)
        return MultiHeadAttention(None, None, None, fused=one, **rest)
    kdim, vdim = (_lengths(weights, 2, name)[1] for name in separate[1:])
    three = []
    for number, (name, inputs, gap) in enumerate(
        zip(separate, (size, kdim, vdim), _gaps(kdim, vdim), strict=True)
    ):
        weight = Stored((inputs, size), {name: (size, inputs)}, turned)
        third = Stored((size,), {bias: (3 * size,)}, partial(_third, number))
        three.append(Linear(_between_zeros(weight, gap), third if bias in weights else None))
    query, key, value = three
    return MultiHeadAttention(query, key, value, **rest)


def _third(number: int, xp: Any, array: Array) -> Array:
    size = array.shape[0] // 3
    return array[number * size : (number + 1) * size]


def _lengths(weights: Mapping[str, Array], rank: int, *names: str) -> tuple[int, ...]:
    """Return the shape of the first array that is there: what others must be is told by it."""
    for name in names:
        if name in weights and len(weights[name].shape) == rank:
            return tuple(weights[name].shape)
    raise ValueError(
        f"weights have no {names[0]} of {rank} axes, which tells the layer's sizes; they have"
        f" {', '.join(f'{name} {tuple(array.shape)}' for name, array in weights.items())}"
    )


# ---- keys and values of different tokens -------------------------------------------------------


def _gaps(keys: int, values: int) -> tuple[tuple[int, int], ...]:
    """Return how many rows of 0 go before and after the weights of query, key and value.

    A layer has one context: where keys and values are made of tokens of two sizes, it is both side
    by side, and each map is blind to the other's part.
    """
    return ((0, 0), (0, 0), (0, 0)) if keys == values else ((0, 0), (0, values), (keys, 0))


def _between_zeros(weight: Stored, gap: tuple[int, int]) -> Stored:
    if gap == (0, 0):
        return weight

    def make(xp: Any, array: Array) -> Array:
        matrix = weight.make(xp, array)
        row = xp.zeros_like(matrix[:1])
        before, after = (xp.broadcast_to(row, (n, row.shape[1])) for n in gap)
        return xp.concat((before, matrix, after), axis=0)

    return Stored((sum(gap) + weight.shape[0], weight.shape[1]), weight.sources, make)


# ---- Keras -------------------------------------------------------------------------------------

# In the order of get_weights().
KERAS = ("query", "key", "value", "attention_output")


def keras_attention(
    weights: Mapping[str, Array] | Sequence[Array], *, like: Array, prefix: str = ""
) -> MultiHeadAttention:
    """Make a layer of the weights of a keras.layers.MultiHeadAttention.

    Parameters
    ----------
    weights : sequence of Array, or mapping of str to Array
        What its ``get_weights()`` returns, or arrays by the paths of its variables:
        ``query/kernel``, ``query/bias``, and so on for ``key``, ``value`` and
        ``attention_output``. They tell the number of heads, ``key_dim``, ``value_dim`` and
        ``use_bias``.
    like : Array
        An array of the library, device and dtype that the parameters are to have.
    prefix : str
        What its names begin with, such as ``"multi_head_attention/"``.

    Returns
    -------
    MultiHeadAttention
        The layer. Where keys and values were made of different tokens, its context is both, side
        by side in the last axis. For what Keras does by ``use_causal_mask``, which lines up the
        first tokens of two sequences, call it with ``is_causal=True, query_offset=0``.

    Raises
    ------
    ValueError
        If names or shapes do not fit, all of which are listed, or the layer has a gate.

    See Also
    --------
    torch_attention : The same of torch's layer.

    Examples
    --------
    >>> import numpy as np
    >>> from polyattn import nn
    >>> kernel, output = np.ones((16, 4, 8)), np.ones((4, 8, 16))
    >>> x = np.ones((2, 5, 16), dtype=np.float32)
    >>> nn.load.keras_attention([kernel, kernel, kernel, output], like=x)(x).shape
    (2, 5, 16)
    """
    named = weights if isinstance(weights, Mapping) else _keras_names(weights)
    own = within(named, prefix)
    if any(name.startswith("gate/") for name in own):
        raise ValueError("a gate, of use_gate=True, has no place in MultiHeadAttention")
    size, heads, head_size = _lengths(own, 3, "query/kernel")
    (kdim, *_), (vdim, _, value_size) = (
        _lengths(own, 3, f"{name}/kernel") for name in ("key", "value")
    )
    outputs = _lengths(own, 3, "attention_output/kernel")[2]
    query, key, value = [
        _keras_map(own, name, inputs, (heads, width), gap)
        for name, inputs, width, gap in zip(
            KERAS,
            (size, kdim, vdim),
            (head_size, head_size, value_size),
            _gaps(kdim, vdim),
            strict=False,
        )
    ]
    kernel, bias = (f"attention_output/{part}" for part in ("kernel", "bias"))
    width = heads * value_size
    output = Linear(
        Stored((width, outputs), {kernel: (heads, value_size, outputs)}, _flat((width, outputs))),
        vector(bias, outputs) if "query/bias" in own else None,
    )
    layer = MultiHeadAttention(query, key, value, output, heads, heads, head_size)
    return fill(layer, own, like=like, origin="a keras.layers.MultiHeadAttention")


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
    weights: Mapping[str, Array],
    name: str,
    inputs: int,
    heads: tuple[int, int],
    gap: tuple[int, int],
) -> Linear:
    """Return the map of which Keras keeps the outputs apart by heads."""
    width = heads[0] * heads[1]
    kernel = Stored((inputs, width), {f"{name}/kernel": (inputs, *heads)}, _flat((inputs, width)))
    bias = Stored((width,), {f"{name}/bias": heads}, _flat((width,)))
    return Linear(_between_zeros(kernel, gap), bias if "query/bias" in weights else None)


def _flat(shape: tuple[int, ...]) -> Callable[..., Array]:
    return lambda xp, array: xp.reshape(array, shape)
