"""What expressions and their derivatives share.

Derivatives are evaluated over a tile, in which the gradient is 0 wherever a key is absent. What an
absent key holds may be NaN or infinite, and must reach no other gradient. Nothing is written in
place, so that torch and JAX can differentiate the derivatives again.
"""

from __future__ import annotations

from typing import Any

from polyattn.arrays import Array, cast, index_range, with_rank

__all__ = ["finite", "into_heads", "lengths", "sign", "stacked", "unit", "unit_slope", "used"]


def used(xp: Any, numbers: Array, gradient: Array) -> Array:
    """Return the numbers, 0 in place of those that are not finite and have a gradient of 0."""
    # Not wherever the gradient is 0: the second derivative may need a number there.
    return xp.where((gradient == 0) & ~xp.isfinite(numbers), 0.0, numbers)


def finite(xp: Any, vectors: Array) -> Array:
    """Return the vectors, 0 in place of entries that are not finite.

    For similarities that are not finite of such a vector: the gradient at them is 0 or NaN.
    """
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


def lengths(vectors: Array, xp: Any) -> tuple[Array, Array]:
    """Return two factors of the lengths of vectors, which are 1 for a vector of zeros."""
    ones = xp.ones_like(vectors[..., :1])
    largest = xp.max(xp.abs(vectors), axis=-1, keepdims=True)
    size = xp.where(largest == 0, ones, largest)  # so that no square overflows, or is 0
    square = xp.sum((vectors / size) * (vectors / size), axis=-1, keepdims=True)
    return size, xp.sqrt(xp.where(square == 0, ones, square))


def unit(vectors: Array, xp: Any) -> Array:
    """Divide vectors by their lengths, by way of their largest entries, whose squares may be 0."""
    if not vectors.shape[-1]:
        return vectors
    size, root = lengths(vectors, xp)
    return vectors / size / root


def unit_slope(vectors: Array, change: Array, xp: Any) -> Array:
    """Multiply changes by the derivative of `unit`, a symmetric matrix."""
    if not vectors.shape[-1]:
        return change
    size, root = lengths(vectors, xp)
    along = vectors / size / root
    return (change - along * xp.sum(along * change, axis=-1, keepdims=True)) / size / root


def stacked(
    xp: Any, of_query: list[Array], of_key: list[Array], gradient: Array
) -> tuple[Array, Array]:
    """Join the gradients of each entry of queries and of keys, of which there may be none."""
    if not of_query:
        rows, columns = gradient[..., :, :1], xp.matrix_transpose(gradient[..., :1, :])
        return rows[..., :0], columns[..., :0]
    return xp.stack(of_query, axis=-1), xp.stack(of_key, axis=-1)
