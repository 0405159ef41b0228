"""What expressions and their derivatives share.

Derivatives are evaluated over a tile, in which the gradient is 0 wherever a key is absent. An
absent key may hold NaN or infinity, which must not reach another gradient. No array is changed in
place, so torch and JAX can differentiate the derivatives again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from polyattn._base.arrays import Array, cast, index_range, with_rank

Primitives = Any  # `BackendPrimitives`, whose module imports the expressions


def used(xp: Any, numbers: Array, gradient: Array) -> Array:
    """Return the numbers, 0 in place of those that are not finite and have a gradient of 0."""
    # Not wherever the gradient is 0: the second derivative may need a number there.
    return xp.where((gradient == 0) & ~xp.isfinite(numbers), 0.0, numbers)


def finite(xp: Any, vectors: Array) -> Array:
    """Return the vectors, 0 in place of entries that are not finite."""
    return xp.where(xp.isfinite(vectors), vectors, 0.0)


def sign(xp: Any, numbers: Array) -> Array:
    """Return the sign of each number, 0 of NaN."""
    # array-api-compat's sign writes into an array of torch's.
    return cast(xp, numbers > 0, numbers.dtype) - cast(xp, numbers < 0, numbers.dtype)


def into_heads(xp: Any, numbers: Array, heads: Array, count: int) -> Array:
    """Return the numbers (..., h) of some query heads as (..., `count`), 0 for other heads."""
    numbers = numbers[..., None]
    place = xp.reshape(heads, (-1, 1)) == with_rank(index_range(xp, 0, count, numbers), 2)
    return xp.sum(xp.where(with_rank(place, len(numbers.shape)), numbers, 0.0), axis=-2)


def lengths(vectors: Array, backend: Primitives) -> tuple[Array | None, Array]:
    """Return two factors of the lengths of vectors, 1 for zeros; None for a first factor of 1."""
    xp = backend.xp
    if not backend.is_plain(vectors):
        return _scaled(vectors, xp)[1:]
    # Without division: cosines of 512 keys are 1.1 times as fast, of 4096 keys for one row 7 times.
    square = xp.vecdot(vectors, vectors)[..., None]
    low = float(xp.finfo(square.dtype).smallest_normal) ** 0.5
    lost = ~((square > low) & (square < 1 / low))  # squares of entries overflow, or are 0
    root = xp.sqrt(square)
    if not xp.any(lost):
        return None, root
    size = xp.ones_like(root)
    _, of_lost, root_of_lost = _scaled(vectors[lost[..., 0]], xp)
    size[lost], root[lost] = of_lost[:, 0], root_of_lost[:, 0]
    return size, root


def over_lengths(vectors: Array, backend: Primitives) -> tuple[Array, Array]:
    """Return vectors and the numbers by which to divide them, so that their lengths are 1."""
    if not backend.is_plain(vectors):
        scaled, _, root = _scaled(vectors, backend.xp)
        return scaled, root
    size, root = lengths(vectors, backend)
    return vectors if size is None else vectors / size, root


def unit(vectors: Array, backend: Primitives) -> Array:
    """Divide vectors by their lengths."""
    if not vectors.shape[-1]:
        return vectors
    vectors, root = over_lengths(vectors, backend)
    return vectors / root


def unit_slope(vectors: Array, change: Array, xp: Any) -> Array:
    """Multiply changes by the derivative of `unit`, a symmetric matrix."""
    if not vectors.shape[-1]:
        return change
    scaled, size, root = _scaled(vectors, xp)
    along = scaled / root
    return (change - along * xp.sum(along * change, axis=-1, keepdims=True)) / size / root


def _scaled(vectors: Array, xp: Any) -> tuple[Array, Array, Array]:
    """Return vectors over their largest entries, these, and the lengths of the first."""
    # Each array as large as the vectors costs more time than its numbers: there are two.
    highest, lowest = (f(vectors, axis=-1, keepdims=True) for f in (xp.max, xp.min))
    largest = xp.maximum(highest, -lowest)
    ones = xp.ones_like(largest)
    size = xp.where(largest == 0, ones, largest)  # so that no square overflows, or is 0
    scaled = vectors / size
    square = xp.sum(scaled * scaled, axis=-1, keepdims=True)
    return scaled, size, xp.sqrt(xp.where(square == 0, ones, square))


def stacked(
    xp: Any, of_query: list[Array], of_key: list[Array], gradient: Array
) -> tuple[Array, Array]:
    """Join the gradients of each entry of queries and of keys, of which there may be none."""
    if not of_query:
        rows, columns = gradient[..., :, :1], xp.matrix_transpose(gradient[..., :1, :])
        return rows[..., :0], columns[..., :0]
    return xp.stack(of_query, axis=-1), xp.stack(of_key, axis=-1)


def by_rows(
    backend: Primitives, function: Callable[..., Any], query: Array, key: Array, *more: Array
) -> list[Any]:
    """Call a function with each block of rows of the queries and of `more`, and all keys."""
    blocks = backend.row_blocks(query, key)
    if len(blocks) == 1:
        return [function(query, key, *more)]
    # Distances of p = 1 are 1.7 times as fast by blocks, others and sparsemax 1.2 times.
    # A pass reads one entry of all keys, which must be contiguous.
    key = _contiguous_entries(key, backend.xp)
    cut = [[array[..., i.start : i.stop, :] for array in (query, *more)] for i in blocks]
    return [function(query, key, *more) for query, *more in cut]


def joined(xp: Any, blocks: Sequence[Array]) -> Array:
    """Return blocks of rows as one array."""
    return blocks[0] if len(blocks) == 1 else xp.concat(blocks, axis=-2)


def _contiguous_entries(vectors: Array, xp: Any) -> Array:
    """Return vectors (..., n, D) in memory with the axes (..., D, n)."""
    size = vectors.shape[-1]
    entries = [vectors[..., d] for d in range(size)]
    return xp.matrix_transpose(xp.stack(entries, axis=-2)) if size else vectors
