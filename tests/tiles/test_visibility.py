"""What a fused engine is told of the keys that are hidden, beside the mask of all scores."""

import itertools

import numpy as np
import pytest

from polyattn._core.call.checks import examine
from polyattn._core.call.describe import describe
from polyattn._core.call.layout import heads_first
from polyattn._core.tiles.visibility import (
    band_from,
    finite_bias,
    made_shape,
    score_axes,
    visible_scores,
)
from polyattn.plugin import Span, may_have_empty_rows, visible_keys

WINDOWS = [(None, None), (None, 0), (3, 0), (0, None), (2, 5), (400, 1), (None, 2)]
LENGTHS = list(itertools.product((1, 4, 9), (1, 5, 9)))
OFFSETS = (None, -20, -7, -1, 0, 1, 3, 6, 30)


def described(rows, keys, batch=(), heads=2, **options):
    """Return the facts and the arrays of a call as a kernel is given them."""
    query = np.ones((*batch, heads, rows, 4), np.float32)
    key = np.ones((*batch, heads, keys, 4), np.float32)
    call, operands = describe(query, key, key, **options)
    return examine(call), heads_first(call, operands)


def dense_band(rows, keys, window, offset):
    """Return the keys that a window leaves, by its definition."""
    left, right = (10**6 if end is None else end for end in window)
    offset = keys - rows if offset is None else offset
    i, j = np.arange(rows)[:, None] + offset, np.arange(keys)
    return (i - left <= j) & (j <= i + right)


@pytest.mark.parametrize("window", WINDOWS)
def test_a_band_is_told_as_the_dense_mask_has_it(window):
    for (rows, keys), offset in itertools.product(LENGTHS, OFFSETS):
        problem, x = described(rows, keys, window=window, query_offset=offset)
        dense = dense_band(rows, keys, window, offset)
        assert problem.masks_by_position_only
        assert visible_scores(problem) == dense.sum()
        assert may_have_empty_rows(problem) == (not dense.any(axis=1).all())
        seen = visible_keys(problem, x, np)
        assert (
            dense.all() if seen is None else (np.broadcast_to(seen[0], dense.shape) == dense).all()
        )
        for first in (0, keys - rows):
            again = dense_band(rows, keys, band_from(problem, first), first)
            assert (again == dense).all()


def test_an_offset_of_each_item_has_no_band():
    offsets = {"window": (1, 0), "query_offset": np.array([0, 3])}
    problem, x = described(4, 5, batch=(2,), **offsets)
    assert band_from(problem, 0) is None
    assert may_have_empty_rows(problem)
    assert visible_scores(problem) == 20
    assert made_shape(problem, banded=True) == visible_keys(problem, x, np).shape == (2, 1, 4, 5)
    problem, _ = described(4, 5, batch=(2,), query_offset=np.array([0, 3]))
    assert band_from(problem, 0) == (None, None)
    assert not may_have_empty_rows(problem)


def test_some_keys_are_seen_as_the_whole_mask_has_them():
    mask = np.arange(9) % 3 > 0
    problem, x = described(4, 9, window=(3, 1), mask=mask)
    whole = visible_keys(problem, x, np)
    assert (visible_keys(problem, x, np, Span(2, 7)) == whole[..., 2:7]).all()
    assert (visible_keys(problem, x, np, banded=False) == mask).all()


@pytest.mark.parametrize("given", ["mask", "bias", "both"])
def test_a_finite_bias_hides_the_keys_of_mask_and_bias(given):
    mask = np.array([[True, False, True], [False, False, False]])
    bias = np.array([[1, 2, -np.inf], [-1e30, 5, 6]], np.float32)
    mask, bias = mask if given != "bias" else None, bias if given != "mask" else None
    found, seen = finite_bias(mask, bias, -1000.0, np.float32, np)
    wanted = np.ones((2, 3), bool) if mask is None else mask
    wanted = wanted & (bias != -np.inf) if bias is not None else wanted
    shift = np.zeros((2, 3)) if bias is None else np.maximum(bias, -1000)
    assert found.dtype == np.float32
    assert (seen == wanted).all()
    assert (found == np.where(wanted, shift, -1000)).all()


@pytest.mark.parametrize("batch", [(), (2,), (2, 3), (1, 1)])
def test_a_mask_gets_the_four_axes_of_an_engine(batch):
    problem, _ = described(4, 5, batch=batch)
    items = int(np.prod(batch))
    for shape in [(5,), (4, 1), (2, 4, 5), (*batch, 1, 4, 5), (*batch[-1:], 2, 1, 5)]:
        array = np.random.default_rng(0).random(shape)
        found = score_axes(problem, array, np)
        assert found.ndim == 4
        whole = np.broadcast_to(array, problem.scores).reshape(items, *problem.scores[-3:])
        assert (np.broadcast_to(found, whole.shape) == whole).all()
        assert found.shape == (found.shape[0], *((1, 1, *shape)[-3:]))
        assert found.shape[0] == (items if np.prod(shape[:-3]) > 1 else 1)
