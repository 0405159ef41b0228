"""Windows on a grid, against windows written out and the reference's, token by token."""

import math

import numpy as np
import pytest

from polyattn import attention, masks
from polyattn._core.expressions.indices import PointIndices
from polyattn.conformance.reference.expressions import CallRows, plainly


def windows(mask, count):
    """Return the keys that each row sees."""
    i, j = np.ogrid[:count, :count]
    return ["".join(map(str, np.flatnonzero(row))) for row in np.asarray(mask(0, 0, i, j))]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, ["012", "012", "123", "234", "345", "345"]),
        ({"kernel_size": 4}, ["0123", "0123", "0123", "1234", "2345", "2345"]),
        ({"stride": 2}, ["012", "012", "234", "234", "345", "345"]),
        ({"dilation": 2}, ["024", "135", "024", "135", "024", "135"]),
        ({"is_causal": True}, ["0", "01", "012", "123", "234", "345"]),
        ({"is_causal": True, "stride": 2}, ["0", "01", "12", "123", "34", "345"]),
    ],
    ids=str,
)
def test_windows_of_one_axis(given, expected):
    given = {"kernel_size": 3} | given
    assert windows(masks.neighborhood(6, **given), 6) == expected


def random_mask(rng):
    while True:
        shape = rng.integers(1, 8, rng.integers(1, 4))
        dilation = np.minimum(rng.integers(1, 4, shape.size), shape)
        sizes = rng.integers(1, shape // dilation + 1)
        numbers = shape, sizes, rng.integers(1, sizes + 1), dilation
        if shape.prod() <= 72:
            break
    shape, sizes, stride, dilation = (tuple(map(int, n)) for n in numbers)
    causal = tuple(bool(x) for x in rng.random(len(shape)) < 0.4)
    return masks.neighborhood(shape, sizes, stride=stride, dilation=dilation, is_causal=causal)


def test_any_grid_agrees_with_the_reference():
    rng = np.random.default_rng(0)
    for _ in range(150):
        mask = random_mask(rng)
        count = math.prod(mask.shape)
        rows, offset = int(rng.integers(1, count + 1)), int(rng.integers(-3, count))
        expected, _ = plainly(mask, None, CallRows((1,), (1, rows, count), offset))
        b, h, i, j = np.ogrid[:1, :1, :rows, :count]
        found = mask.seen(PointIndices(b, h, i, j, offset=offset))
        np.testing.assert_array_equal(np.broadcast_to(found, expected.shape), expected, str(mask))
        ends = mask.intervals((rows, count), offset, most=64)
        if ends is not None:
            first, stop = (end[..., None, :] for end in ends)
            found = ((first <= j[..., None]) & (j[..., None] < stop)).any(-1)
            np.testing.assert_array_equal(found, expected, str(mask))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: masks.neighborhood(6, 3, dilation=3), ValueError, "at most the length"),
        (lambda: masks.neighborhood(6, 2, stride=3), ValueError, "stride at most kernel_size"),
        (lambda: masks.neighborhood((4, 4), (3, 3, 3)), ValueError, "one for each of 2 axes"),
        (lambda: masks.neighborhood((), 3), ValueError, "one to three axes"),
        (lambda: masks.neighborhood((4, 4), 2.0), TypeError, "kernel_size"),
        (lambda: masks.neighborhood((4, 4), 3, is_causal=1), TypeError, "is_causal is a bool"),
    ],
)  # fmt: skip
def test_wrong_numbers(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize("tokens", [15, 17])
def test_another_number_of_tokens_than_the_grid_has_is_refused(tokens):
    x = np.ones((1, tokens, 4))
    with pytest.raises(ValueError, match=rf"has 16 tokens; got S = {tokens}"):
        attention(x, x, x, mask=masks.neighborhood((4, 4), 3))


def test_a_causal_first_axis_may_have_fewer_keys_yet():
    x = np.random.default_rng(0).standard_normal((1, 16, 4))
    mask = masks.neighborhood((4, 4), 3, is_causal=(True, False))
    whole = attention(x, x, x, mask=mask)
    np.testing.assert_allclose(attention(x[:, :12], x[:, :12], x[:, :12], mask=mask), whole[:, :12])
