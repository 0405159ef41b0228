"""What is summed over keys: weights, weights · values, and how sums of separate keys join."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from polyattn.plugin import Array
from polyattn_numpy.scratch import has_small_products

__all__ = ["Running", "join", "spoilt_product", "weighted_sum"]

# Multiply-adds of a product that is small.
SMALL_PRODUCT = 2**19


class Running(NamedTuple):
    """Σ w·v, the reference r and Σ w of each row, where w = exp(s − r)."""

    output: Array  # (b, k, rows · g, E)
    reference: Array  # (b, k, rows · g, 1)
    total: Array  # (b, k, rows · g, 1)


def weighted_sum(weights: Array, value: Array, out: Array) -> None:
    """Write weights · value."""
    batch, heads, rows, size = weights.shape
    few = SMALL_PRODUCT // max(size * value.shape[-1], 1)
    if few < 4 or rows % few or not has_small_products(weights.dtype):
        np.matmul(weights, value, out)
        return
    strips = (batch, heads, rows // few, few)
    np.matmul(weights.reshape(*strips, size), value[:, :, None], out.reshape(*strips, -1))


def spoilt_product(weights: Array, present: Array, value: Array) -> Array:
    """Return weights · value where a value that is not finite spoils the rows that see it alone."""
    result = np.empty((*weights.shape[:-1], value.shape[-1]), weights.dtype)
    weighted_sum(weights, np.where(np.isfinite(value), value, 0), result)
    for infinity in (math.inf, -math.inf):
        # NaN counts as both infinities, whose sum it is.
        spoils = ((value == infinity) | np.isnan(value)).astype(value.dtype)
        result[np.matmul(present.astype(value.dtype), spoils) > 0] += infinity
    return result


def join(one: Running, other: Running) -> Running:
    """Return the state of two sets of keys together."""
    # A sum of nothing has no reference, whichever it was made with.
    one, other = (
        x._replace(reference=np.where(x.total == 0, -math.inf, x.reference)) for x in (one, other)
    )
    highest = np.maximum(one.reference, other.reference)
    shift = np.where(highest == -math.inf, 0, highest)
    shrink_one, shrink_other = np.exp(one.reference - shift), np.exp(other.reference - shift)
    return Running(
        one.output * shrink_one + other.output * shrink_other,
        highest,
        one.total * shrink_one + other.total * shrink_other,
    )
