"""What runs on a worker: attention over some chunks of keys, and the joins of such results.

A step is an object without arrays, called with the chunks. It calls the front door of polyattn on
them, so that the library of the chunks computes, in one thread: dask has threads of its own.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from array_api_compat import array_namespace, device

from polyattn.plugin import Array, Part, Slice
from polyattn_dask.template import Template

Blocks = Sequence[Array]


def front() -> Any:
    """Return polyattn, whose functions are called here, much later than a kernel is chosen."""
    return importlib.import_module("polyattn")


def zeros(shape: tuple[int, ...], dtype: str, like: Array) -> Array:
    """Return zeros of the library of another array, on its device."""
    xp = array_namespace(like)
    return xp.zeros(shape, dtype=getattr(xp, dtype, like.dtype), device=device(like))


def cast(array: Array, dtype: str) -> Array:
    """Return an array in a dtype, named as in `Problem`."""
    if str(array.dtype) == dtype:
        return array
    xp = array_namespace(array)
    return xp.astype(array, getattr(xp, dtype, dtype))


@dataclass(frozen=True)
class Pieces:
    """The arguments of the calls that a step makes, one for each chunk of keys."""

    template: Template
    parts: tuple[Part, ...]  # of each chunk, in the order in which the chunks are given
    along_keys: tuple[int | None, ...]  # for each leaf, its axis of the keys
    sinks: bool  # whether the sinks count here
    sizes: tuple[int, int]  # D and E

    def of(self, keys: Blocks, values: Blocks, leaves: Sequence[Blocks]) -> Any:
        """Yield key, value, part and options of each call; a leaf has one chunk or one for each."""
        parts, template = self.parts, self.template
        if template.whole_rows and len(parts) > 1:
            first, last = parts[0].columns.start, parts[-1].columns.stop
            parts = (parts[0]._replace(columns=Slice(first, last - first)),)
            keys, values = ([_joined(x, -2)] if x else [] for x in (keys, values))
            leaves = [
                blocks if axis is None else [_joined(blocks, axis)]
                for blocks, axis in zip(leaves, self.along_keys, strict=True)
            ]
        for n, part in enumerate(parts):
            own = [
                blocks[0 if axis is None else n]
                for blocks, axis in zip(leaves, self.along_keys, strict=True)
            ]
            options = template.options(part, own) | {"backend": "auto"}
            if n or not self.sinks:
                options.pop("sinks", None)
            yield keys[n], values[n] if values else None, part, options

    def empty(self, query: Array, part: Part, sinks: Array | None) -> Any:
        """Return key, value and options of a call in which no row sees a key."""
        batch = tuple([span.length for span in part.items])
        head = min(1, query.shape[-3])
        key, value = (
            zeros((*batch, head, 0, size), str(query.dtype), query) for size in self.sizes
        )
        return key, value, {"backend": "auto"} | ({} if sinks is None else {"sinks": sinks})


def _joined(blocks: Blocks, axis: int) -> Array:
    return array_namespace(blocks[0]).concat(list(blocks), axis=axis)


@dataclass(frozen=True)
class Attend:
    """Attention of a block of query rows over some chunks of keys."""

    pieces: Pieces
    result: str  # "partial" to be joined, "both" or "output"
    dtype: str  # of the output
    joined: str  # of a partial that is to be joined

    def __call__(self, query: Array, keys: Blocks, values: Blocks, leaves: Sequence[Blocks]) -> Any:
        """Return the partial, or what the caller gets."""
        polyattn = front()
        calls = list(self.pieces.of(keys, values, leaves))
        with polyattn.use_threads(1):
            if len(calls) == 1 and self.result == "output":
                key, value, _, options = calls[0]
                return polyattn.attention(query, key, value, **options)
            alone = len(calls) == 1 and self.result == "both"
            dtype = {} if alone or self.joined == self.dtype else {"dtype": self.joined}
            total = None
            for key, value, _, options in calls:
                value = key[..., :0] if value is None else value
                partial = polyattn.attention_partial(query, key, value, **options, **dtype)
                total = partial if total is None else polyattn.merge(total, partial)
            return finished(total, self.result, self.dtype)


@dataclass(frozen=True)
class Unseeing:
    """The result of a block of query rows that sees no key."""

    pieces: Pieces
    part: Part
    result: str

    def __call__(self, query: Array, sinks: Array | None = None) -> Any:
        """Return what the caller gets."""
        polyattn = front()
        key, value, options = self.pieces.empty(query, self.part, sinks)
        with polyattn.use_threads(1):
            if self.result == "output":
                return polyattn.attention(query, key, value, **options)
            return polyattn.attention_partial(query, key, value, **options)


@dataclass(frozen=True)
class Join:
    """The join of partials."""

    result: str
    dtype: str

    def __call__(self, partials: Sequence[Any]) -> Any:
        """Return a partial, or what the caller gets."""
        return finished(functools.reduce(front().merge, partials), self.result, self.dtype)


def finished(partial: Any, result: str, dtype: str) -> Any:
    """Return what is asked of a partial over all keys."""
    if result == "partial":
        return partial
    output = cast(partial.output, dtype)
    return output if result == "output" else partial._replace(output=output)
