"""Define KVCache: the keys and values of the tokens so far, for decoding token by token.

A cache is immutable. If its arrays are writable, the next cache writes to the same memory. Only one
cache may do so: a second one that would write to the same place copies the memory, and so does one
that was made from the user's arrays. Tokens that were taken back are overwritten if nothing else
holds the memory. If arrays are not writable (JAX, a graph of gradients), the next cache consists of
new arrays of the same shape, so that a compiled step is compiled once.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field, replace
from typing import Any

from polyattn._base.arguments import check_int
from polyattn._base.arrays import (
    Array,
    ArrayFacts,
    cast,
    facts_of,
    is_array,
    length_of,
    library_of,
    with_rank,
    zeros,
)
from polyattn._base.tracing import autocast_dtype, is_autocast_on, is_compiling
from polyattn.nn.memory import Buffer, is_writable
from polyattn.nn.shapes import with_rows


@dataclass(frozen=True, eq=False)
class KVCache:
    """Keys and values of the tokens so far.

    Attributes
    ----------
    key, value : Array
        The memory, shapes (..., G, capacity, D) and (..., G, capacity, E).
    length : int or Array of int
        Number of tokens in the cache; a scalar array where the library traces.
    first : int
        Index of the first token in the memory.
    dropped : int or Array of int
        Number of tokens before the first one that the cache no longer holds.
    buffer : object, optional
        Shared by the caches of one memory; decides which of them may write. Without it nothing is
        written to the memory: the next cache copies it.
    """

    key: Array
    value: Array
    length: int | Array = 0
    first: int = 0
    dropped: int | Array = 0
    buffer: Buffer | None = field(default=None, repr=False, compare=False)

    @classmethod
    def init(
        cls,
        heads: int,
        size: int,
        capacity: int | str,
        *,
        like: Array,
        batch: tuple[int | str, ...] = (),
        value_size: int | None = None,
    ) -> KVCache:
        """Return an empty cache.

        Parameters
        ----------
        heads, size : int
            G and D.
        capacity : int or str
            Number of tokens to allocate memory for. The memory grows as needed, except in a traced
            function, where the length is unknown: tokens beyond the capacity are lost there. A
            string, here or in `batch`, names a length that is known when a model runs only: the
            cache has no memory, and is an input of `polyattn.export.onnx`.
        like : Array
            An array of the library, device and dtype of the keys and values.
        batch : tuple of int or str
            The batch axes.
        value_size : int, optional
            E, D by default.

        Examples
        --------
        >>> import numpy as np
        >>> from polyattn import nn
        >>> token = np.ones((2, 8, 1, 64), dtype=np.float32)
        >>> cache = nn.KVCache.init(8, 64, 16, like=token, batch=(2,)).append(token, token)
        >>> cache.keys.shape
        (2, 8, 1, 64)
        """
        library_of(like, "like")
        lead: tuple[Any, ...] = (*batch, heads, capacity)
        widths = size, size if value_size is None else value_size
        if any(isinstance(length, str) for length in lead):
            shaped = [facts_of(like)._replace(shape=(*lead, width)) for width in widths]
            return cls(shaped[0], shaped[1])
        xp = library_of(like).xp
        key, value = (zeros(xp, (*lead, width), like.dtype, like) for width in widths)
        # torch.compile cannot return a Buffer.
        return cls(key, value, buffer=None if is_compiling() else Buffer(key, value, 0))

    @property
    def capacity(self) -> int:
        """Number of tokens that fit into the memory."""
        return int(self.key.shape[-2])

    @property
    def next_position(self) -> int | Array:
        """The position of the next token."""
        return self.dropped + self.length

    @property
    def keys(self) -> Array:
        """The keys, shape (..., G, length, D); where the library traces, all of the memory."""
        return self._filled(self.key)

    @property
    def values(self) -> Array:
        """The values, shape (..., G, length, E); where the library traces, all of the memory."""
        return self._filled(self.value)

    def _filled(self, memory: Array) -> Array:
        length = known(self.length)
        if is_array(length):
            return memory[..., self.first :, :] if self.first else memory
        return memory[..., self.first : self.first + length, :]

    def options(self, options: dict[str, Any]) -> dict[str, Any]:
        """Return the options for attention from the newest tokens to `keys` and `values`.

        Parameters
        ----------
        options : dict
            Further options of `polyattn.attention`.

        Returns
        -------
        dict
            `options`, with the number of keys in the memory.
        """
        if not is_array(known(self.length)):
            return options
        return {"key_lengths": self.length} | options

    def append(self, key: Array, value: Array, *, query: Array | None = None) -> KVCache:
        """Return a cache with more tokens at the end; this cache does not change.

        Parameters
        ----------
        key, value : Array
            Keys and values of n tokens, shapes (..., G, n, D) and (..., G, n, E). Under
            torch.autocast for the cache's kind of device they are cast to the dtype of the cache.
        query : Array, optional
            The queries that attend to them. If these need a gradient, nothing is overwritten.

        Returns
        -------
        KVCache

        Raises
        ------
        ValueError
            If the shapes do not fit, or the cache has no memory.
        TypeError
            If the library or dtype differs.
        """
        if isinstance(self.key, ArrayFacts):
            raise ValueError(
                f"a cache of the shape {self.key.shape} has no memory, because a string names a"
                " length: give numbers, or pass it to polyattn.export.onnx"
            )
        key, value = checked_tokens((self.key, self.value), self.key.shape[:-2], key, value)
        length = known(self.length)
        cache = self if length is self.length else replace(self, length=length)
        new = [array for array in (key, value, query) if array is not None]
        is_known = not is_array(length)
        if is_known and is_writable(new, [self.key, self.value]):
            return cache._write_to_memory(key, value)
        more = length_of(key, -2)
        if is_known and self.first + length + more > self.capacity:
            cache = cache._enlarged(more)
        return overwritten(cache, (key, value), more)

    def _write_to_memory(self, key: Array, value: Array) -> KVCache:
        more, at, cache = key.shape[-2], self.first + self.length, self
        length, buffer = self.length + more, self.buffer
        if buffer is None or at + more > self.capacity or not buffer.claim(self, at):
            cache, at = self._enlarged(more), self.length
            buffer = Buffer(cache.key, cache.value, length)
        cache.key[..., at : at + more, :] = key
        cache.value[..., at : at + more, :] = value
        # Directly: `replace` takes 18 times as long, and longer than the copy of a token.
        following = KVCache(cache.key, cache.value, length, cache.first, cache.dropped, buffer)
        buffer.ends.add(at + more)  # now that the tokens have a cache
        return following

    def _enlarged(self, more: int) -> KVCache:
        """Return a copy, its capacity doubled until more tokens fit."""
        capacity = max(self.capacity, 16)
        while capacity < self.length + more:
            capacity *= 2

        def enlarged(x: Array) -> Array:
            xp, shape = library_of(x).xp, (*x.shape[:-2], capacity - self.length, x.shape[-1])
            return xp.concat((x, zeros(xp, shape, x.dtype, x)), axis=-2)

        return replace(self, key=enlarged(self.keys), value=enlarged(self.values), first=0)

    def truncate(self, length: int) -> KVCache:
        """Return a cache of the first `length` tokens; this cache does not change.

        The next `append` copies the memory if anything else holds it, such as this cache.

        Parameters
        ----------
        length : int
            Number of tokens to keep.

        Returns
        -------
        KVCache
        """
        new, current = known(length), known(self.length)
        traced = is_array(new) or is_array(current)
        if not traced and not 0 <= check_int("length", new) <= current:
            raise ValueError(f"length must be from 0 to the cache's {current} tokens; got {length}")
        return replace(self, length=new)

    def slide(self, window: int) -> KVCache:
        """Return a cache of the newest `window` tokens; this cache does not change.

        Parameters
        ----------
        window : int
            Number of tokens to keep at most.

        Returns
        -------
        KVCache

        Raises
        ------
        ValueError
            If `window` is below 0, or the length is unknown because the library traces.
        """
        length, window = known(self.length), check_int("window", window, least=0)
        if is_array(length):
            raise ValueError(
                "inside a traced function the length of a cache is unknown, so it cannot slide;"
                " give attention window= instead"
            )
        drop = max(length - window, 0)
        cache = replace(self, length=length - drop, dropped=self.dropped + drop)
        if is_writable([self.key], [self.key, self.value]):
            return replace(cache, first=self.first + drop)
        # A traced step cannot enlarge the memory: new tokens need the room of those that go.
        xp = library_of(self.key).xp
        key, value = (xp.roll(memory, -drop, axis=-2) for memory in (self.key, self.value))
        return replace(cache, key=key, value=value)


def overwritten(cache: KVCache, rows: tuple[Array, Array], more: int | Array) -> KVCache:
    """Return a cache of new arrays with rows at its end, of which so many count."""
    pairs, at = zip((cache.key, cache.value), rows, strict=True), cache.first + cache.length
    key, value = (with_rows(memory, new, at) for memory, new in pairs)
    # A graph of gradients may hold the new arrays, so no cache may write to them.
    return replace(cache, key=key, value=value, length=cache.length + more, buffer=None)


def _batch_hint(shape: tuple[int, ...], lead: tuple[Any, ...]) -> str:
    """Return how to make a cache for a batch, if that is what lacks."""
    batch = tuple(shape[:-3])
    return f": make the cache with batch={batch}" if batch and len(lead) == 1 else ""


def checked_tokens(
    memory: tuple[Array, Array], lead: tuple[Any, ...], key: Array, value: Array
) -> tuple[Array, Array]:
    """Return keys and values (*lead, n, size) in the dtype of a memory, or raise."""
    may_differ = is_autocast_on() and _is_cast(memory[0])
    for name, new, held in (("key", key, memory[0]), ("value", value, memory[1])):
        libraries = library_of(held).name, library_of(new, name).name
        if libraries[0] != libraries[1] or not (may_differ or held.dtype == new.dtype):
            raise TypeError(
                f"{name} must be {held.dtype} of {libraries[0]}, as the cache is; got"
                f" {new.dtype} of {libraries[1]}"
            )
        size = held.shape[-1]
        fits = (*new.shape[:-2], *new.shape[-1:]) == (*lead, size) and len(new.shape) > 1
        if not (fits or _may_fit(new.shape, (*lead, None, size))):
            raise ValueError(
                f"{name} must have the shape {(*lead, 'n', size)} of the cache; got"
                f" {tuple(new.shape)}{_batch_hint(new.shape, lead)}"
            )
    if key.shape[-2] != value.shape[-2]:
        raise ValueError(
            f"there must be as many values as keys; got {key.shape[-2]} keys and"
            f" {value.shape[-2]} values"
        )
    if may_differ:
        key, value = (
            cast(library_of(held).xp, new, held.dtype)
            for new, held in zip((key, value), memory, strict=True)
        )
    return key, value


def _may_fit(shape: tuple[int | None, ...], whole: tuple[int | None, ...]) -> bool:
    """Return whether shapes differ in lengths only that are unknown in one of them."""
    if None not in shape or len(shape) != len(whole):
        return False
    return all(None in pair or pair[0] == pair[1] for pair in zip(shape, whole, strict=True))


def after(start: Any, positions: Array) -> Array:
    """Return positions counted from the next one of a cache: a number, or (B, 1) of its items."""
    return (with_rank(positions, len(start.shape)) if is_array(start) else positions) + start


def known(length: Any) -> Any:
    """Return a length as a Python integer, unless it is traced."""
    if not is_array(length) or is_compiling():
        return length
    try:
        return operator.index(length)
    except (TypeError, ValueError):  # a tracer of JAX raises it, and an input of a graph
        return length


def _is_cast(memory: Array) -> bool:
    """Return whether torch.autocast is at work where this memory is."""
    facts = facts_of(memory)
    kind = facts.device.partition(":")[0]
    return facts.library == "torch" and autocast_dtype(kind) is not None
