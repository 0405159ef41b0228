"""What runs on a worker for the gradients: the shares of some pairs of chunks, and their sums."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from polyattn.plugin import Array, Expression, Gradients, Part
from polyattn_dask.tasks import Blocks, Pieces, front, zeros

#: Output and logsumexp, and their gradients, of a block of query rows.
Results = Sequence[Array | None]


@dataclass(frozen=True)
class PullBack:
    """The shares of a block of query rows and some chunks of keys in all gradients."""

    pieces: Pieces
    along_keys: dict[str, int]  # the axis of the keys of the gradients that have one

    def __call__(
        self,
        query: Array,
        keys: Blocks,
        values: Blocks,
        leaves: Sequence[Blocks],
        results: Results,
    ) -> dict[str, Any]:
        """Return the sum of the shares of each gradient, or one share for each chunk of keys."""
        found: dict[str, Any] = {}
        with front().use_threads(1):
            for key, value, _, options in self.pieces.of(keys, values, leaves):
                for name, share in _shares(query, key, value, results, options).items():
                    if name in self.along_keys:
                        found.setdefault(name, []).append(share)
                    else:
                        found[name] = found[name] + share if name in found else share
        lengths = [part.columns.length for part in self.pieces.parts]
        for name, axis in self.along_keys.items():
            if len(found[name]) < len(lengths):  # all keys were given at once
                found[name] = _split(found[name][0], lengths, axis)
        return found


@dataclass(frozen=True)
class PullBackUnseen:
    """The share in the gradient of the sinks of query rows that see no key."""

    pieces: Pieces
    part: Part

    def __call__(self, query: Array, sinks: Array, results: Results) -> dict[str, Any]:
        """Return it."""
        key, value, options = self.pieces.empty(query, self.part, sinks)
        return {"sinks": _shares(query, key, value, results, options)["sinks"]}


def _shares(
    query: Array, key: Array, value: Array, results: Results, options: dict[str, Any]
) -> dict[str, Any]:
    """Return the gradients of one call, by name."""
    polyattn = front()
    output, logsumexp, of_output, of_logsumexp = results
    found: Gradients = polyattn.attention_backward(
        query,
        key,
        value,
        polyattn.Partial(output, logsumexp),
        of_output,
        logsumexp_gradient=of_logsumexp,
        into=Gradients(),
        **options,
    )
    shares: dict[str, Any] = {}
    for name, share in zip(found._fields, found, strict=True):
        if isinstance(share, Expression):
            arrays = [thing for _, thing in share.carried() if hasattr(thing, "shape")]
            shares |= {f"{name}.{n}": array for n, array in enumerate(arrays)}
        elif share is not None:
            shares[name] = share
    return shares


def _split(array: Array, lengths: Sequence[int], axis: int) -> list[Array]:
    """Return the parts of an array along an axis."""
    found, first = [], 0
    for length in lengths:
        index = [slice(None)] * array.ndim
        index[axis] = slice(first, first + length)
        found.append(array[tuple(index)])
        first += length
    return found


@dataclass(frozen=True)
class Pick:
    """One share of the result of `PullBack`: that of a chunk of keys, or of all of them."""

    name: str
    number: int | None

    def __call__(self, shares: dict[str, Any]) -> Array:
        """Return it."""
        share = shares[self.name]
        return share if self.number is None else share[self.number]


def add(shares: Sequence[Array]) -> Array:
    """Return the sum of shares."""
    return functools.reduce(operator.add, shares)


@dataclass(frozen=True)
class Nothing:
    """A gradient to which no row adds."""

    dtype: str
    shape: tuple[int, ...]

    def __call__(self, like: Array) -> Array:
        """Return zeros."""
        return zeros(self.shape, self.dtype, like)
