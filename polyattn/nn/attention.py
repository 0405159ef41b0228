"""Define multi-head attention: projections around `polyattn.attention`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from polyattn._api.attention import attention
from polyattn._api.weights import attention_weights
from polyattn._base.arguments import check_int
from polyattn._base.arrays import Array, index_range, length_of, library_of
from polyattn.nn.cache import KVCache, after
from polyattn.nn.ids import for_each_token
from polyattn.nn.layers import Linear, Norm, initializer
from polyattn.nn.module import Initializer, Module
from polyattn.nn.paged_cache import PagedCache
from polyattn.nn.positions import Rotary, SharedAngles
from polyattn.nn.quantized_cache import QuantizedCache
from polyattn.nn.shapes import with_last_axes

Cache = KVCache | PagedCache | QuantizedCache


@dataclass(frozen=True, eq=False, repr=False)
class MultiHeadAttention(Module):
    """Attention with several heads.

    Attributes
    ----------
    query, key, value : Linear or None
        Maps from tokens to the queries, keys and values of all heads; None if fused is given.
    output : Linear or None
        Map from the concatenated outputs of the heads to tokens; None to return them unmapped.
    heads, key_heads : int
        H and G: query head h reads key/value head h // (H // G).
    fused : Linear or None
        One map to queries, keys and values, concatenated in that order.
    head_size : int
        D, the size of queries and keys.
    is_causal : bool
        Whether a token sees no later token, unless a call passes ``is_causal``.
    query_norm, key_norm : LayerNorm, RMSNorm or None
        Normalisation of queries and keys, before `rotary`: of each head's, or of all heads' at
        once if the norm has their size.
    rotary : Rotary or None
        Rotation of queries and keys by their positions.
    scale, softcap : float or None
        The options of `polyattn.attention` that a call of the layer has by default.
    window : tuple of int or None, or None
        Likewise.
    """

    query: Linear | None
    key: Linear | None
    value: Linear | None
    output: Linear | None
    heads: int
    key_heads: int
    head_size: int
    is_causal: bool = field(kw_only=True)
    fused: Linear | None = None
    query_norm: Norm | None = None
    key_norm: Norm | None = None
    rotary: Rotary | None = None
    scale: float | None = None
    softcap: float | None = None
    window: tuple[int | None, int | None] | None = None

    def __post_init__(self) -> None:
        if self.key_heads < 1 or self.heads % self.key_heads:
            raise ValueError(
                f"heads must be a multiple of key_heads; got {self.heads} and {self.key_heads}"
            )
        if self.rotary is not None and self.rotary.size > self.head_size:
            raise ValueError(
                f"rotary.size must be at most the head size {self.head_size}; got"
                f" {self.rotary.size}"
            )
        separate = [self.query, self.key, self.value]
        if (self.fused is None) == any(linear is None for linear in separate):
            raise ValueError("give either query, key and value, or only fused")

    @classmethod
    def init(
        cls,
        size: int,
        heads: int,
        *,
        like: Array,
        seed: int | Initializer = 0,
        key_heads: int | None = None,
        head_size: int | None = None,
        value_size: int | None = None,
        context_size: int | None = None,
        bias: bool = True,
        fused: bool = False,
        **settings: Any,
    ) -> MultiHeadAttention:
        """Create a layer with Glorot's uniform weights and biases of 0.

        Parameters
        ----------
        size : int
            Size of a token's vector.
        heads : int
            H.
        like, seed
            As for `Linear.init`.
        key_heads : int, optional
            G, H by default; 1 is multi-query attention.
        head_size, value_size : int, optional
            D and E; by default size / H and D.
        context_size : int, optional
            Size of the tokens that are attended to, `size` by default.
        bias : bool
            Whether the maps have biases.
        fused : bool
            Whether one map computes queries, keys and values.
        **settings : Any
            Further attributes: query_norm and key_norm, such as ``RMSNorm.init(head_size,
            like=like)``, which the layer copies; is_causal, False by default; rotary, scale,
            softcap and window.

        Examples
        --------
        >>> import numpy as np
        >>> from polyattn import nn
        >>> x = np.ones((2, 5, 64), dtype=np.float32)
        >>> layer = nn.MultiHeadAttention.init(64, 8, key_heads=2, is_causal=True, like=x)
        >>> layer(x).shape
        (2, 5, 64)
        """
        size, heads = check_int("size", size, least=1), check_int("heads", heads, least=1)
        if head_size is None:
            if size % heads:
                raise ValueError(
                    f"{heads} heads do not divide a size of {size}: give head_size, or other heads"
                )
            head_size = size // heads
        head_size = check_int("head_size", head_size, least=1)
        key_heads = heads if key_heads is None else check_int("key_heads", key_heads, least=1)
        value_size = head_size if value_size is None else value_size
        value_size = check_int("value_size", value_size, least=0)
        context_size = size if context_size is None else context_size
        context_size = check_int("context_size", context_size, least=0)
        if fused and context_size != size:
            raise ValueError("a fused map takes tokens of one size; omit context_size")
        create = initializer(like, seed)
        for name in ("query_norm", "key_norm"):
            if settings.get(name) is not None:
                settings[name] = settings[name].copied()

        def linear(inputs: int, outputs: int) -> Linear:
            return Linear.init(inputs, outputs, like=like, seed=create, bias=bias)

        widths = (heads * head_size, key_heads * head_size, key_heads * value_size)
        return cls(
            query=None if fused else linear(size, widths[0]),
            key=None if fused else linear(context_size, widths[1]),
            value=None if fused else linear(context_size, widths[2]),
            fused=linear(size, sum(widths)) if fused else None,
            output=linear(heads * value_size, size),
            heads=heads,
            key_heads=key_heads,
            head_size=head_size,
            **{"is_causal": False} | settings,
        )

    def __call__(
        self,
        x: Array,
        context: Array | None = None,
        values: Array | None = None,
        *,
        cache: Cache | None = None,
        counts: Any = None,
        positions: Array | None = None,
        **options: Any,
    ) -> Any:
        """Attend from tokens to tokens.

        Parameters
        ----------
        x : Array
            Tokens, shape (..., L, size).
        context : Array, optional
            The tokens to attend to, shape (..., S, context_size); `x` by default.
        values : Array, optional
            The tokens whose values are summed, shape (..., S, inputs of that map); `context` by
            default.
        cache : KVCache, PagedCache or QuantizedCache, optional
            The keys and values of the tokens before `x`.
        counts : Array of int or sequence of int, optional
            How many of the tokens of each item a `PagedCache` keeps, as for its ``append``; rows
            after them have no meaning.
        positions : Array or sequence of int, optional
            Positions of `x` for `rotary`, shape (L,) or (..., L); by default they follow the
            cache.
        **options : Any
            Options of `polyattn.attention`: mask, bias, is_causal, window, key_lengths, scale,
            softcap, score_mod, sinks, dropout, similarity, normalizer, backend, kernel. By default,
            or for ``is_causal=None``, those of the layer.

        Returns
        -------
        Array, or tuple of Array and cache
            Tokens, shape (..., L, size); with a cache, the pair of tokens and the next cache.

        Raises
        ------
        ValueError
            If `x`, `context` or `values` does not fit the maps, or one of these two is given with a
            cache or to a layer with rotary positions.
        """
        if counts is not None and not isinstance(cache, PagedCache):
            raise TypeError(
                "counts needs a PagedCache, which has a length for each item; got a"
                f" {type(cache).__name__}"
            )
        own = options.get("key_lengths") if cache is None else counts
        query, key, value = self._project((x, context, values), positions, cache, own)
        options = self._with_own(options)
        if cache is None:
            return self._merge(attention(query, key, value, **options))
        given = {} if counts is None else {"counts": counts}
        cache = cache.append(key, value, query=query, **given)
        if isinstance(cache, QuantizedCache):
            heads = cache.attention(query, **options)
        else:
            heads = attention(query, cache.keys, cache.values, **cache.options(options))
        return self._merge(heads), cache

    def weights(
        self,
        x: Array,
        context: Array | None = None,
        *,
        positions: Array | None = None,
        **options: Any,
    ) -> Any:
        """Return the attention weights, to inspect them.

        Parameters
        ----------
        x, context, positions : Array
            As in a call of the layer.
        **options : Any
            Options of `polyattn.attention_weights`.

        Returns
        -------
        Array or TopWeights
            Shape (..., H, L, S), unless an option selects a part.
        """
        query, key, _ = self._project(
            (x, context, None), positions, None, options.get("key_lengths")
        )
        return attention_weights(query, key, **self._with_own(options))

    @property
    def value_size(self) -> int:
        """E, the size of a head's values."""
        if self.fused is not None:
            width = int(self.fused.weight.shape[1])
            return width // self.key_heads - (self.heads // self.key_heads + 1) * self.head_size
        value: Any = self.value
        return int(value.weight.shape[1]) // self.key_heads

    def cache(
        self,
        capacity: int | str,
        *,
        like: Array,
        batch: tuple[int | str, ...] = (),
        kind: type[Cache] = KVCache,
        **settings: Any,
    ) -> Any:
        """Return an empty cache for this layer's keys and values.

        Parameters
        ----------
        capacity : int or str
            Number of tokens to allocate memory for, or a name, as for `KVCache.init`.
        like : Array
            An array of the library, device and dtype of the keys and values.
        batch : tuple of int or str
            The batch axes; one for a `PagedCache`, whose items it numbers.
        kind : {KVCache, PagedCache, QuantizedCache}
            The class of the cache.
        **settings : Any
            Further arguments of its ``init``, such as the ``page`` of a `PagedCache`.

        Returns
        -------
        KVCache, PagedCache or QuantizedCache
            The ``cache=`` of the first call.
        """
        settings |= {"like": like, "value_size": self.value_size}
        if kind is not PagedCache:
            settings["batch"] = batch
        elif len(batch) == 1:
            settings["items"] = batch[0]
        else:
            raise ValueError(f"a PagedCache has one batch axis: give batch=(B,); got {batch}")
        create: Any = kind.init
        return create(self.key_heads, self.head_size, capacity, **settings)

    def _with_own(self, options: dict[str, Any]) -> dict[str, Any]:
        """Return the options of a call, by default the layer's own."""
        own = {"scale": self.scale, "softcap": self.softcap, "window": self.window}
        own = {name: value for name, value in own.items() if value is not None}
        said = options.get("is_causal")
        return own | options | {"is_causal": self.is_causal if said is None else said}

    def _project(
        self,
        tokens: tuple[Array, Array | None, Array | None],
        positions: Array | SharedAngles | None,
        cache: Cache | None,
        counts: Any,
    ) -> tuple[Array, Array, Array]:
        """Return queries, keys and values, normalised and rotated."""
        x, context, values = tokens
        if (context is not None or values is not None) and (
            cache is not None or self.rotary is not None
        ):
            raise ValueError(
                "a cache and rotary positions describe the sequence of x, and context is another"
                " sequence: give context to a layer without rotary, and without a cache"
            )
        if len(x.shape) < 2:
            raise ValueError(f"x must have the shape (..., L, size); got {tuple(x.shape)}")
        if positions is not None and not isinstance(positions, SharedAngles):
            positions = for_each_token("positions", positions, x)
        context = x if context is None else context
        query, key, value = self._apply_maps(x, context, context if values is None else values)
        if self.rotary is not None:
            if positions is None:
                positions = _following(query, cache)
            like = query[..., 0, :, :] if self.rotary.dynamic and counts is not None else query
            tables = self.rotary.tables(positions, like=like, counts=counts)
            query, key = self.rotary.rotate(query, *tables), self.rotary.rotate(key, *tables)
        return query, key, value

    def _apply_maps(self, x: Array, context: Array, values: Array) -> tuple[Array, Array, Array]:
        """Return queries (..., H, L, D) and keys (..., G, S, D), normalised, and values."""
        first = self.heads * self.head_size
        second = first + self.key_heads * self.head_size
        columns = (slice(first), slice(first, second), slice(second, None))
        if self.fused is not None and x is context is values:
            y = self.fused(x)
            query, key, value = (y[..., part] for part in columns)
        else:
            maps: Any = (self.query, self.key, self.value)
            if self.fused is not None:
                weight, bias = self.fused.weight, self.fused.bias
                maps = [Linear(weight[:, c], None if bias is None else bias[c]) for c in columns]
            given = zip(maps, (x, context, values), strict=True)
            query, key, value = (apply(array) for apply, array in given)
        return (
            _split(query, self.heads, self.query_norm),
            _split(key, self.key_heads, self.key_norm),
            _split(value, self.key_heads),
        )

    def _merge(self, heads: Array) -> Array:
        """Map the outputs of the heads, shape (..., H, L, E), to tokens."""
        xp = library_of(heads).xp
        rank = len(heads.shape)
        x = xp.permute_dims(heads, (*range(rank - 3), rank - 2, rank - 3, rank - 1))
        flat = with_last_axes(x, 2, x.shape[-2] * x.shape[-1])
        return flat if self.output is None else self.output(flat)


def _following(query: Array, cache: Cache | None) -> Array | range:
    """Return the positions after those of a cache, as a range where they are known."""
    length, start = length_of(query, -2), 0 if cache is None else cache.next_position
    if isinstance(length, int) and isinstance(start, int):
        return range(start, start + length)
    positions = index_range(library_of(query).xp, 0, length, query)
    return after(start, positions)


def _split(x: Array, heads: int, norm: Norm | None = None) -> Array:
    """Turn (..., L, H · D) into (..., H, L, D); the size of the norm says when it applies."""
    whole = norm is not None and norm.weight.shape[0] == x.shape[-1]
    x = norm(x) if norm is not None and whole else x
    xp = library_of(x).xp
    rank = len(x.shape)
    split = with_last_axes(x, 1, heads, x.shape[-1] // heads)
    split = xp.permute_dims(split, (*range(rank - 2), rank - 1, rank - 2, rank))
    return split if norm is None or whole else norm(split)
