"""KVCache: the keys and values of the tokens so far, for decoding one after another.

A cache is a value: what it holds never changes. Where arrays can be written to, the next cache
shares its memory, as long as it is the only one to follow; a second one that would write to the
same place takes a copy, and so does one whose arrays came from elsewhere. Where they cannot (JAX,
a graph of gradients) it makes new arrays of the same shape, so that a compiled step is compiled
once.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field, replace
from typing import Any

from polyattn.arguments import check_int
from polyattn.arrays import Array, index_range, is_array, is_compiling, library_of, torch_transforms
from polyattn.expressions.masks import as_mask
from polyattn.masks import padding

__all__ = ["KVCache"]


class _Buffer:
    """Arrays that a cache made for itself, and how far the caches that share them wrote."""

    def __init__(self, key: Array, value: Array, filled: int) -> None:
        self.key, self.value = key, value
        self.ends = {filled}  # empty while a cache writes

    def claim(self, cache: KVCache, at: int) -> bool:
        """Return whether the cache may write from `at` on, which only one cache may."""
        if self.key is not cache.key or self.value is not cache.value:
            return False  # a cache that was made of this one, with other arrays
        try:
            self.ends.remove(at)  # atomic, so that only one thread succeeds
        except KeyError:
            return False
        return True

    def release(self, filled: int) -> None:
        """Let one cache write from `filled` on."""
        self.ends.add(filled)

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """Copy and pickle as None: nobody knows with whom the new arrays share their memory."""
        return type(None), ()


@dataclass(frozen=True, eq=False)
class KVCache:
    """Keys and values of the tokens so far.

    Attributes
    ----------
    key, value : Array
        Memory for them, shapes (..., G, capacity, D) and (..., G, capacity, E).
    length : int or Array of int
        How many tokens are held; an array of no axes where the library traces.
    first : int
        Where in the memory the first of them is.
    dropped : int
        How many came before those and are held no more.
    buffer : object, optional
        Who may write to the memory, which the caches that share it have in common. Without it the
        memory is never written to: the next cache takes a copy.
    """

    key: Array
    value: Array
    length: int | Array = 0
    first: int = 0
    dropped: int = 0
    buffer: _Buffer | None = field(default=None, repr=False, compare=False)

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
    ) -> KVCache:
        """Make memory for tokens.

        Parameters
        ----------
        heads : int
            G.
        size : int
            D.
        capacity : int
            How many tokens there is memory for. More take new memory, but where the library
            traces and nobody knows how many are held: what is beyond the capacity is lost there.
        like : Array
            An array of the library, device and dtype of the keys and values.
        batch : tuple of int
            The batch axes.
        value_size : int, optional
            E, if it is not D.

        Returns
        -------
        KVCache
            An empty one.

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
        shape = (*batch, heads, 1, 1)
        one = like[(0,) * len(like.shape)]
        one = library_of(like).xp.broadcast_to(one, shape)
        key, value = _empty(one, capacity, size), _empty(one, capacity, value_size or size)
        # torch.compile cannot return a buffer that it made.
        return cls(key, value, buffer=None if is_compiling() else _Buffer(key, value, 0))

    @property
    def capacity(self) -> int:
        """How many tokens there is memory for."""
        return int(self.key.shape[-2])

    @property
    def next_position(self) -> int | Array:
        """The position of the token that comes next."""
        return self.dropped + self.length

    @property
    def keys(self) -> Array:
        """The keys, shape (..., G, length, D); where the library traces, all of the memory."""
        return self._counted()._held(self.key)

    @property
    def values(self) -> Array:
        """The values, shape (..., G, length, E); where the library traces, all of the memory."""
        return self._counted()._held(self.value)

    def _counted(self) -> KVCache:
        """Return the same with a number for its length, where it can be known."""
        length = _known(self.length)
        return self if length is self.length else replace(self, length=length)

    def _held(self, memory: Array) -> Array:
        if is_array(self.length):
            return memory[..., self.first :, :]
        return memory[..., self.first : self.first + self.length, :]

    def options(self, new: int, given: dict[str, Any]) -> dict[str, Any]:
        """Return the options of attention to what is held, by the newest tokens.

        Parameters
        ----------
        new : int
            How many rows there are: those of the tokens that came last.
        given : dict
            What else attention is given.

        Returns
        -------
        dict
            `given`, and what hides the memory that is not filled.
        """
        if not is_array(_known(self.length)):
            return given
        held = padding(self.length)
        mask = held if given.get("mask") is None else held & as_mask(given["mask"])
        return {"query_offset": self.length - new} | given | {"mask": mask}

    def append(self, key: Array, value: Array, *, query: Array | None = None) -> KVCache:
        """Return the cache with more tokens after those that it holds.

        Parameters
        ----------
        key, value : Array
            Theirs, shapes (..., G, n, D) and (..., G, n, E).
        query : Array, optional
            The queries that meet them: where these have a gradient, what they met must stay.

        Returns
        -------
        KVCache
            The next one; this one holds what it held.

        Raises
        ------
        ValueError
            If the shapes do not fit.
        TypeError
            If the library or dtype is another.
        """
        for name, new, memory in (("key", key, self.key), ("value", value, self.value)):
            own, its = library_of(memory).name, library_of(new, name).name
            if (own, memory.dtype) != (its, new.dtype):
                raise TypeError(
                    f"{name} must be {memory.dtype} of {own}, as the cache is; got {new.dtype} of"
                    f" {its}"
                )
            *lead, _, size = memory.shape
            if (*new.shape[:-2], *new.shape[-1:]) != (*lead, size) or len(new.shape) < 2:
                raise ValueError(
                    f"{name} must have the shape {(*lead, 'n', size)} of the cache; got"
                    f" {tuple(new.shape)}"
                )
        if key.shape[-2] != value.shape[-2]:
            raise ValueError(
                f"there must be as many values as keys; got {key.shape[-2]} keys and"
                f" {value.shape[-2]} values"
            )
        cache = self._counted()
        new = [array for array in (key, value, query) if array is not None]
        if is_array(cache.length) or not _is_writable(new, [self.key, self.value]):
            return cache._joined_anew(key, value)
        return cache._written(key, value)

    def _written(self, key: Array, value: Array) -> KVCache:
        assert isinstance(self.length, int)
        more, at, cache = key.shape[-2], self.first + self.length, self
        if self.buffer is None or at + more > self.capacity or not self.buffer.claim(self, at):
            cache, at = self._moved(more), self.length
        cache.key[..., at : at + more, :] = key
        cache.value[..., at : at + more, :] = value
        assert cache.buffer is not None
        cache.buffer.release(at + more)
        return replace(cache, length=self.length + more)

    def _moved(self, more: int) -> KVCache:
        """Return the same in memory of its own, with room for more, which nobody else may fill."""
        assert isinstance(self.length, int)
        room, memory = self._room(more), []
        for held in (self.keys, self.values):
            new = _empty(held, room, held.shape[-1])
            new[..., : self.length, :] = held
            memory.append(new)
        buffer = _Buffer(memory[0], memory[1], self.length + more)
        return replace(self, key=memory[0], value=memory[1], first=0, buffer=buffer)

    def _joined_anew(self, key: Array, value: Array) -> KVCache:
        """Return a cache of new arrays of the same shape, made without writing to any."""
        more, cache = key.shape[-2], self
        if not is_array(self.length) and self.first + self.length + more > self.capacity:
            cache = self._moved_anew(more)
        memory = [
            _with_rows(held, new, cache.first + cache.length)
            for held, new in ((cache.key, key), (cache.value, value))
        ]
        length = cache.length + more
        # A graph of gradients may hold the new arrays, so that nobody may write to them.
        return replace(cache, key=memory[0], value=memory[1], length=length, buffer=None)

    def _moved_anew(self, more: int) -> KVCache:
        """Return the same in arrays of its own, with room for more, without writing to any."""
        assert isinstance(self.length, int)
        xp, room = library_of(self.key).xp, self._room(more) - self.length
        key, value = (
            xp.concat((held, _empty(held, room, held.shape[-1])), axis=-2)
            for held in (self.keys, self.values)
        )
        return replace(self, key=key, value=value, first=0, buffer=None)

    def _room(self, more: int) -> int:
        """Return how many tokens to make room for, so that these and more fit."""
        assert isinstance(self.length, int)
        room = max(self.capacity, 16)
        while room < self.length + more:
            room *= 2
        return room

    def truncate(self, length: int) -> KVCache:
        """Return the cache of the first `length` of the tokens that it holds.

        Parameters
        ----------
        length : int
            How many to keep.

        Returns
        -------
        KVCache
            The next one; this one holds what it held.
        """
        kept, held = _known(length), _known(self.length)
        if is_array(kept) or is_array(held):
            return replace(self, length=kept)
        if not 0 <= check_int("length", kept) <= held:
            raise ValueError(f"there are {held} tokens to keep; got {length}")
        return replace(self, length=kept)

    def slide(self, window: int) -> KVCache:
        """Return the cache of the newest tokens, `window` of them at most.

        Parameters
        ----------
        window : int
            How many to keep.

        Returns
        -------
        KVCache
            The next one; this one holds what it held.

        Raises
        ------
        ValueError
            If it is below 0, or the library traces, so that nobody knows how many there are.
        """
        held = _known(self.length)
        if check_int("window", window) < 0:
            raise ValueError(f"window must be at least 0; got {window}")
        if is_array(held):
            raise ValueError(
                "inside a traced function nobody knows how many tokens a cache holds, so that it"
                " cannot slide there; give attention window= instead"
            )
        over = max(held - window, 0)
        return replace(
            self, first=self.first + over, length=held - over, dropped=self.dropped + over
        )


def _empty(like: Array, room: int, width: int) -> Array:
    """Return an array of zeros for so many tokens, of its own memory."""
    xp = library_of(like).xp
    zero = xp.reshape(index_range(xp, 0, 1, like), (1,) * len(like.shape)) * 0
    whole = xp.broadcast_to(zero, (*like.shape[:-2], room, width))
    return xp.astype(whole, like.dtype)  # always a copy


def _with_rows(memory: Array, rows: Array, at: int | Array) -> Array:
    """Return `memory` with `rows` in place of those from `at` on."""
    xp = library_of(memory).xp
    places = index_range(xp, 0, memory.shape[-2], memory) - at
    last = rows.shape[-2] - 1
    new = (places >= 0) & (places <= last)
    chosen = xp.where(new, places, xp.zeros_like(places))
    spread = xp.take(rows, chosen, axis=-2)
    return xp.where(new[:, None], spread, memory)


def _known(length: Any) -> Any:
    """Return a length as a number, unless it is traced."""
    if not is_array(length) or is_compiling():
        return length
    try:
        return operator.index(length)
    except TypeError:  # a tracer of JAX says so too
        return length


def _is_writable(new: list[Array], memory: list[Array]) -> bool:
    """Whether rows can be written into memory without a trace or a graph losing sight of them."""
    library = library_of(memory[0])
    if library.name != "torch":
        return library.name in ("numpy", "cupy")
    if is_compiling() or torch_transforms():
        return False
    # Memory of inference mode takes nothing from outside of it.
    outside = any(held.is_inference() for held in memory) and not new[0].is_inference()
    return not (outside or any(array.requires_grad for array in (*new, *memory)))
