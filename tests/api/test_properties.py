"""What must hold of attention whatever it is given, searched for counterexamples.

Values are small multiples of 1/8, so that scores are exact and what differs is a matter of rounding
in the softmax alone.
"""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from libraries import tiles_of

from polyattn import Partial, attention, attention_partial, merge

settings.register_profile("polyattn", max_examples=25, deadline=None, derandomize=True)
settings.load_profile("polyattn")

EIGHTHS = st.integers(-32, 32).map(lambda n: n / 8)
KERNELS = pytest.mark.parametrize("kernel", ["dense", "tiled"])


@st.composite
def calls(draw):
    """Draw query, key, value and a mask that may empty some rows."""
    groups, members = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    rows, keys = draw(st.integers(1, 6)), draw(st.integers(1, 9))
    size, value_size = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    shapes = (
        (2, groups * members, rows, size),
        (2, groups, keys, size),
        (2, groups, keys, value_size),
    )
    arrays = [draw(hnp.arrays(np.float64, shape, elements=EIGHTHS)) for shape in shapes]
    return (*arrays, draw(hnp.arrays(bool, (rows, keys))))


def same(one, other):
    np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12)


def same_partial(one, other):
    same(one.output, other.output)
    same(one.logsumexp, other.logsumexp)


@pytest.mark.slow
@KERNELS
@given(call=calls(), cuts=st.tuples(st.integers(0, 9), st.integers(0, 9)))
def test_merge_is_associative_and_commutative_and_gives_the_whole(kernel, call, cuts):
    q, k, v, mask = call
    low, high = sorted(cuts)
    parts = [
        attention_partial(q, k[:, :, s], v[:, :, s], mask=mask[:, s], kernel=kernel)
        for s in (slice(0, low), slice(low, high), slice(high, None))
    ]
    a, b, c = parts
    whole = attention_partial(q, k, v, mask=mask, kernel=kernel)
    same_partial(merge(a, b, c), whole)
    same_partial(merge(merge(a, b), c), merge(a, merge(b, c)))
    same_partial(merge(a, b), merge(b, a))


@given(call=calls(), tile=st.integers(1, 40), is_causal=st.booleans())
def test_the_size_of_a_tile_changes_nothing(call, tile, is_causal):
    q, k, v, mask = call
    options = {"mask": mask, "is_causal": is_causal}
    whole = attention_partial(q, k, v, kernel="dense", **options)
    same_partial(attention_partial(q, k, v, kernel=tiles_of(tile), **options), whole)


@pytest.mark.slow
@KERNELS
@given(call=calls(), data=st.data())
def test_keys_may_come_in_any_order(kernel, call, data):
    q, k, v, mask = call
    order = np.array(data.draw(st.permutations(range(k.shape[2]))))
    same_partial(
        attention_partial(q, k[:, :, order], v[:, :, order], mask=mask[:, order], kernel=kernel),
        attention_partial(q, k, v, mask=mask, kernel=kernel),
    )


@KERNELS
@given(call=calls())
def test_the_batch_around_an_item_changes_nothing(kernel, call):
    q, k, v, mask = call
    whole = attention_partial(q, k, v, mask=mask, kernel=kernel)
    alone = attention_partial(q[1], k[1], v[1], mask=mask, kernel=kernel)
    same_partial(alone, Partial(whole.output[1], whole.logsumexp[1]))


@pytest.mark.slow
@KERNELS
@given(call=calls(), data=st.data())
def test_a_constant_added_to_a_rows_scores_moves_its_logsumexp_alone(kernel, call, data):
    q, k, v, mask = call
    added = data.draw(hnp.arrays(np.float64, (q.shape[2], 1), elements=EIGHTHS))
    plain = attention_partial(q, k, v, mask=mask, kernel=kernel)
    moved = attention_partial(q, k, v, mask=mask, bias=added, kernel=kernel)
    same_partial(moved, Partial(plain.output, plain.logsumexp + added[:, 0]))


@pytest.mark.slow
@KERNELS
@given(call=calls())
def test_a_mask_a_rule_and_a_bias_agree(kernel, call):
    q, k, v, mask = call
    as_array = attention_partial(q, k, v, mask=mask, kernel=kernel)
    same_partial(
        attention_partial(q, k, v, mask=lambda b, h, i, j: mask[i, j], kernel=kernel), as_array
    )
    bias = np.where(mask, 0, -math.inf)
    same_partial(attention_partial(q, k, v, bias=bias, kernel=kernel), as_array)


@pytest.mark.slow
@KERNELS
@given(call=calls())
def test_weights_of_a_row_sum_to_one_or_to_zero(kernel, call):
    q, k, _, mask = call
    identity = np.broadcast_to(np.eye(k.shape[2]), (*k.shape[:2], k.shape[2], k.shape[2]))
    weights = attention(q, k, identity, mask=mask, kernel=kernel)
    assert (weights >= 0).all()
    assert not weights[..., ~mask].any()
    same(weights.sum(axis=-1), np.broadcast_to(mask.any(axis=-1), weights.shape[:-1]))
