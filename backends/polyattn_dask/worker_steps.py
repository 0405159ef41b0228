"""The steps that a worker runs: attention over some chunks of keys, its gradients, and their sums.

A step is an object without arrays, called with the chunks. It calls polyattn's public functions on
them, so that the library of the chunks computes, in one thread: dask has threads of its own. The
graphs that `forward`, `backward` and `chunk_weights` make of steps are drawn in the first two.
"""

from __future__ import annotations

import functools
import importlib
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from array_api_compat import array_namespace, device

from polyattn._base.arrays import is_array
from polyattn._base.slices import Slice
from polyattn._core.call.parts import options_of_part
from polyattn._core.expressions.parts import Part
from polyattn.plugin import Array, Expression, Gradients, joined, split

Blocks = Sequence[Array]


class ChunkCall(NamedTuple):
    """The arguments of one call of polyattn."""

    key: Array
    value: Array | None  # None for weights
    first: int  # the place of the first key in the whole call
    options: dict[str, Any]


def front() -> Any:
    """Return polyattn, which a worker imports when it runs a step."""
    return importlib.import_module("polyattn")


@dataclass(frozen=True)
class Zeros:
    """A block of zeros: a gradient without shares, or keys and values of no key."""

    dtype: str
    shape: tuple[int, ...]

    def __call__(self, like: Array) -> Array:
        """Return zeros of the library of another array, on its device."""
        xp = array_namespace(like)
        return xp.zeros(self.shape, dtype=getattr(xp, self.dtype, like.dtype), device=device(like))


def add(shares: Sequence[Array]) -> Array:
    """Return the sum of shares."""
    return functools.reduce(operator.add, shares)


def _joined(blocks: Blocks, axis: int) -> Array:
    return array_namespace(blocks[0]).concat(list(blocks), axis=axis)


@dataclass(frozen=True)
class Calls:
    """The calls that a step makes, one for each chunk of keys; without chunks one without keys."""

    options: dict[str, Any]  # the skeletons of those of the whole call
    whole_rows: bool  # whether a call needs all the keys of its rows at once
    rows: Part  # with all keys
    columns: tuple[Slice, ...]  # of each chunk
    along_keys: tuple[int | None, ...]  # for each array of an option, its axis of the keys
    sinks: bool  # whether the sinks count here
    sizes: tuple[int, int]  # D and E

    def of(
        self, query: Array, keys: Blocks, values: Blocks, arrays: Sequence[Blocks]
    ) -> Iterator[ChunkCall]:
        """Yield the arguments of each call; an array of an option has one block, or one a chunk."""
        columns = self.columns
        if not columns:
            yield self._without_keys(query, arrays)
            return
        if self.whole_rows and len(columns) > 1:
            columns = (Slice(columns[0].start, columns[-1].stop - columns[0].start),)
            keys, values = ([_joined(x, -2)] if x else [] for x in (keys, values))
            arrays = [
                blocks if axis is None else [_joined(blocks, axis)]
                for blocks, axis in zip(arrays, self.along_keys, strict=True)
            ]
        for n, part in enumerate(columns):
            own = iter(
                blocks[0 if axis is None else n]
                for blocks, axis in zip(arrays, self.along_keys, strict=True)
            )
            options = self._options(part, own) | {"backend": "auto"}
            if n or not self.sinks:
                options.pop("sinks", None)
            yield ChunkCall(keys[n], values[n] if values else None, part.start, options)

    def _options(self, columns: Slice, arrays: Iterator[Array]) -> dict[str, Any]:
        options = {name: joined(skeleton, arrays) for name, skeleton in self.options.items()}
        offset: Any = options.get("query_offset")
        if getattr(offset, "shape", ()):  # with the axes of the scores, as a kernel gets it
            options["query_offset"] = offset.reshape(offset.shape[:-3])
        return options_of_part(options, self.rows._replace(columns=columns))

    def _without_keys(self, query: Array, arrays: Sequence[Blocks]) -> ChunkCall:
        lead = (*(span.length for span in self.rows.items), min(1, query.shape[-3]), 0)
        key, value = (Zeros(str(query.dtype), (*lead, size))(query) for size in self.sizes)
        options: dict[str, Any] = {"backend": "auto"}
        if arrays:
            options["sinks"] = arrays[0][0]
        return ChunkCall(key, value, 0, options)


# ---- attention -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class AttendStep:
    """Attention of a block of query rows over some chunks of keys."""

    calls: Calls
    result: str  # "partial" to be joined, "both" or "output"
    dtype: str  # of the output
    joined: str  # of a partial that is to be joined

    def __call__(self, query: Array, keys: Blocks, values: Blocks, arrays: Sequence[Blocks]) -> Any:
        """Return the partial, or what the caller gets."""
        polyattn = front()
        calls = list(self.calls.of(query, keys, values, arrays))
        alone = len(calls) == 1
        with polyattn.use_threads(1):
            if alone and self.result == "output":
                call = calls[0]
                return polyattn.attention(query, call.key, call.value, **call.options)
            is_last = alone and self.result == "both"
            dtype = None if is_last or self.joined == self.dtype else self.joined
            total = None
            for key, value, _, options in calls:
                value = key[..., :0] if value is None else value
                partial = polyattn.attention_partial(query, key, value, dtype=dtype, **options)
                total = partial if total is None else polyattn.merge(total, partial)
            return _finished(total, self.result, self.dtype)


@dataclass(frozen=True)
class JoinStep:
    """The join of partials."""

    result: str
    dtype: str

    def __call__(self, partials: Sequence[Any]) -> Any:
        """Return a partial, or what the caller gets."""
        return _finished(functools.reduce(front().merge, partials), self.result, self.dtype)


def _finished(partial: Any, result: str, dtype: str) -> Any:
    """Return a partial over all keys as the result that a step is to give."""
    if result == "partial":
        return partial
    output = partial.output
    if str(output.dtype) != dtype:
        xp = array_namespace(output)
        output = xp.astype(output, getattr(xp, dtype, dtype))
    return output if result == "output" else partial._replace(output=output)


# ---- weights -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WeighStep:
    """The weights of a block of query rows over some chunks of keys."""

    calls: Calls
    look: dict[str, Any]  # ``top`` or ``per_key``, as of `polyattn.attention_weights`

    def __call__(
        self,
        query: Array,
        keys: Blocks,
        values: Blocks,
        arrays: Sequence[Blocks],
        logsumexp: Array | None,
    ) -> Any:
        """Return the weights, their sums, or the largest ones with their keys."""
        top, found = self.look.get("top"), None
        with front().use_threads(1):
            for key, _, first, options in self.calls.of(query, keys, values, arrays):
                options |= self.look | ({"top": min(top, key.shape[-2])} if top else {})
                here = front().attention_weights(query, key, logsumexp=logsumexp, **options)
                if top is None:
                    return here
                here = here.weights, here.keys + first
                found = here if found is None else TopStep(top)([found, here])
        return found


@dataclass(frozen=True)
class TopStep:
    """The largest weights of each row, of those that are the largest over parts of the keys."""

    top: int

    def __call__(self, found: Sequence[tuple[Array, Array]]) -> tuple[Array, Array]:
        """Return weights and keys."""
        xp = array_namespace(found[0][0])
        weights, keys = (_joined(x, -1) for x in zip(*found, strict=True))
        order = xp.argsort(weights, axis=-1, descending=True)[..., : self.top]
        return tuple(xp.take_along_axis(x, order, axis=-1) for x in (weights, keys))


# ---- gradients -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class PullBackStep:
    """The shares of a block of query rows and some chunks of keys in all gradients."""

    calls: Calls
    along_keys: dict[str, int]  # the axis of the keys of the gradients that have one

    def __call__(
        self,
        query: Array,
        keys: Blocks,
        values: Blocks,
        arrays: Sequence[Blocks],
        results: Sequence[Array | None],
    ) -> dict[tuple[str, int | None], Array]:
        """Return the share of each chunk of keys, by its number, and those of no chunk by None."""
        # `results` are output and logsumexp, and their gradients.
        found: dict[tuple[str, int | None], Array] = {}
        columns = self.calls.columns
        with front().use_threads(1):
            for n, call in enumerate(self.calls.of(query, keys, values, arrays)):
                for name, share in _shares(query, call, results).items():
                    axis = self.along_keys.get(name)
                    if axis is None:
                        total = found.get((name, None))
                        found[name, None] = share if total is None else total + share
                    elif self.calls.whole_rows:  # all keys were given at once
                        for m, span in enumerate(columns):
                            along = slice(span.start - call.first, span.stop - call.first)
                            found[name, m] = share[(..., along, *[slice(None)] * (-1 - axis))]
                    else:
                        found[name, n] = share
        return found


def _shares(query: Array, call: ChunkCall, results: Sequence[Array | None]) -> dict[str, Any]:
    """Return the gradients of one call, by name."""
    polyattn = front()
    output, logsumexp, of_output, of_logsumexp = results
    gradients: Gradients = polyattn.attention_backward(
        *(query, call.key, call.value, polyattn.Partial(output, logsumexp), of_output),
        logsumexp_gradient=of_logsumexp,
        into=Gradients(),
        **call.options,
    )
    shares: dict[str, Any] = {}
    for name, share in zip(gradients._fields, gradients, strict=True):
        if isinstance(share, Expression):
            arrays = split(share, is_array)[1]
            shares |= {f"{name}.{n}": array for n, array in enumerate(arrays)}
        elif share is not None:
            shares[name] = share
    return shares
