"""Pictures of attention show the numbers that they are given, and their labels can be read."""

import importlib
import itertools
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pytest
from matplotlib import pyplot
from matplotlib.figure import Figure
from optional import torch

from polyattn import TopWeights, attention_weights, masks, plot

matplotlib.use("Agg")
WORDS = ["the", "cat", "drank", "the", "milk", "because", "it", "was", "so", "sweet"]
RNG = np.random.default_rng(0)


def weights(*lead, rows=5, keys=7, **options):
    query = RNG.normal(size=(*lead, rows, 8)).astype("float32")
    key = RNG.normal(size=(*lead, keys, 8)).astype("float32")
    return attention_weights(query, key, **options)


def maps(figure):
    """The axes that show an image of their own, without the colour bar's."""
    return [axes for axes in figure.axes if axes.images]


def shown(axes):
    return np.asarray(axes.images[0].get_array())


def colours(figure):
    return [axes.images[0].norm for axes in maps(figure)]


def written(axis):
    """The labels of the ticks that are drawn, in order, with their boxes."""
    ticks = [tick for tick in axis.get_major_ticks() if tick.label1.get_visible()]
    first, last = sorted(axis.get_view_interval())
    labels = [t.label1 for t in ticks if first <= t.get_loc() <= last and t.label1.get_text()]
    return [(label.get_text(), label.get_window_extent()) for label in labels]


# ---- maps of weights ----


@pytest.mark.parametrize(
    ("heads", "numbers"), [(None, range(6)), (2, [2]), ([4, -6], [4, 0]), (slice(1, 6, 4), [1, 5])]
)
def test_each_head_has_a_map_of_its_weights(heads, numbers):
    given = weights(6)
    figure = plot.attention_map(given, heads=heads)
    assert [axes.get_title() for axes in maps(figure)] == [f"head {n}" for n in numbers]
    for number, axes in zip(numbers, maps(figure), strict=True):
        norm = axes.images[0].norm
        assert (norm.vmin, norm.vmax) == (0, given[list(numbers)].max())
        np.testing.assert_array_equal(shown(axes), given[number])


def test_weights_of_another_library_in_16_bits_and_with_gradients_are_drawn_alike():
    given = weights(3)
    figure = plot.attention_map(torch.asarray(given).to(torch.bfloat16).requires_grad_())
    for axes, expected in zip(maps(figure), given, strict=True):
        np.testing.assert_allclose(shown(axes), expected, rtol=2**-8)


def test_small_weights_of_many_keys_are_told_from_none():
    for keys, power in ((64, 1), (65, 0.5)):
        assert colours(plot.attention_map(weights(keys=keys)))[0].gamma == power
    assert colours(plot.attention_map(weights(keys=65), power=1))[0].gamma == 1


def test_the_largest_weights_are_drawn_as_the_whole_map_has_them():
    query, key = RNG.normal(size=(2, 3, 20, 8))
    whole = attention_weights(query, key)
    top = attention_weights(query, key, top=4)
    figure = plot.attention_map(top, heads=[2, 0])
    for axes, head in zip(maps(figure), (2, 0), strict=True):
        least = np.sort(whole[head])[:, -4, None]
        assert np.allclose(shown(axes), np.where(whole[head] >= least, whole[head], 0))


def test_the_largest_weights_are_drawn_over_all_keys_whose_number_is_given():
    top = attention_weights(np.ones((1, 6, 4)), np.eye(9, 4), top=2)
    assert top.keys.max() < 8
    for given in (9, "ninekeys!"):
        assert shown(maps(plot.attention_map(top, keys=given))[0]).shape == (6, 9)
    axes = maps(plot.attention_map(top, keys=9, extent=(0, 9, 6, 0)))[0]
    assert shown(axes).shape == (6, 9)
    with pytest.raises(ValueError, match=r"extent needs the number of keys.*: pass keys=S"):
        plot.attention_map(top, extent=(0, 9, 6, 0))
    with pytest.raises(ValueError, match=r"weights name key \d, so keys must be more; got 1"):
        plot.attention_map(top, keys=1)


@pytest.mark.parametrize("of", [plot.attention_map, lambda w: plot.attention_map(as_top(w))])
def test_a_point_of_a_long_map_is_the_largest_weight_of_its_tokens(of):
    weights = np.full((1030, 600), 1e-3, np.float32)
    weights[1029, 401] = 0.7
    figure = of(weights)
    axes = maps(figure)[0]
    assert colours(figure)[0].vmax == np.float32(1e-3)  # the one above it would make all else dark
    assert figure.axes[-1]._colorbar.extend == "max"
    assert shown(axes).shape == (344, 300)
    expected = np.full((344, 300), 1e-3, np.float32)
    expected[343, 200] = 0.7
    assert (shown(axes) == expected).all()
    assert axes.get_xlim() == (-0.5, 599.5)
    assert axes.get_ylim() == (1029.5, -0.5)


def as_top(weights):
    keys = np.broadcast_to(np.arange(weights.shape[1]), weights.shape)
    return TopWeights(weights, keys)


def test_it_draws_on_axes_that_it_is_given():
    figure = Figure()
    grid = figure.subplots(2, 2)
    given = weights(4)
    assert plot.attention_map(given, axes=grid) is figure
    for axes, expected in zip(grid.flat, given, strict=True):
        np.testing.assert_array_equal(shown(axes), expected)
    assert not pyplot.get_fignums()
    one = Figure().add_subplot(title="mine")
    assert plot.attention_map(given[0], axes=one) is one.figure
    assert one.get_title() == "mine"
    assert (one.get_xlabel(), one.get_ylabel()) == ("key", "query")
    assert one.figure.get_layout_engine() is not None  # which makes room for labels


def test_numbers_are_on_the_axes_in_place_of_tokens():
    figure = plot.attention_map(weights(rows=40, keys=50), extent=(0, 5, 4, 0))
    figure.draw_without_rendering()
    (axes,) = maps(figure)
    assert [text for text, _ in written(axes.xaxis)] == ["0", "1", "2", "3", "4", "5"]
    assert [text for text, _ in written(axes.yaxis)] == ["0", "1", "2", "3", "4"]
    cell = axes.transData.transform([(0.1, 0.0), (0.0, 0.1), (0.0, 0.0)])
    assert abs(cell[0, 0] - cell[2, 0]) == pytest.approx(abs(cell[1, 1] - cell[2, 1]))
    with pytest.raises(ValueError, match="extent numbers the axes, and queries and keys name them"):
        plot.attention_map(weights(), "abcde", extent=(0, 5, 4, 0))


# ---- labels ----


@pytest.mark.parametrize(
    ("heads", "length"), [(4, 2), pytest.param(12, 200, marks=pytest.mark.slow)]
)
def test_labels_are_as_many_as_there_is_room_for_and_never_overlap(heads, length):
    tokens = [f"token-number-{n}" for n in range(length)]
    figure = plot.attention_map(weights(heads, rows=length, keys=length), tokens, tokens)
    figure.draw_without_rendering()
    left = [axes for axes in maps(figure) if axes.get_ylabel()]
    bottom = [axes for axes in maps(figure) if axes.get_xlabel()]
    assert (len(left), len(bottom)) == {4: (2, 2), 12: (3, 4)}[heads]
    for axis in [axes.yaxis for axes in left] + [axes.xaxis for axes in bottom]:
        labels = written(axis)
        assert len(labels) == length if length <= 10 else 10 <= len(labels) <= 100
        assert labels[0][0] == "token-number-0"
        boxes = [box for _, box in labels]
        assert not any(a.overlaps(b) for a, b in itertools.pairwise(boxes))
        assert all(figure.bbox.x0 <= b.x0 and b.x1 <= figure.bbox.x1 for b in boxes)
        assert all(figure.bbox.y0 <= b.y0 and b.y1 <= figure.bbox.y1 for b in boxes)


def test_tokens_of_control_characters_make_an_svg_that_is_xml(tmp_path):
    tokens = [chr(n) for n in (*range(33), 0x7F, 0x85, 0xFFFE, 0xFFFF)]
    figure = plot.attention_map(weights(rows=len(tokens), keys=2), tokens, ["a\0", "b"])
    figure.savefig(tmp_path / "map.svg")
    ElementTree.parse(tmp_path / "map.svg")
    figure.draw_without_rendering()
    assert [label for label, _ in written(figure.axes[0].xaxis)] == [r"a\x00", "b"]


def test_labels_show_blanks_are_cut_short_and_are_no_formulas():
    labels = {
        " the": "␣the", "  ": "␣␣", "New York ": "New York␣", "\n": "↵", 17: "17",
        "Donaudampfschifffahrt": "Donaudampfschif…", "$x^2$": r"\$x^2\$", "\ud83d": "?",
    }  # fmt: skip
    figure = plot.attention_map(weights(rows=8, keys=2), list(labels), ["a", "b"])
    figure.draw_without_rendering()
    assert [label for label, _ in written(figure.axes[0].yaxis)] == list(labels.values())


# ---- what holds for all ----


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch):
    def missing(module, *rest):
        if module.startswith("matplotlib"):
            raise ModuleNotFoundError(f"No module named {module!r}", name=module)
        return found(module, *rest)

    found = importlib.import_module
    monkeypatch.setattr(importlib, "import_module", missing)
    for call in (lambda: plot.attention_map(weights()), lambda: masks.causal().plot(8)):
        with pytest.raises(ImportError, match=r'pip install "polyattn\[plot\]"'):
            call()


ONES = np.ones((3, 5, 7))


@pytest.mark.parametrize(
    ("given", "options", "kind", "says"),
    [
        (ONES[None], {}, ValueError, r"\(1, 3, 5, 7\): select an item"),
        (ONES[:0], {}, ValueError, r"must not be empty; got the shape \(0, 5, 7\)"),
        ([[1.0]], {}, TypeError, "weights is of type list"),
        (-ONES, {}, ValueError, "at least 0; got -1.*not scores"),
        (np.nan * ONES, {}, ValueError, "finite and at least 0; got nan"),
        (ONES, {"heads": 3}, IndexError, "index 3 is out of range for 3"),
        (ONES, {"power": 0}, ValueError, "power must be above 0; got 0"),
        (ONES, {"queries": 5}, ValueError, "queries must be 5 tokens.*; got 5"),
        (ONES, {"extent": (0, 1, 2, 2)}, ValueError, r"numbers .* \(0, 1, 2, 2\)"),
        (ONES, {"axes": [None] * 2}, ValueError, "each of the 3 heads; got 2"),
    ],
)
def test_what_cannot_be_drawn_is_refused(given, options, kind, says):
    with pytest.raises(kind, match=says):
        plot.attention_map(given, **options)
