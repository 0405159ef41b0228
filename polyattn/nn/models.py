"""Define Transformer: an embedding, blocks and an output map, as an encoder or a decoder.

An encoder–decoder is two of them: the second consists of `DecoderBlock` and is called with the
output of the first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from polyattn._base.arguments import check_int, got
from polyattn._base.arrays import Array, cast, index_range, length_of, library_of
from polyattn.nn.attention import Cache
from polyattn.nn.blocks import DecoderBlock, EncoderBlock, Stack, weights_of
from polyattn.nn.cache import KVCache, after
from polyattn.nn.ids import for_each_token, look_up
from polyattn.nn.inputs import FrameEmbedding, PatchEmbedding
from polyattn.nn.layers import Embedding, LayerNorm, Linear, Norm, initializer, widened
from polyattn.nn.module import Initializer, Module
from polyattn.nn.positions import LearnedPositions, RelativeBias, SharedAngles, Sinusoidal
from polyattn.nn.shapes import broadcastable


@dataclass(frozen=True, eq=False, repr=False)
class Transformer(Module):
    """A model of tokens.

    Attributes
    ----------
    embedding : Embedding, PatchEmbedding or FrameEmbedding
        A vector for each token, or the tokens of images or sound.
    stack : Stack
        The blocks.
    positions : LearnedPositions, Sinusoidal or None
        Added for a token's position; None where attention encodes it (rotary, ALiBi).
    segments : Embedding or None
        Added for a token's segment, as in BERT.
    embedding_norm : LayerNorm, RMSNorm or None
        Norm of the sum.
    output : Linear or None
        Map from the last vectors to logits.
    tied : bool
        Whether the embedding computes the logits.
    embedding_scale : float
        Multiplies the tokens' vectors.
    logits_softcap : float or None
        If not None, logits are ``softcap * tanh(logits / softcap)``, as in Gemma 2.
    relative : RelativeBias or None
        Added to the scores of all blocks, as in MPNet.
    """

    embedding: Embedding | PatchEmbedding | FrameEmbedding
    stack: Stack
    positions: LearnedPositions | Sinusoidal | None = None
    segments: Embedding | None = None
    embedding_norm: Norm | None = None
    output: Linear | None = None
    tied: bool = False
    embedding_scale: float = 1.0
    logits_softcap: float | None = None
    relative: RelativeBias | None = None

    def __post_init__(self) -> None:
        if self.tied and not isinstance(self.embedding, Embedding):
            raise ValueError("only the embedding of tokens computes logits: omit tied")
        if self.tied and self.output is not None:
            raise ValueError(
                "either the embedding (tied) or output computes the logits: give one of them"
            )

    @classmethod
    def init(
        cls,
        tokens: int,
        size: int,
        heads: int,
        layers: int,
        *,
        like: Array,
        is_causal: bool,
        seed: int | Initializer = 0,
        positions: int | LearnedPositions | Sinusoidal | None = None,
        cross: bool = False,
        norm: type[Norm] = LayerNorm,
        pre_norm: bool = True,
        logits: bool = True,
        tied: bool = False,
        **block: Any,
    ) -> Transformer:
        """Create a model with Glorot's uniform weights.

        Parameters
        ----------
        tokens : int
            Number of different tokens.
        layers : int
            Number of blocks.
        size, heads, like, seed, norm
            As for `EncoderBlock.init`.
        is_causal : bool
            Whether a token sees no later token: True for a decoder, False for an encoder.
        positions : int, Sinusoidal or LearnedPositions, optional
            The number of learned positions, or the vectors to add.
        cross : bool
            Whether the blocks also attend to another model's tokens.
        pre_norm : bool
            Whether a norm precedes each part; another one is then the last layer.
        logits : bool
            Whether there is an output map.
        tied : bool
            Whether the embedding is that map.
        **block : Any
            Further arguments of `EncoderBlock.init` or `DecoderBlock.init`.

        Examples
        --------
        >>> import numpy as np
        >>> from polyattn import nn
        >>> like = np.zeros(1, dtype=np.float32)
        >>> gpt = nn.Transformer.init(100, 64, 4, 2, like=like, is_causal=True, positions=32)
        >>> gpt(np.asarray([[5, 7, 11]])).shape
        (1, 3, 100)
        """
        create = initializer(like, seed)
        embedding = Embedding.init(tokens, size, like=like, seed=create)
        if not (positions is None or isinstance(positions, LearnedPositions | Sinusoidal)):
            number = check_int("positions", positions, "an integer, or positions as a module")
            positions = LearnedPositions.init(number, size, like=like, seed=create)
        kind = DecoderBlock if cross else EncoderBlock
        shared = {"like": like, "is_causal": is_causal, "seed": create} | block
        shared |= {"norm": norm, "pre_norm": pre_norm}
        blocks = tuple([kind.init(size, heads, **shared) for _ in range(layers)])
        stack = Stack(blocks, norm.init(size, like=like) if pre_norm else None)
        output = None
        if logits and not tied:
            output = Linear.init(size, tokens, like=like, seed=create, bias=False)
        return cls(embedding, stack, positions, output=output, tied=tied)

    def __call__(
        self,
        ids: Array,
        *context: Array,
        caches: tuple[Cache, ...] | None = None,
        **options: Any,
    ) -> Any:
        """Run the model.

        Parameters
        ----------
        ids : Array of int
            Tokens, shape (..., L); of images or sound, what the embedding takes.
        *context : Array
            The tokens that `DecoderBlock` attends to, shape (..., S, size).
        caches : tuple of KVCache, PagedCache or QuantizedCache, optional
            A cache for each block, with the tokens before ``ids``.
        segments : Array or sequence of int, optional
            The segment of each token, shape (L,) or (..., L); 0 by default.
        positions : Array or sequence of int, optional
            Positions of the tokens, shape (L,) or (..., L); by default they follow the caches.
        **options : Any
            Options of the blocks: ``mask``, ``score_mod``, ``backend`` and so on. Causality,
            windows, scales and softcaps are by default those of each layer.

        Returns
        -------
        Array, or tuple of Array and tuple of caches
            Logits, shape (..., L, tokens), or without an output map the vectors, (..., L, size);
            with caches, the pair of this array and the next caches.
        """
        x = self.hidden(ids, *context, caches=caches, **options)
        return self.logits(x) if caches is None else (self.logits(x[0]), x[1])

    def hidden(
        self,
        ids: Array,
        *context: Array,
        caches: tuple[Cache, ...] | None = None,
        segments: Array | None = None,
        positions: Array | None = None,
        **options: Any,
    ) -> Any:
        """Return the last vectors, from which `logits` computes what a call returns.

        Parameters
        ----------
        ids, *context, caches, segments, positions, **options : Array, tuple of caches, Any
            As in a call of the model.

        Returns
        -------
        Array, or tuple of Array and tuple of caches
            Vectors, shape (..., L, size); with caches, the pair of this array and the next caches.
        """
        x = self.embed(ids, caches=caches, segments=segments, positions=positions)
        options = self._of_blocks(x, positions, caches, options)
        return self.stack(x, *context, caches=caches, **options)

    def weights(
        self,
        ids: Array,
        *context: Array,
        segments: Array | None = None,
        positions: Array | None = None,
        **options: Any,
    ) -> list[Any]:
        """Return the attention weights of each block, to inspect or draw them.

        Parameters
        ----------
        ids, *context, segments, positions : Array
            As in a call of the model.
        **options : Any
            Options of the blocks; and heads, rows, top and per_key of
            `polyattn.attention_weights`.

        Returns
        -------
        list of Array or TopWeights
            For each block, shape (..., H, L, S), unless an option selects a part; of a
            `DecoderBlock` those of its self-attention.

        Examples
        --------
        >>> import numpy as np
        >>> from polyattn import nn, plot
        >>> like = np.zeros(1, dtype=np.float32)
        >>> gpt = nn.Transformer.init(100, 64, 4, 2, like=like, is_causal=True, positions=32)
        >>> weights = gpt.weights(np.asarray([5, 7, 11]))
        >>> len(weights), weights[0].shape
        (2, (4, 3, 3))
        >>> figure = plot.attention_map(weights[0])
        """
        x = self.embed(ids, segments=segments, positions=positions)
        return weights_of(self.stack, x, *context, **self._of_blocks(x, positions, None, options))

    def _of_blocks(self, x: Array, positions: Any, caches: Any, options: dict[str, Any]) -> Any:
        """Return the options of the blocks, with the model's own positions and scores."""
        if positions is not None:
            positions = for_each_token("positions", positions, x)
            rotaries = [block.attention.rotary for block in self.stack.blocks]
            counts = options.get("key_lengths" if caches is None else "counts")
            options["positions"] = SharedAngles.of(positions, rotaries, x, counts)
        if self.relative is not None:
            given = options.get("score_mod")
            own = self.relative()
            options["score_mod"] = own if given is None else own >> given
        return options

    def embed(
        self,
        ids: Array,
        *,
        caches: tuple[Cache, ...] | None = None,
        segments: Array | None = None,
        positions: Array | None = None,
    ) -> Array:
        """Return the input vectors of the blocks.

        Parameters
        ----------
        ids, caches, segments, positions : Array, tuple of caches, Array, Array
            As in a call of the model.

        Returns
        -------
        Array
            Shape (..., L, size).
        """
        xp = library_of(ids, "ids").xp
        x = self.embedding(ids)
        if len(x.shape) < 2:
            raise ValueError(f"ids must have the shape (..., L); got {tuple(ids.shape)}")
        length = length_of(x, -2)
        if self.embedding_scale != 1:
            x = x * self.embedding_scale
        if self.positions is not None:
            if positions is None:
                positions = index_range(xp, 0, length, ids)
                before = caches[0].next_position if caches else 0
                known = isinstance(before, int) and isinstance(length, int)
                if known and isinstance(self.positions, LearnedPositions):
                    self.positions.check(before + length)
                positions = after(before, positions)
            vectors = self.positions(for_each_token("positions", positions, x), like=x)
            x = x + broadcastable(x, vectors)
        if self.segments is not None:
            segments = ids * 0 if segments is None else for_each_token("segments", segments, x)
            x = x + look_up(self.segments.weight, segments, "segment")
        elif segments is not None:
            raise ValueError("the model has no vectors of segments: omit segments")
        return x if self.embedding_norm is None else self.embedding_norm(x)

    def logits(self, x: Array) -> Array:
        """Return the logits of the last vectors, or `x` itself if there is no output map.

        Parameters
        ----------
        x : Array
            Shape (..., L, size).

        Returns
        -------
        Array
            Shape (..., L, tokens), or `x`.
        """
        if self.output is not None:
            y = self.output(x)
        elif self.tied and isinstance(self.embedding, Embedding):
            y = self.embedding.logits(x)
        else:
            return x
        softcap = self.logits_softcap
        if softcap is None:
            return y
        xp = library_of(y).xp
        return cast(xp, xp.tanh(widened(y, xp) / softcap) * softcap, y.dtype)

    def caches(
        self,
        capacity: int | str,
        *,
        batch: tuple[int | str, ...] = (),
        kind: type[Cache] = KVCache,
        **settings: Any,
    ) -> tuple[Any, ...]:
        """Return an empty cache for each block.

        Parameters
        ----------
        capacity, batch, kind, **settings : int or str, tuple of int or str, type, Any
            As for `MultiHeadAttention.cache`.

        Returns
        -------
        tuple of KVCache, PagedCache or QuantizedCache
            The ``caches=`` of the first call.
        """
        if not isinstance(kind, type):
            raise TypeError(f"kind must be a class of caches, such as nn.PagedCache; {got(kind)}")
        like = next(iter(self.parameters().values()))
        settings |= {"like": like, "batch": batch, "kind": kind}
        return tuple([block.attention.cache(capacity, **settings) for block in self.stack.blocks])


def with_contiguous_rows(model: Transformer) -> Transformer:
    """Return a model whose maps have contiguous rows, which the product of one row reads fastest.

    A weight that a library stored as (outputs, inputs) is copied; so is a tied embedding, of which
    the map is the transpose.
    """

    def laid_out(name: str, array: Array) -> Array:
        if len(array.shape) != 2:
            return array
        turn = library_of(array).xp.matrix_transpose
        if model.tied and name == "embedding.weight":
            return turn(_contiguous(turn(array)))
        return _contiguous(array)

    parameters = model.parameters().items()
    return model.with_parameters({name: laid_out(name, array) for name, array in parameters})


def _contiguous(array: Array) -> Array:
    made = getattr(array, "contiguous", None)
    return np.ascontiguousarray(array) if made is None else made()
