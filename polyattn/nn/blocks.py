"""Blocks: attention and feed-forward, each with a residual connection and a normalisation.

With ``pre_norm`` the normalisation stands before each part (GPT-2, Llama, ViT), otherwise after the
sum (the original Transformer, BERT).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from polyattn.arrays import Array
from polyattn.nn.attention import MultiHeadAttention
from polyattn.nn.cache import KVCache
from polyattn.nn.layers import FeedForward, LayerNorm, Norm, draws
from polyattn.nn.module import Draws, Module

__all__ = ["DecoderBlock", "EncoderBlock", "Stack"]


@dataclass(frozen=True, eq=False, repr=False)
class EncoderBlock(Module):
    """Self-attention, then feed-forward.

    A decoder without an encoder is made of these too, called with ``is_causal=True``.

    Attributes
    ----------
    attention : MultiHeadAttention
        Of the tokens to one another.
    feed_forward : FeedForward
        For each token.
    attention_norm, feed_forward_norm : LayerNorm or RMSNorm
        The normalisation of each.
    pre_norm : bool
        Whether it comes before its part rather than after the sum.
    """

    attention: MultiHeadAttention
    feed_forward: FeedForward
    attention_norm: Norm
    feed_forward_norm: Norm
    pre_norm: bool = True

    @classmethod
    def init(
        cls,
        size: int,
        heads: int,
        *,
        like: Array,
        seed: int | Draws = 0,
        inner: int | None = None,
        activation: str = "gelu",
        gated: bool = False,
        bias: bool = True,
        norm: type[Norm] = LayerNorm,
        pre_norm: bool = True,
        **attention: Any,
    ) -> EncoderBlock:
        """Begin with Glorot's uniform weights.

        Parameters
        ----------
        size, heads, like, seed
            As of `MultiHeadAttention.init`.
        inner, activation, gated
            As of `FeedForward.init`.
        bias : bool
            Whether maps have biases.
        norm : {LayerNorm, RMSNorm}
            The kind of normalisation.
        pre_norm : bool
            Whether it comes before each part.
        **attention : Any
            What else `MultiHeadAttention.init` takes.

        Returns
        -------
        EncoderBlock
            The block.

        Examples
        --------
        >>> import numpy as np
        >>> from polyattn import nn
        >>> x = np.ones((2, 5, 64), dtype=np.float32)
        >>> nn.EncoderBlock.init(64, 8, like=x)(x, is_causal=True).shape
        (2, 5, 64)
        """
        draw = draws(like, seed)
        shape: dict[str, Any] = {"activation": activation, "gated": gated, "bias": bias}
        return cls(
            MultiHeadAttention.init(size, heads, like=like, seed=draw, bias=bias, **attention),
            FeedForward.init(size, inner, like=like, seed=draw, **shape),
            norm.init(size, like=like),
            norm.init(size, like=like),
            pre_norm,
        )

    def __call__(self, x: Array, *, cache: KVCache | None = None, **options: Any) -> Any:
        """Map tokens (..., L, size) to the same; options as `MultiHeadAttention` takes them.

        With a cache, return the pair of tokens and the cache that is next.
        """
        attend = _attending(self.attention, cache, options)
        x, cache = _with_residual(x, attend, self.attention_norm, self.pre_norm)
        x, _ = _with_residual(x, _plainly(self.feed_forward), self.feed_forward_norm, self.pre_norm)
        return x if cache is None else (x, cache)


@dataclass(frozen=True, eq=False, repr=False)
class DecoderBlock(Module):
    """Causal self-attention, attention to an encoder's tokens, then feed-forward.

    Attributes
    ----------
    attention, cross_attention : MultiHeadAttention
        Of the tokens to those before them, and to the encoder's.
    feed_forward : FeedForward
        For each token.
    attention_norm, cross_attention_norm, feed_forward_norm : LayerNorm or RMSNorm
        The normalisation of each.
    pre_norm : bool
        Whether it comes before its part rather than after the sum.
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
        seed: int | Draws = 0,
        inner: int | None = None,
        activation: str = "gelu",
        gated: bool = False,
        bias: bool = True,
        norm: type[Norm] = LayerNorm,
        pre_norm: bool = True,
        context_size: int | None = None,
        **attention: Any,
    ) -> DecoderBlock:
        """Begin with Glorot's uniform weights.

        Parameters
        ----------
        size, heads, like, seed, inner, activation, gated, bias, norm, pre_norm, **attention
            As of `EncoderBlock.init`.
        context_size : int, optional
            The size of the encoder's tokens, if it is another. Their positions are their own: what
            is rotary turns the self-attention alone.

        Returns
        -------
        DecoderBlock
            The block.

        Examples
        --------
        >>> import numpy as np
        >>> from polyattn import nn
        >>> x, context = np.ones((2, 5, 64)), np.ones((2, 9, 64))
        >>> nn.DecoderBlock.init(64, 8, like=x)(x, context).shape
        (2, 5, 64)
        """
        draw = draws(like, seed)
        shape: dict[str, Any] = {"activation": activation, "gated": gated, "bias": bias}
        make = MultiHeadAttention.init
        attention = attention | {"bias": bias}
        across = attention | {"context_size": context_size, "rotary": None}
        return cls(
            make(size, heads, like=like, seed=draw, **attention),
            make(size, heads, like=like, seed=draw, **across),
            FeedForward.init(size, inner, like=like, seed=draw, **shape),
            norm.init(size, like=like),
            norm.init(size, like=like),
            norm.init(size, like=like),
            pre_norm,
        )

    def __call__(
        self,
        x: Array,
        context: Array,
        *,
        cache: KVCache | None = None,
        context_mask: Any = None,
        **options: Any,
    ) -> Any:
        """Map tokens (..., L, size) to the same.

        Parameters
        ----------
        x : Array
            Tokens, shape (..., L, size).
        context : Array
            The encoder's tokens, shape (..., S, context_size).
        cache : KVCache, optional
            The keys and values of the tokens before `x`.
        context_mask : optional
            Which of the encoder's tokens take part, as ``mask=`` of `polyattn.attention`.
        **options : Any
            Of the self-attention, as `MultiHeadAttention` takes them; causal unless
            ``is_causal=False``. ``backend`` and ``kernel`` are of both.

        Returns
        -------
        Array, or tuple of Array and KVCache
            With a cache, the pair of tokens and the cache that is next.
        """
        attend = _attending(self.attention, cache, {"is_causal": True} | options)
        x, cache = _with_residual(x, attend, self.attention_norm, self.pre_norm)
        where = {name: options[name] for name in ("backend", "kernel") if name in options}
        given = {"context": context, "mask": context_mask} | where
        across = _attending(self.cross_attention, None, given)
        x, _ = _with_residual(x, across, self.cross_attention_norm, self.pre_norm)
        x, _ = _with_residual(x, _plainly(self.feed_forward), self.feed_forward_norm, self.pre_norm)
        return x if cache is None else (x, cache)


@dataclass(frozen=True, eq=False, repr=False)
class Stack(Module):
    """Blocks one after another, and a last normalisation.

    Attributes
    ----------
    blocks : tuple of EncoderBlock or DecoderBlock
        The blocks.
    norm : LayerNorm, RMSNorm or None
        What comes after them, where theirs come before their parts.
    """

    blocks: tuple[EncoderBlock | DecoderBlock, ...]
    norm: Norm | None = None

    def __post_init__(self) -> None:
        # The parameters of a list would not be found.
        object.__setattr__(self, "blocks", tuple(self.blocks))

    def __call__(
        self, x: Array, *context: Array, caches: tuple[KVCache, ...] | None = None, **options: Any
    ) -> Any:
        """Map tokens (..., L, size) to the same; context and options go to every block.

        With `caches`, one for each block, return the pair of tokens and the caches that are next.
        """
        if "cache" in options:
            raise TypeError("each block has a cache of its own: pass them all as caches=")
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


Part = Callable[[Array], tuple[Array, KVCache | None]]


def _with_residual(
    x: Array, part: Part, norm: Norm, pre_norm: bool
) -> tuple[Array, KVCache | None]:
    y, cache = part(norm(x) if pre_norm else x)
    return (x + y if pre_norm else norm(x + y)), cache


def _attending(
    attention: MultiHeadAttention, cache: KVCache | None, options: dict[str, Any]
) -> Part:
    def attend(x: Array) -> tuple[Array, KVCache | None]:
        if cache is None:
            return attention(x, **options), None
        result: tuple[Array, KVCache] = attention(x, cache=cache, **options)
        return result

    return attend


def _plainly(layer: Callable[[Array], Array]) -> Part:
    return lambda x: (layer(x), None)
