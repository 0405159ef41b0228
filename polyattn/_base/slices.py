"""Slices of an axis, whose start is a number, or an array where it is traced; equal parts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from polyattn._base.arrays import Array, index_range, library_of


class Slice(NamedTuple):
    """Some entries along an axis."""

    start: Any  #: the first, a number, or an array where the library traces it
    length: int

    @property
    def stop(self) -> Any:
        """The one after the last."""
        return self.start + self.length


def take(array: Array, axis: int, start: Any, length: int) -> Array:
    """Return `length` entries of an array along an axis; an axis of that length as it is."""
    axis %= len(array.shape)
    if array.shape[axis] == length:
        return array
    if isinstance(start, int):
        return array[(*(slice(None),) * axis, slice(start, start + length), ...)]
    library = library_of(array)
    if library.name != "jax":
        return library.xp.take(array, index_range(library.xp, 0, length, array) + start, axis=axis)
    from jax import lax

    return lax.dynamic_slice_in_dim(array, start, length, axis)


def place(block: Array, axis: int, start: Any, length: int) -> Array:
    """Return an array of this length along an axis, 0 but for a block: the transpose of `take`."""
    axis %= len(block.shape)
    if block.shape[axis] == length:
        return block
    if not isinstance(start, int):
        from jax import lax

        return lax.dynamic_update_slice_in_dim(_zeros(block, axis, length), block, start, axis)
    ends = (start, length - start - block.shape[axis])
    before, after = (_zeros(block, axis, end) for end in ends)
    return library_of(block).xp.concat([before, block, after], axis=axis)


def _zeros(like: Array, axis: int, length: int) -> Array:
    xp, shape = library_of(like).xp, list(like.shape)
    shape[axis] = length
    # From the block itself, so that it is on the same device, and in JAX on the same mesh axes.
    first = take(like, axis, 0, 1)
    return xp.zeros_like(xp.broadcast_to(first, tuple(shape)))


def split(array: Array, count: int, axis: int = -2) -> list[Array]:
    """Return equal parts of an array along an axis."""
    if count == 1:
        return [array]
    length = array.shape[axis] // count
    return spans(array, [(n * length, length) for n in range(count)], axis)


def spans(array: Array, given: Sequence[tuple[int, int]], axis: int = 0) -> list[Array]:
    """Return non-overlapping spans (start, length) of an axis, in order.

    By a split where the library has it: a split has one gradient, where each slice has an array of
    zeros as long as the whole.
    """
    library, axis = library_of(array), axis % len(array.shape)
    edges = [edge for start, length in given for edge in (start, start + length)]
    if library.name == "torch":
        sizes = [stop - start for start, stop in pairwise((0, *edges, array.shape[axis]))]
        return list(array.split(sizes, axis)[1::2])
    if hasattr(library.xp, "split"):
        return list(library.xp.split(array, edges, axis)[1::2])
    return [take(array, axis, start, length) for start, length in given]


def joined(parts: Sequence[Array], axis: int = -2) -> Array:
    """Return the concatenation of parts."""
    return parts[0] if len(parts) == 1 else library_of(parts[0]).xp.concat(list(parts), axis=axis)
