"""Define QuantizedCache: keys and values as integers of 8 bits, the newest ones as they are.

Keys have a step for each channel of a block of tokens, values one for each token, as in KIVI [1]_.
Attention reads the integers, or makes floats of some blocks at a time for kernels that do not. So
no copy is as large as the cache, unless XLA makes one in a compiled step.

References
----------
.. [1] Liu et al., "KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache", 2024.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from polyattn._api.partial import attention_partial, merge
from polyattn._api.pieces import Piece, attention_over_integers, attention_over_pieces
from polyattn._base.arguments import check_int
from polyattn._base.arrays import (
    Array,
    cast,
    clip,
    facts_of,
    index_range,
    is_array,
    library_of,
    quiet,
    zeros,
)
from polyattn._base.autocast import autocast
from polyattn._base.quantized import Quantized
from polyattn._base.tracing import is_autocast_on, is_compiling
from polyattn._dispatch.request import request
from polyattn.nn import integers
from polyattn.nn.cache import KVCache, checked_tokens, known, overwritten
from polyattn.nn.integers import attention_of_row, in_sums, sums
from polyattn.nn.shapes import as_array

T = TypeVar("T")
#: Numbers of a piece of the keys that become floats at once: some MB, which stay in a CPU's cache.
PIECE = 2**19
#: The most pieces of the keys where the library traces.
TRACED_PIECES = 8
#: The axes of a block along which keys and values share a step.
AXES = (-2, -1)


@dataclass(frozen=True, eq=False)
class QuantizedCache:
    """Keys and values of the tokens so far, of which only the newest are floats.

    The error of an entry is at most a 254th of the largest key of its channel in a block, or of its
    token's largest value. There are no gradients with respect to keys and values.

    Attributes
    ----------
    codes : KVCache
        The older tokens as integers, arrays of int8.
    steps : KVCache
        What to multiply them by: of the keys, shape (..., G, blocks, D), and of the values, shape
        (..., G, blocks, block).
    recent : KVCache
        The newest tokens, at least `window` of them and less than `window` + `block`.
    window : int
        Number of the newest tokens that stay as they are.
    block : int
        Number of tokens that become integers at once.
    """

    codes: KVCache
    steps: KVCache
    recent: KVCache
    window: int
    block: int

    @classmethod
    def init(
        cls,
        heads: int,
        size: int,
        capacity: int,
        *,
        like: Array,
        batch: tuple[int, ...] = (),
        value_size: int | None = None,
        window: int = 32,
        block: int = 64,
    ) -> QuantizedCache:
        """Return an empty cache.

        Parameters
        ----------
        heads, size, capacity, like, batch, value_size
            As for `KVCache.init`, but all numbers.
        window : int
            Number of the newest tokens that stay as they are, at least 0.
        block : int
            Number of tokens that become integers at once, at least 1.

        Raises
        ------
        ValueError
            If a number is less than that.

        Examples
        --------
        >>> import numpy as np
        >>> from polyattn import nn
        >>> prompt = np.ones((8, 500, 64), dtype=np.float32)
        >>> cache = nn.QuantizedCache.init(8, 64, 512, like=prompt).append(prompt, prompt)
        >>> cache.codes.length, cache.recent.length
        (448, 52)
        >>> cache.attention(prompt[:, -1:]).shape
        (8, 1, 64)
        """
        window, block = check_int("window", window, least=0), check_int("block", block, least=1)
        blocks = -(-check_int("capacity", capacity, least=0) // block)
        xp = library_of(like, "like").xp
        one = like[(slice(1),) * len(like.shape)]
        kinds = [xp.astype(one, getattr(xp, name)) for name in ("int8", sums(like))]

        def empty(capacity: int, like: Array, value_size: int | None) -> KVCache:
            given: Any = {"like": like, "batch": batch, "value_size": value_size}
            return KVCache.init(heads, size, capacity, **given)

        codes, steps = empty(blocks * block, kinds[0], value_size), empty(blocks, kinds[1], block)
        recent = empty(window + block - 1, like, value_size)
        return cls(codes, steps, recent, window, block)

    @property
    def length(self) -> int | Array:
        """Number of tokens in the cache."""
        length: int | Array = known(self.codes.length) + known(self.recent.length)
        return length

    @property
    def _is_traced(self) -> bool:
        """Whether the library traces: then shapes follow from the capacity, not from lengths."""
        return is_compiling() or is_array(self.length)

    @property
    def capacity(self) -> int:
        """Number of tokens that fit into the memory."""
        return (self._room + 1) * self.block + self.window - 1

    @property
    def _room(self) -> int:
        """Number of blocks that fit into the memory of integers and of steps."""
        return min(self.codes.capacity // self.block, self.steps.capacity)

    @property
    def _memory(self) -> tuple[Array, Array]:
        """Memory of the newest tokens: the most that is used before a block is full."""
        most = self.window + self.block - 1
        return self.recent.key[..., :most, :], self.recent.value[..., :most, :]

    @property
    def next_position(self) -> int | Array:
        """The position of the next token."""
        return self.length

    def append(self, key: Array, value: Array, *, query: Array | None = None) -> QuantizedCache:
        """Return a cache with more tokens at the end; this cache does not change.

        Parameters
        ----------
        key, value, query : Array
            As for `KVCache.append`.

        Returns
        -------
        QuantizedCache

        Raises
        ------
        ValueError
            If the shapes do not fit, or a key or value needs a gradient; on NumPy also if a token
            that becomes integers has NaN or an infinite number. Elsewhere contents are not read,
            and such a token is spoilt, with the keys of its block.
        TypeError
            If the library or dtype differs.
        """
        memory = self.recent.key, self.recent.value
        key, value = checked_tokens(memory, memory[0].shape[:-2], key, value)
        if any(facts_of(new).requires_grad for new in (key, value)):
            raise ValueError(
                "a quantised cache has no gradient with respect to keys and values: detach them, or"
                " give a KVCache"
            )
        if self._is_traced:
            return self._append_traced(key, value)
        recent, size = self.recent, self.block
        kept = known(recent.length)
        blocks = max(kept + key.shape[-2] - self.window, 0) // size
        if not blocks:
            return replace(self, recent=recent.append(key, value, query=query))
        xp = library_of(key).xp
        pairs = (recent.keys, key), (recent.values, value)
        tokens = [xp.concat(pair, axis=-2) for pair in pairs]
        new, of_new = self._quantized(tokens, blocks)
        codes, steps = self.codes.append(*new), self.steps.append(*of_new)
        rest = [array[..., blocks * size :, :] for array in tokens]
        return replace(self, codes=codes, steps=steps, recent=KVCache(*self._memory).append(*rest))

    def _quantized(self, tokens: Sequence[Array], blocks: int) -> Iterator[tuple[Array, Array]]:
        """Return the first blocks of keys and values as integers, and the steps of both."""
        whole = [x[..., : blocks * self.block, :] for x in tokens]
        pairs = zip(whole, AXES, strict=True)
        return zip(*[integers.quantized(x, self.block, axis) for x, axis in pairs], strict=True)

    def _append_traced(self, key: Array, value: Array) -> QuantizedCache:
        """Return a cache with more tokens, by shapes that follow from no length.

        As many blocks as may be full become integers; those that are not are overwritten later.
        """
        more, size, xp = key.shape[-2], self.block, library_of(key).xp
        memory = []
        for held in self._memory:
            room = (*held.shape[:-2], more + size, held.shape[-1])
            memory.append(xp.concat((held, zeros(xp, room, held.dtype, held)), axis=-2))
        recent = KVCache(memory[0], memory[1], self.recent.length).append(key, value)
        over = recent.length - self.window
        full = (xp.clip(over, 0) if is_array(over) else max(over, 0)) // size
        codes, steps = self._quantized((recent.key, recent.value), (more + size - 1) // size)
        rows = index_range(xp, 0, self.window + size - 1, key) + full * size
        rest = [xp.take(array, rows, axis=-2) for array in (recent.key, recent.value)]
        return replace(
            self,
            codes=overwritten(self.codes, codes, full * size),
            steps=overwritten(self.steps, steps, full),
            recent=KVCache(rest[0], rest[1], recent.length - full * size),
        )

    def truncate(self, length: int) -> QuantizedCache:
        """Return a cache of the first `length` tokens; this cache does not change.

        Parameters
        ----------
        length : int
            Number of tokens to keep.

        Returns
        -------
        QuantizedCache
        """
        held = self.length
        if is_array(held):
            raise ValueError(
                "inside a traced function the length of a quantised cache is unknown, so it cannot"
                " tell which integers become floats again: truncate it outside, or give a KVCache"
            )
        if not 0 <= check_int("length", length) <= held:
            raise ValueError(f"length must be from 0 to the cache's {held} tokens; got {length}")
        coded = known(self.codes.length)
        if length >= coded:
            return replace(self, recent=self.recent.truncate(length - coded))
        whole = length // self.block  # the tokens after the last whole block become floats again
        codes = self.codes.truncate(whole * self.block)
        floats = self._read(integers.floats_of, whole, whole + 1)
        rest = [array[..., : length % self.block, :] for array in floats]
        xp, dtype = library_of(rest[0]).xp, self.recent.key.dtype
        recent = KVCache(*self._memory).append(*[cast(xp, array, dtype) for array in rest])
        return replace(self, codes=codes, steps=self.steps.truncate(whole), recent=recent)

    def attention(self, query: Array, **options: Any) -> Array:
        """Attend from queries to all tokens.

        Parameters
        ----------
        query : Array
            Queries, shape (..., H, L, D), by default of the newest tokens.
        **options : Any
            Options of `polyattn.attention` but ``normalizer`` and ``layout``.

        Returns
        -------
        Array
            Shape (..., H, L, E).

        Raises
        ------
        ValueError
            If there is a normalizer: only softmax has a logsumexp, which joins parts.
        """
        query = autocast({"query": query}, ("query",))["query"]
        xp, (rows,) = library_of(query, "query").xp, in_sums(query)
        if self._is_plain(query, options):
            with quiet(library_of(query).name):
                return cast(xp, self._of_newest(rows, options), query.dtype)
        length: Any = self.length
        pieces = self._pieces()
        if self._is_traced:
            options = {"key_lengths": as_array(length, query)} | options
            length, pieces = self.capacity, self._traced_pieces()
        key, value = (
            facts_of(x)._replace(shape=(*x.shape[:-2], length, x.shape[-1]), dtype=sums(x))
            for x in self._memory
        )
        output = attention_over_pieces(rows, key, value, pieces, self._float_pieces, **options)
        return cast(xp, output, query.dtype)

    def _is_plain(self, query: Array, options: dict[str, Any]) -> bool:
        """Return whether this is a decoding step without options that hide or change scores.

        On NumPy, `_of_newest` then takes 0.12 to 0.43 of the time of the pieces.
        """
        key, shape = self.recent.key, tuple(query.shape)
        heads = shape[-3] if len(shape) == len(key.shape) else 1
        return (
            not self._is_traced
            and options.keys() <= {"is_causal", "scale"}
            and isinstance(options.get("is_causal", False), bool)
            and isinstance(options.get("scale", 1.0), float)
            and type(query) is type(key)
            and query.dtype == key.dtype
            and heads % key.shape[-3] == 0
            and shape == (*key.shape[:-3], heads, 1, key.shape[-1])
            and not (request(None).names or is_autocast_on())
        )

    def _of_newest(self, query: Array, options: dict[str, Any]) -> Array:
        """Return attention from one row of each head, which sees all tokens."""
        xp, (*batch, heads, _, size) = library_of(query).xp, query.shape
        scale = float(options.get("scale", size**-0.5))
        key, value = (cast(xp, x, query.dtype) for x in (self.recent.keys, self.recent.values))
        joined = attention_partial(query, key, value, scale=scale)
        if not known(self.steps.length):  # no block is full yet
            return joined.output
        older = attention_over_integers(query, *self._integers(), scale=scale)
        if older is not None:
            return merge(joined, older).output
        rows = xp.reshape(query, (*batch, key.shape[-3], heads // key.shape[-3], size)) * scale
        for first, stop in self._ranges():
            part = attention_of_row(rows, *self._read(integers.blocks_of, first, stop))
            joined = merge(joined, part)
        return joined.output

    def _ranges(self) -> Iterator[tuple[int, int]]:
        """Yield the blocks that become floats at once."""
        *lead, _, size = self.recent.key.shape
        numbers = max(size, self.recent.value.shape[-1]) * self.block * math.prod(lead)
        blocks, most = known(self.steps.length), max(PIECE // max(numbers, 1), 1)
        if self._is_traced:
            blocks = self._room
            most = max(most, -(-blocks // TRACED_PIECES))
        for first in range(0, blocks, most):
            yield first, min(first + most, blocks)

    def _pieces(self) -> Iterator[Piece]:
        """Yield the integers and the newest tokens."""
        coded = known(self.codes.length)
        if coded:
            yield Piece(0, *self._integers())
        yield Piece(coded, *in_sums(self.recent.keys, self.recent.values))

    def _float_pieces(self) -> Iterator[Piece]:
        """Yield each range of blocks, as floats."""
        for first, stop in self._ranges():
            yield Piece(first * self.block, *self._read(integers.floats_of, first, stop))

    def _traced_pieces(self) -> Iterator[Piece]:
        """Yield all of the memory, as floats, and how much of the integers' counts."""
        coded = as_array(self.codes.length, self.recent.key)
        xp = library_of(coded).xp
        for piece in self._float_pieces():
            count = clip(xp, coded - piece.start, 0, piece.key.shape[-2])
            yield piece._replace(length=count)
        yield Piece(coded, *in_sums(*self._memory))

    def _integers(self) -> list[Quantized]:
        """Return the older keys and values as integers, and their steps."""
        return self._read(integers.as_integers, 0, known(self.steps.length))

    def _read(self, form: Callable[[Array, Array, int], T], first: int, stop: int) -> list[T]:
        """Return some blocks of keys and values in a form."""
        codes, steps, block = self.codes, self.steps, self.block
        pairs = (codes.key, steps.key, AXES[0]), (codes.value, steps.value, AXES[1])
        return [
            form(x[..., first * block : stop * block, :], of[..., first:stop, :], axis)
            for x, of, axis in pairs
        ]
