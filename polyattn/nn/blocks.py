"""Define blocks: attention and feed-forward layers with residual connections and norms.

With ``pre_norm`` the norm precedes each part (GPT-2, Llama, ViT); otherwise it follows the sum (the
original Transformer, BERT).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from polyattn._base.arrays import Array
from polyattn.nn.attention import Cache, MultiHeadAttention
from polyattn.nn.layers import FeedForward, LayerNorm, Norm, initializer
from polyattn.nn.module import Initializer, Module

#: Arguments of `EncoderBlock.init` that are not those of its attention.
_OF_BLOCKS = ("inner", "activation", "gated", "norm", "pre_norm")
#: What `attention_weights` takes to select a part.
_SELECTIONS = ("heads", "rows", "top", "per_key")


@dataclass(frozen=True, eq=False, repr=False)
class EncoderBlock(Module):
    """Self-attention, then feed-forward.

    A decoder without an encoder consists of these too, made with ``is_causal=True``.

    Attributes
    ----------
    attention : MultiHeadAttention
        Self-attention.
    feed_forward : FeedForward
        Applied to each token.
    attention_norm, feed_forward_norm : LayerNorm, RMSNorm or None
        The norm of each part.
    pre_norm : bool
        Whether a norm precedes its part rather than following the sum.
    attention_output_norm, feed_forward_output_norm : LayerNorm, RMSNorm or None
        Norms of what the parts add to the sum, as in Gemma 2 and OLMo 2.
    """

    attention: MultiHeadAttention
    feed_forward: FeedForward
    attention_norm: Norm | None
    feed_forward_norm: Norm | None
    pre_norm: bool = True
    attention_output_norm: Norm | None = None
    feed_forward_output_norm: Norm | None = None

    @classmethod
    def init(
        cls,
        size: int,
        heads: int,
        *,
        like: Array,
        seed: int | Initializer = 0,
        inner: int | None = None,
        activation: str = "gelu",
        gated: bool = False,
        bias: bool = True,
        norm: type[Norm] = LayerNorm,
        pre_norm: bool = True,
        **attention: Any,
    ) -> EncoderBlock:
        """Create a block with Glorot's uniform weights.

        Parameters
        ----------
        size, heads, like, seed, bias
            As for `MultiHeadAttention.init`.
        inner, activation, gated
            As for `FeedForward.init`.
        norm : {LayerNorm, RMSNorm}
            The class of the norms.
        pre_norm : bool
            Whether a norm precedes its part rather than following the sum.
        **attention : Any
            Further arguments of `MultiHeadAttention.init`.

        Examples
        --------
        >>> import numpy as np
        >>> from polyattn import nn
        >>> x = np.ones((2, 5, 64), dtype=np.float32)
        >>> nn.EncoderBlock.init(64, 8, like=x)(x).shape
        (2, 5, 64)
        """
        shared: dict[str, Any] = {"like": like, "seed": initializer(like, seed), "bias": bias}
        return cls(
            MultiHeadAttention.init(size, heads, **shared, **attention),
            FeedForward.init(size, inner, activation=activation, gated=gated, **shared),
            norm.init(size, like=like),
            norm.init(size, like=like),
            pre_norm,
        )

    def __call__(self, x: Array, *, cache: Cache | None = None, **options: Any) -> Any:
        """Map tokens (..., L, size) to the same shape; options as for `MultiHeadAttention`.

        With a cache, return the pair of tokens and the next cache.
        """
        norms = self.attention_norm, self.pre_norm, self.attention_output_norm
        x, cache = _add(x, self.attention, *norms, cache=cache, **options)
        norms = self.feed_forward_norm, self.pre_norm, self.feed_forward_output_norm
        x, _ = _add(x, self.feed_forward, *norms)
        return x if cache is None else (x, cache)


@dataclass(frozen=True, eq=False, repr=False)
class DecoderBlock(Module):
    """Self-attention, attention to an encoder's tokens, then feed-forward.

    Attributes
    ----------
    attention, cross_attention : MultiHeadAttention
        Self-attention, causal if its ``is_causal`` is True, and attention to the encoder's tokens.
    feed_forward : FeedForward
        Applied to each token.
    attention_norm, cross_attention_norm, feed_forward_norm : LayerNorm or RMSNorm
        The norm of each part.
    pre_norm : bool
        Whether a norm precedes its part rather than following the sum.
    """

    attention: MultiHeadAttention
    cross_attention: MultiHeadAttention
    feed_forward: FeedForward
    attention_norm: Norm
    cross_attention_norm: Norm
    feed_forward_norm: Norm
    pre_norm: bool = True

    @classmethod
    def init(
        cls,
        size: int,
        heads: int,
        *,
        like: Array,
        seed: int | Initializer = 0,
        context_size: int | None = None,
        **options: Any,
    ) -> DecoderBlock:
        """Create a block with Glorot's uniform weights.

        Parameters
        ----------
        size, heads, like, seed, **options
            As for `EncoderBlock.init`; ``rotary`` and ``is_causal``, which is True by default, are
            of the self-attention only.
        context_size : int, optional
            Size of the encoder's tokens, `size` by default.

        Examples
        --------
        >>> import numpy as np
        >>> from polyattn import nn
        >>> x, context = np.ones((2, 5, 64)), np.ones((2, 9, 64))
        >>> nn.DecoderBlock.init(64, 8, like=x)(x, context).shape
        (2, 5, 64)
        """
        shared: dict[str, Any] = {"like": like, "seed": initializer(like, seed)}
        block = EncoderBlock.init(size, heads, **shared, **{"is_causal": True} | options)
        cross = {name: value for name, value in options.items() if name not in _OF_BLOCKS}
        cross |= {"context_size": context_size, "rotary": None, "is_causal": False}
        attention = MultiHeadAttention.init(size, heads, **shared, **cross)
        norm = partial(options.get("norm", LayerNorm).init, size, like=like)
        layers = block.attention, attention, block.feed_forward
        return cls(*layers, norm(), norm(), norm(), block.pre_norm)

    def __call__(
        self,
        x: Array,
        context: Array,
        *,
        cache: Cache | None = None,
        context_mask: Any = None,
        **options: Any,
    ) -> Any:
        """Map tokens (..., L, size) to the same shape; options as for `MultiHeadAttention`.

        `context` are the encoder's tokens, shape (..., S, context_size), and `context_mask` says
        which of them take part, as ``mask=`` of `polyattn.attention`. ``backend`` and ``kernel``
        apply to the cross-attention too. With a cache, return the pair of tokens and the next
        cache.
        """
        norms = self.attention_norm, self.pre_norm
        x, cache = _add(x, self.attention, *norms, cache=cache, **options)
        cross = {"context": context, "mask": context_mask}
        cross |= {name: options[name] for name in ("backend", "kernel") if name in options}
        x, _ = _add(x, self.cross_attention, self.cross_attention_norm, self.pre_norm, **cross)
        x, _ = _add(x, self.feed_forward, self.feed_forward_norm, self.pre_norm)
        return x if cache is None else (x, cache)


@dataclass(frozen=True, eq=False, repr=False)
class Stack(Module):
    """A sequence of blocks, and a final norm.

    Attributes
    ----------
    blocks : tuple of EncoderBlock or DecoderBlock
        The blocks.
    norm : LayerNorm, RMSNorm or None
        The final norm, for blocks with ``pre_norm``.
    """

    blocks: tuple[EncoderBlock | DecoderBlock, ...]
    norm: Norm | None = None

    def __post_init__(self) -> None:
        # A module does not look for parameters in a list.
        object.__setattr__(self, "blocks", tuple(self.blocks))

    def __call__(
        self,
        x: Array,
        *context: Array,
        caches: tuple[Cache, ...] | None = None,
        **options: Any,
    ) -> Any:
        """Map tokens (..., L, size) to the same shape; context and options go to every block.

        With `caches`, one for each block, return the pair of tokens and the next caches.
        """
        if "cache" in options:
            raise TypeError("each block has its own cache: pass all of them as caches=")
        if caches is not None and len(caches) != len(self.blocks):
            raise ValueError(
                f"each of the {len(self.blocks)} blocks has a cache; got {len(caches)} caches"
            )
        following = []
        for number, block in enumerate(self.blocks):
            if caches is None:
                x = block(x, *context, **options)
            else:
                x, cache = block(x, *context, cache=caches[number], **options)
                following.append(cache)
        x = x if self.norm is None else self.norm(x)
        return x if caches is None else (x, tuple(following))


def weights_of(stack: Stack, x: Array, *context: Array, **options: Any) -> list[Any]:
    """Return the weights of the self-attention of each block; arguments as for the stack."""
    selected = {name: options.pop(name) for name in _SELECTIONS if name in options}
    weights = []
    for block in stack.blocks:
        own = options | selected
        own.pop("context_mask", None)
        before = _before(x, block.attention_norm, block.pre_norm)
        weights.append(block.attention.weights(before, **own))
        x = block(x, *context, **options)
    return weights


def _add(
    x: Array,
    part: Callable[..., Any],
    norm: Norm | None,
    pre_norm: bool,
    output_norm: Norm | None = None,
    /,
    **options: Any,
) -> tuple[Array, Cache | None]:
    """Add a part to its input, with the norms, and return the next cache if the part has one."""
    y = part(_before(x, norm, pre_norm), **options)
    y, cache = y if isinstance(y, tuple) else (y, None)
    x = x + (y if output_norm is None else output_norm(y))
    return (x if norm is None or pre_norm else norm(x)), cache


def _before(x: Array, norm: Norm | None, pre_norm: bool) -> Array:
    """Return what a part gets."""
    return norm(x) if norm is not None and pre_norm else x
