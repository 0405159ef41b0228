"""The sums over keys, weights and weights · values, and how sums of separate keys combine."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from polyattn.plugin import Array
from polyattn_numpy.scratch import has_small_products

# Multiply-adds of a product that counts as small.
SMALL_PRODUCT = 2**19


class SoftmaxSums(NamedTuple):
    """Σ w·v, the reference r and Σ w of each row, where w = exp(s − r), or exp2(s − r)."""

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
    blocks = (batch, heads, rows // few, few)
    np.matmul(weights.reshape(*blocks, size), value[:, :, None], out.reshape(*blocks, -1))


def product_of_seen(weights: Array, seen: Array, value: Array) -> Array:
    """Return weights · value, where NaN and infinity reach only the rows that see them."""
    result = np.empty((*weights.shape[:-1], value.shape[-1]), weights.dtype)
    weighted_sum(weights, np.where(np.isfinite(value), value, 0), result)
    for infinity in (math.inf, -math.inf):
        # NaN counts as both infinities, since it is their sum.
        infinite = ((value == infinity) | np.isnan(value)).astype(value.dtype)
        result[np.matmul(seen.astype(value.dtype), infinite) > 0] += infinity
    return result


def combine(exp: Any, one: SoftmaxSums, other: SoftmaxSums) -> SoftmaxSums:
    """Return the state of both sets of keys together."""
    # A sum over no keys has the reference -inf, whatever it was computed with.
    one, other = (
        x._replace(reference=np.where(x.total == 0, -math.inf, x.reference)) for x in (one, other)
    )
    highest = np.maximum(one.reference, other.reference)
    shift = np.where(highest == -math.inf, 0, highest)
    shrink_one, shrink_other = exp(one.reference - shift), exp(other.reference - shift)
    return SoftmaxSums(
        one.output * shrink_one + other.output * shrink_other,
        highest,
        one.total * shrink_one + other.total * shrink_other,
    )
