"""Which masks the compiled kernel takes as a first and a last key for each row."""

import numpy as np
import pytest

from polyattn import attention, explain, masks, scores
from polyattn.plugin import CachePadding

call = pytest.importorskip("polyattn_native.call")

RNG = np.random.default_rng(0)
X = RNG.standard_normal((2, 2, 9, 8))
IDS = np.array([[0, 0, 0, 1, 1, 2, 2, 2, 2], [0] * 5 + [1] * 4])


@pytest.mark.parametrize(
    "mask",
    [
        masks.causal(),
        masks.window(2, 1),
        masks.prefix(np.array([3, 7])),
        masks.padding(np.array([4, 9]), np.array([9, 5])),
        CachePadding(np.array([4, 9])),
        masks.segments(IDS),
        masks.causal() & (masks.window(4, None) & masks.padding(np.array([4, 9]))),
        masks.compile(masks.window(3, 0) & masks.prefix(6), 9, 9),
        masks.dense(RNG.random((9, 9)) < 0.5) & masks.causal(),
    ],
    ids=repr,
)
def test_a_mask_of_ranges_and_an_array_is_not_made(mask, monkeypatch):
    expected = attention(X, X, X, mask=mask, kernel="dense")
    monkeypatch.setattr(call, "array_of", None)
    monkeypatch.setattr(call, "bytes_per_row", None)
    output = attention(X, X, X, mask=mask, kernel="native")
    np.testing.assert_allclose(output, expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize(
    "mask",
    [
        masks.causal() | masks.prefix(2),
        ~masks.window(1, 1),
        masks.segments(IDS[:, ::-1]),
        masks.positions(IDS, IDS),
        masks.tree(np.arange(9) // 2 - 1),
    ],
    ids=repr,
)
def test_other_masks_are_made(mask, monkeypatch):
    monkeypatch.setattr(call, "array_of", None)
    with pytest.raises(TypeError, match="not callable"):
        attention(X, X, X, mask=mask, kernel="native")


def test_a_temperature_and_biases_by_distance_are_computed():
    steps = scores.temperature(2.0) >> scores.temperature(0.7) >> scores.alibi(2)
    expected = attention(X, X, X, score_mod=steps, kernel="dense")
    output = attention(X, X, X, score_mod=steps, kernel="native")
    np.testing.assert_allclose(output, expected, rtol=0, atol=1e-13)
    late = scores.alibi(2) >> scores.temperature(2.0)
    chosen = explain(X, X, X, score_mod=late).chosen
    assert chosen.kernel != "native"


def test_the_masks_that_narrow_ranges_are_named_as_their_functions():
    from polyattn_native.visible import _NARROWED_BY, kind_of

    made = {
        "window": masks.window(1, 0),
        "prefix": masks.prefix(1),
        "padding": masks.padding([1]),
        "segments": masks.segments(np.zeros(2, int)),
    }
    assert {name: kind_of(mask) for name, mask in made.items()} == {n: n for n in _NARROWED_BY}
