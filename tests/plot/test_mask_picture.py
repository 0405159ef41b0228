"""The picture of a mask shows the keys that attention sees and the tiles that the mask answers."""

import matplotlib
import numpy as np
import pytest
from matplotlib.figure import Figure
from optional import torch

from polyattn import attention, masks, plot
from polyattn._core.expressions.patterns import Band
from polyattn._core.tiles.coverage import TileGrid
from polyattn.plot.mask_picture import FULL, SEEN

matplotlib.use("Agg")
IDS = np.repeat(np.arange(4), [5, 11, 1, 7])
LENGTHS = np.array([[3, 24], [0, 17]])


def checkered(b, h, i, j):
    return (i // 8 + j // 8 + h) % 2 == 0


@pytest.fixture
def axes():
    return Figure().add_subplot()


def draw_mask(mask, *lengths, axes, **options):
    """Draw a mask in axes, and return them."""
    assert plot.mask(mask, *lengths, axes=axes, **options) is axes.figure
    return axes


def shown(axes):
    """The kinds that are drawn, one number for each cell or tile."""
    return np.asarray(axes.images[0].get_array())


def title(axes):
    return axes.get_legend().get_title().get_text()


def legend(axes):
    return [text.get_text() for text in axes.get_legend().get_texts()]


def visible(mask, rows, keys, batch=(), heads=1, **options):
    """The visible keys, by attention itself: the rows of an identity that a row sums up."""
    query = np.zeros((*batch, heads, rows, 1))
    value = np.broadcast_to(np.eye(keys), (*batch, heads, keys, keys))
    key = np.zeros((*batch, heads, keys, 1))
    return attention(query, key, value, mask=mask, **options) > 0


CASES = {
    "causal, fewer rows": (masks.causal(), (7, 24), {}),
    "causal, from the first": (masks.causal(), (7, 24), {"query_offset": 0}),
    "packed documents": (masks.segments(IDS) & masks.causal(), (24, 24), {}),
    "rule": (masks.rule(checkered), (24, 24), {"head": 1}),
    "dense": (masks.dense(IDS % 2 == 0), (5, 24), {}),
}


def test_what_is_drawn_dark_is_what_attention_sees():
    for name, (mask, (rows, keys), options) in CASES.items():
        axes = draw_mask(mask, rows, keys, tile=4, axes=Figure().add_subplot(), **options)
        head = options.get("head", 0)
        beside = {option: x for option, x in options.items() if option != "head"}
        seen = visible(mask, rows, keys, heads=head + 1, **beside)[head]
        np.testing.assert_array_equal(np.isin(shown(axes), (SEEN, FULL)), seen, name)


def test_each_item_of_a_batch_has_its_own_picture():
    mask = masks.padding(LENGTHS)
    for item, seen in enumerate(visible(mask, 6, 24, batch=(2, 2)).reshape(4, 6, 24)):
        own = masks.padding(torch.asarray(LENGTHS))  # of any library
        axes = draw_mask(own, 6, 24, item=item, axes=Figure().add_subplot())
        np.testing.assert_array_equal(np.isin(shown(axes), (SEEN, FULL)), seen)
        assert title(axes).startswith(f"item {item}, head 0")
    other = draw_mask(masks.causal(), 6, item=4, axes=Figure().add_subplot())
    assert title(other).startswith("item 4, head 0")  # of as many as are asked for


def test_a_compiled_mask_is_drawn_for_the_call_and_by_the_tiles_of_its_table(axes):
    mask = masks.compile(masks.causal(), 20, 30, query_offset=3, tile=10, heads=2)
    mask.plot(axes=axes)
    assert shown(axes).shape == (20, 30)
    assert "6 tiles of 10 × 10" in title(axes)
    np.testing.assert_array_equal(np.isin(shown(axes), (SEEN, FULL)), np.tri(20, 30, 3))
    with pytest.raises(ValueError, match="compiled for L, S, query_offset"):
        mask.plot(20, 31)


def test_lengths_come_from_the_arrays_of_the_mask():
    for mask, shape in (
        (masks.segments(IDS), (24, 24)),
        (masks.segments(IDS[:9], IDS), (9, 24)),
        (masks.tree([-1, 0, 0]), (3, 3)),
        (masks.causal() & masks.dense(np.ones((3, 1, 7, 5), bool)), (7, 5)),
        (masks.dense(np.ones(5, bool)) | masks.causal(), (5, 5)),
        (masks.prefix(3), (64, 64)),
    ):
        axes = Figure().add_subplot()
        mask.plot(axes=axes)
        assert shown(axes).shape == shape, mask


def test_of_long_sequences_only_the_tiles_are_drawn(axes, monkeypatch):
    asked, seen = [], Band.seen
    monkeypatch.setattr(Band, "seen", lambda self, at: asked.append(type(at)) or seen(self, at))
    draw_mask(masks.causal(), 4096, axes=axes)
    assert set(asked) == {TileGrid}
    assert shown(axes).shape == (32, 32)
    np.testing.assert_array_equal(shown(axes), FULL * np.tri(32, k=-1) + SEEN * np.eye(32))
    assert legend(axes) == ["full: 496", "mixed: 32", "empty: 496"]
    assert axes.get_xlim() == (-0.5, 4095.5)
    very_long = draw_mask(masks.causal(), 1, 10**7, axes=Figure().add_subplot())
    assert title(very_long) == "100% of 611 tiles of 16384 × 16384 visited"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"item": 4}, "item 4 or head 0 is out of range for batch"),
        ({"head": -1}, "head -1"),
        ({"batch": (3,)}, "must broadcast to the batch axes"),
        ({"query_length": 0}, "L must be at least 1"),
        ({"key_length": 2.5}, "S must be an integer; got 2.5"),
    ],
)
def test_what_cannot_be_drawn_is_refused(axes, given, says):
    with pytest.raises((TypeError, ValueError), match=says):
        draw_mask(masks.padding(LENGTHS), **given, axes=axes)
    with pytest.raises(TypeError, match="got a str"):
        plot.mask("causal")
