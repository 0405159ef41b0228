"""Draw the weights of each head.

Requirements: a figure has one scale of colours, even in lightness and readable with a colour vision
deficiency; labels never overlap, however many tokens there are; the figure is returned, nothing is
shown or saved, and pyplot keeps no reference to it.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence, Sized
from typing import Any, NamedTuple

from polyattn._api.weights import TopWeights
from polyattn._base.arrays import Array
from polyattn._base.extras import require_matplotlib
from polyattn._core.call.options import check_finite
from polyattn.plot.cells import MOST_CELLS, maps_of

# Perceptually uniform, and made for readers with a colour vision deficiency (Nuñez et al., 2018).
COLOURS = "cividis"
FONT = 8  # points
SPACING = 1.3  # the space for a label, over its height
BAR = {"fraction": 0.05, "aspect": 30, "pad": 0.02}
BRIGHT = 0.99  # of the points of a long map that are not 0: its colours end at this quantile
LONGEST = 16  # characters of a label
# The signs for white space in labels, and for control characters, which an SVG cannot have.
CONTROLS = {*range(32), *range(127, 160), 0xFFFE, 0xFFFF}
BLANK = {n: repr(chr(n))[1:-1] for n in CONTROLS} | {10: "↵", 13: "←", 9: "⇥"}


def attention_map(
    weights: Array | TopWeights,
    queries: Sequence[Any] | None = None,
    keys: Sequence[Any] | int | None = None,
    *,
    heads: int | slice | Sequence[int] | None = None,
    extent: tuple[float, float, float, float] | None = None,
    power: float | None = None,
    axes: Any = None,
) -> Any:
    """Draw which keys each row attends to, a map for each head.

    Parameters
    ----------
    weights : Array or TopWeights
        Shape (L, S) or (H, L, S), as `polyattn.attention_weights` returns them; or its result for
        ``top=``, which does not know the number of keys: without `keys`, the map ends at the last
        key that it names. Above 512 queries or keys, a point of the map is the largest weight of a
        block of them, and the largest hundredth of the points that are not 0 share the last colour.
    queries, keys : sequence of str, or int, optional
        L and S tokens; a string is a sequence of characters. If there is no room for all labels,
        every second one is written, or every third, and so on. Of ``top=`` the number S will do.
    heads : int, slice or sequence of int, optional
        The heads to draw; all by default.
    extent : tuple of float, optional
        The edges (left, right, bottom, top) of a map in numbers such as seconds, as for ``imshow``:
        keys from left to right, and the first query at the top. In place of tokens.
    power : float, optional
        The exponent of the weights in the scale of colours: by default 1, and 0.5 for more than 64
        keys, where most weights would otherwise look like 0.
    axes : matplotlib.axes.Axes or sequence of them, optional
        The axes to draw in, one for each head; by default in a new figure. Their figure gets the
        layout "compressed", with room for all labels, unless it has a layout.

    Returns
    -------
    matplotlib.figure.Figure
        The figure of the axes.

    Raises
    ------
    ImportError
        If matplotlib is not installed.
    IndexError
        If a head is out of range.
    TypeError, ValueError
        If the weights are not weights, or the number of labels or axes is wrong.

    Examples
    --------
    >>> import numpy as np
    >>> from polyattn import attention_weights, plot
    >>> x = np.random.default_rng(0).normal(size=(4, 3, 8))
    >>> words = ["the", "cat", "sat"]
    >>> figure = plot.attention_map(attention_weights(x, x), words, words)
    >>> [axes.get_title() for axes in figure.axes[:4]]
    ['head 0', 'head 1', 'head 2', 'head 3']
    """
    figures = require_matplotlib("figure")
    names: Any = keys
    if isinstance(weights, TopWeights) and isinstance(keys, int):
        names = None
    elif isinstance(weights, TopWeights) and extent is not None and keys is None:
        raise ValueError("extent needs the number of keys, which top= does not know: pass keys=S")
    titles, maps, (rows, columns) = maps_of(weights, heads, keys)
    labels = _labels("queries", queries, rows), _labels("keys", names, columns)
    if power is None:
        power = 1.0 if columns <= 64 else 0.5
    elif check_finite("power", power) <= 0:
        raise ValueError(f"power must be above 0; got {power!r}")
    places = (
        _grid(figures, (len(maps), rows, columns), labels)
        if axes is None
        else _places(axes, len(maps))
    )
    figure = places[0].axes.figure
    if figure.get_layout_engine() is None:
        figure.set_layout_engine("compressed")
    top = maps.max() or 1.0
    if max(rows, columns) > MOST_CELLS and maps.any():
        top = importlib.import_module("numpy").quantile(maps[maps > 0], BRIGHT)
    colours = require_matplotlib("colors").PowerNorm(power, vmin=0, vmax=top)
    cell = 1.0 if extent is None else _cell_ratio(extent, labels, rows, columns)
    edges = (-0.5, columns - 0.5, rows - 0.5, -0.5) if extent is None else extent
    aspect = cell if 1 / 3 <= rows / columns <= 3 else "auto"
    for place, title, head in zip(places, titles, maps, strict=True):
        image = place.axes.imshow(head, cmap=COLOURS, norm=colours, aspect=aspect, extent=edges)
        if title:
            place.axes.set_title(title, fontsize=FONT)
        _write(place.axes.yaxis, "query", labels[0], place.at_left, extent is None)
        _write(place.axes.xaxis, "key", labels[1], place.at_bottom, extent is None)
    _add_bar(figure, image, [place.axes for place in places], top < maps.max())
    return figure


# ---- axes --------------------------------------------------------------------------------------


class _Place(NamedTuple):
    """Axes, and whether they show the labels of their row and column of the grid."""

    axes: Any
    at_left: bool = True
    at_bottom: bool = True


def _places(axes: Any, number: int) -> list[_Place]:
    """Return the caller's axes, if there are as many as heads."""
    flat = [axes] if hasattr(axes, "imshow") else list(getattr(axes, "flat", axes))
    if len(flat) != number:
        raise ValueError(f"there must be one axes for each of the {number} heads; got {len(flat)}")
    return [_Place(item) for item in flat]


def _cell_ratio(extent: Sequence[float], labels: Sequence[Any], rows: int, columns: int) -> float:
    """Return the width of a cell over its height, in the numbers of an extent."""
    if labels != (None, None):
        raise ValueError("extent numbers the axes, and queries and keys name them: give one")
    left, right, bottom, top = extent if len(extent) == 4 else (math.nan,) * 4
    width, height = abs(right - left) / columns, abs(top - bottom) / rows
    if not (0 < width < math.inf and 0 < height < math.inf):
        raise ValueError(
            "extent must be four numbers (left, right, bottom, top), of which the first two differ"
            f" and the last two; got {extent!r}"
        )
    return width / height


def _grid(figures: Any, shape: tuple[int, int, int], labels: Sequence[Any]) -> list[_Place]:
    """Return axes in a new figure, whose size fits the maps and their labels."""
    number, *lengths = shape
    across = math.ceil(math.sqrt(number))
    down = math.ceil(number / across)
    longest = max(lengths)
    side = min(max(0.17 * longest, 1.9), 1.4 + 4.6 / across)
    height, width = (side * max(length / longest, 1 / 3) for length in lengths)
    beside, below = (0.07 * max(map(len, tokens or [""])) + 0.6 for tokens in labels)
    figure = figures.Figure(
        figsize=(across * width + beside + 1.0, down * (height + 0.3) + below), layout="compressed"
    )
    grid = figure.subplots(down, across, squeeze=False)
    for unused in grid.flat[number:]:
        unused.remove()
    return [
        _Place(place, n % across == 0, n + across >= number)
        for n, place in enumerate(grid.flat[:number])
    ]


# ---- text --------------------------------------------------------------------------------------


def _labels(name: str, tokens: Sequence[Any] | None, length: int) -> list[str] | None:
    """Return the labels of tokens: white space is made visible, and long tokens are shortened."""
    if tokens is None:
        return None
    given = len(tokens) if isinstance(tokens, Sized) else repr(tokens)
    if given != length:
        raise ValueError(f"{name} must be {length} tokens, as for the weights; got {given}")
    return [_label(str(token)) for token in tokens]


def _label(token: str) -> str:
    inner = token.strip(" ")
    ends = len(token) - len(token.lstrip(" ")), len(token) - len(token.rstrip(" "))
    text = "␣" * ends[0] + inner + ("␣" * ends[1] if inner else "")
    text = text.translate(BLANK)
    text = text.encode(errors="replace").decode()  # half of a pair is no letter of a font
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


def _add_bar(figure: Any, image: Any, axes: list[Any], is_cut: bool) -> None:
    """Add the colour bar of some maps, which ends in a point if there are larger numbers."""
    bar = figure.colorbar(image, ax=axes, extend="max" if is_cut else "neither", **BAR)
    bar.set_label("weight", fontsize=FONT)
    bar.ax.tick_params(labelsize=FONT)


def _write(axis: Any, name: str, tokens: list[str] | None, shown: bool, numbered: bool) -> None:
    """Label an axis and its ticks, if the labels are shown."""
    ticker = require_matplotlib("ticker")
    is_x = axis.axis_name == "x"
    axis.set_tick_params(
        labelsize=FONT, length=2, **{"labelbottom" if is_x else "labelleft": shown}
    )
    axis.set_label_text(name if shown else "", fontsize=FONT)
    if tokens is None:
        axis.set_major_locator(
            ticker.MaxNLocator(6, integer=numbered, min_n_ticks=1, steps=(1, 2, 5, 10))
        )
        return
    axis.set_major_locator(_spaced_ticks(axis, len(tokens), ticker))
    # An unescaped dollar sign would begin a formula.
    texts = {at: token.replace("$", r"\$") for at, token in enumerate(tokens)}
    axis.set_major_formatter(ticker.FuncFormatter(lambda at, _: texts.get(round(at), "")))
    if is_x:
        axis.set_tick_params(rotation=90)


def _spaced_ticks(axis: Any, number: int, ticker: Any) -> Any:
    """Return a locator that places as many ticks as there is room for."""

    class SpacedTicks(ticker.Locator):  # type: ignore[misc]
        of, step = (), 1

        def __call__(self) -> range:
            # matplotlib calls this whenever it draws, so it holds for every size and layout.
            box, across = axis.axes.get_window_extent(), axis.axis_name == "x"
            points = (box.width if across else box.height) * 72 / axis.axes.figure.dpi
            first, last = sorted(axis.get_view_interval())
            of = (*axis.axes.figure.get_size_inches(), first, last)
            step = math.ceil(SPACING * FONT * (last - first) / max(points, 1))
            # A layout makes axes larger where labels are left out: they must not come back.
            self.of, self.step = of, max(step, self.step if of == self.of else 1)
            return range(max(0, math.ceil(first)), min(number, math.floor(last) + 1), self.step)

    return SpacedTicks()
