"""Properties of attention, whatever it is given, in random calls.

Values are small multiples of 1/8, so that scores are exact and what differs is a matter of rounding
in the softmax alone.
"""

import math

import numpy as np
import pytest
from libraries import tiles_of

from polyattn import Partial, attention, attention_partial, merge


def eighths(rng, *shape):
    return rng.integers(-32, 33, shape) / 8


def calls():
    """Yield a generator of numbers, and query, key, value and a mask that may empty some rows."""
    for seed in range(15):
        rng = np.random.default_rng(seed)
        groups, members = rng.integers(1, 3, 2)
        rows, keys, size, value_size = rng.integers(1, (7, 10, 5, 4))
        query = eighths(rng, 2, groups * members, rows, size)
        key, value = (eighths(rng, 2, groups, keys, n) for n in (size, value_size))
        yield rng, query, key, value, rng.random((rows, keys)) < rng.random()


def same(one, other):
    np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12)


def same_partial(one, other):
    same(one.output, other.output)
    same(one.logsumexp, other.logsumexp)


@pytest.mark.parametrize("kernel", ["dense", "tiled"])
def test_keys_may_be_cut_anywhere_and_come_in_any_order(kernel):
    for rng, q, k, v, mask in calls():
        low, high = sorted(rng.integers(0, 10, 2))
        parts = [
            attention_partial(q, k[:, :, s], v[:, :, s], mask=mask[:, s], kernel=kernel)
            for s in (slice(0, low), slice(low, high), slice(high, None))
        ]
        a, b, c = parts
        whole = attention_partial(q, k, v, mask=mask, kernel=kernel)
        same_partial(merge(a, b, c), whole)
        same_partial(merge(merge(a, b), c), merge(a, merge(b, c)))
        same_partial(merge(a, b), merge(b, a))
        order = rng.permutation(k.shape[2])
        arrays = q, k[:, :, order], v[:, :, order]
        same_partial(attention_partial(*arrays, mask=mask[:, order], kernel=kernel), whole)


def test_the_size_of_a_tile_changes_nothing():
    for rng, q, k, v, mask in calls():
        options = {"mask": mask, "is_causal": bool(rng.integers(2))}
        whole = attention_partial(q, k, v, kernel="dense", **options)
        kernel = tiles_of(int(rng.integers(1, 41)))
        same_partial(attention_partial(q, k, v, kernel=kernel, **options), whole)


@pytest.mark.parametrize("kernel", ["dense", "tiled"])
def test_an_item_by_itself_and_a_mask_in_other_forms(kernel):
    for rng, q, k, v, mask in calls():
        whole = attention_partial(q, k, v, mask=mask, kernel=kernel)
        item = attention_partial(q[1], k[1], v[1], mask=mask, kernel=kernel)
        same_partial(item, Partial(whole.output[1], whole.logsumexp[1]))
        rule = attention_partial(q, k, v, mask=lambda b, h, i, j, m=mask: m[i, j], kernel=kernel)
        same_partial(rule, whole)
        bias = np.where(mask, 0, -math.inf)
        same_partial(attention_partial(q, k, v, bias=bias, kernel=kernel), whole)
        # A constant added to a row's scores moves its logsumexp only.
        added = eighths(rng, q.shape[2], 1)
        moved = attention_partial(q, k, v, mask=mask, bias=added, kernel=kernel)
        same_partial(moved, Partial(whole.output, whole.logsumexp + added[:, 0]))


@pytest.mark.parametrize("kernel", ["dense", "tiled"])
def test_weights_of_a_row_sum_to_one_or_to_zero(kernel):
    for _, q, k, _, mask in calls():
        identity = np.broadcast_to(np.eye(k.shape[2]), (*k.shape[:2], k.shape[2], k.shape[2]))
        weights = attention(q, k, identity, mask=mask, kernel=kernel)
        assert (weights >= 0).all()
        assert not weights[..., ~mask].any()
        same(weights.sum(axis=-1), np.broadcast_to(mask.any(axis=-1), weights.shape[:-1]))
