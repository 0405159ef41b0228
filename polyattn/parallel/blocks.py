"""Equal blocks of an array along one axis."""

from __future__ import annotations

from collections.abc import Sequence

from polyattn._base.arrays import Array, library_of
from polyattn._base.slices import take


def split(array: Array, count: int, axis: int = -2) -> list[Array]:
    """Return equal parts of an array along an axis."""
    length = array.shape[axis] // count
    return [take(array, axis, n * length, length) for n in range(count)]


def joined(parts: Sequence[Array], axis: int = -2) -> Array:
    """Return the concatenation of parts."""
    return parts[0] if len(parts) == 1 else library_of(parts[0]).xp.concat(list(parts), axis=axis)
