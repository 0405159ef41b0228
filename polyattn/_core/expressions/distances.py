"""Euclidean distances of queries and keys, by a matrix product where that is as exact."""

from __future__ import annotations

import math
from functools import partial

from polyattn._base.arrays import Array
from polyattn._core.expressions.derivatives import Primitives, by_rows, joined

# A square q² + k² − 2q·k that is less than 1 part in so many of q² + k² has lost digits.
NEAR = 4
# With vectors of fewer numbers, a sum over their entries takes no longer than the product.
LEAST_SIZE = 16


def distances(query: Array, key: Array, backend: Primitives) -> Array:
    """Return the distance of each query and key."""
    xp, rows, keys = backend.xp, query.shape[-2], key.shape[-2]
    if backend.is_plain(query, key) and rows and keys and query.shape[-1] >= LEAST_SIZE:
        if rows > 1:
            return _by_product(query, key, backend)
        change = query - key
        return xp.sqrt(xp.vecdot(change, change))[..., None, :]
    return joined(xp, by_rows(backend, partial(_by_entries, backend), query, key))


def _by_entries(backend: Primitives, query: Array, key: Array) -> Array:
    xp, square = backend.xp, _square(backend, query, key)
    # The slope of the root is infinite at 0; its gradient is defined as 0 there.
    far = square > 0
    root = xp.sqrt(xp.where(far, square, xp.ones_like(square)))
    return xp.where(far, root, square)


def _square(backend: Primitives, query: Array, key: Array) -> Array:
    """Return the squares of distances, by differences."""
    return backend.over_size(lambda d, q, k: (q - k) ** 2, query, key)


def _by_product(query: Array, key: Array, backend: Primitives) -> Array:
    """Return distances of plain arrays, by differences where vectors are close together."""
    xp = backend.xp
    of_query, of_key = (xp.vecdot(x, x)[..., None] for x in (query, key))
    # In one product, and then in place: each array as large as the scores costs much time.
    left = xp.concat([-2 * query, of_query, xp.ones_like(of_query)], axis=-1)
    right = xp.concat([key, xp.ones_like(of_key), of_key], axis=-1)
    square = backend.matmul(left, xp.matrix_transpose(right))
    farthest = xp.max(of_key, axis=-2, keepdims=True)
    if not xp.all(xp.min(square, axis=-1, keepdims=True) * NEAR > of_query + farthest):
        near = ~(square * NEAR > of_query + xp.matrix_transpose(of_key))
        square[near] = _near_squares(near, query, key, backend)
    square **= 0.5
    return square


def _near_squares(near: Array, query: Array, key: Array, backend: Primitives) -> Array:
    """Return the squares of the distances where `near` is True, in the order of its entries."""
    xp = backend.xp
    if int(xp.count_nonzero(near)) * query.shape[-1] > math.prod(near.shape):
        return joined(xp, by_rows(backend, partial(_square, backend), query, key))[near]
    *batch, rows, columns = xp.nonzero(near)
    query, key = (xp.broadcast_to(x, (*near.shape[:-2], *x.shape[-2:])) for x in (query, key))
    query, key = query[(*batch, rows)], key[(*batch, columns)]
    return _square(backend, query[:, None, :], key[:, None, :])[:, 0, 0]
