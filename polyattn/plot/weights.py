"""Pictures of attention: the weights of each head, their entropy, and which keys a mask lets see.

What must hold true: what a figure shows has one scale of colours, even in lightness, which readers
with a colour vision deficiency tell apart; labels never overlap, however many tokens there are; the
figure is returned, nothing is shown or saved, and pyplot does not hold it.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from polyattn.api.weights import WHICH
from polyattn.arguments import check_int
from polyattn.arrays import Array, cast, is_array, library_of
from polyattn.dispatch.transfer import convert_like
from polyattn.expressions.masks import Mask, as_mask
from polyattn.extras import require_matplotlib
from polyattn.plot.mask import draw_mask

__all__ = ["attention_map", "entropy", "mask"]

# Perceptually uniform, and made for readers with a colour vision deficiency (Nuñez et al., 2018).
COLOURS, NOTHING = "cividis", "#d9dce1"
FONT = 8  # points
ROOM = 1.3  # what a label takes, of its own height
BAR = {"fraction": 0.05, "aspect": 30, "pad": 0.02}
LONGEST = 16  # characters of a label
# How a label shows what is blank.
BLANK = {"\n": "↵", "\r": "←", "\t": "⇥"}


def attention_map(
    weights: Array,
    queries: Sequence[Any] | None = None,
    keys: Sequence[Any] | None = None,
    *,
    heads: int | slice | Sequence[int] | None = None,
    power: float | None = None,
    axes: Any = None,
) -> Any:
    """Draw which keys each row attends to, a map for each head.

    Parameters
    ----------
    weights : Array
        Shape (L, S) or (H, L, S), as `polyattn.attention_weights` returns them.
    queries, keys : sequence of str, optional
        L and S tokens; a string is a sequence of its characters. Where there is no room for all
        labels, every second one is written, or every third, and so on.
    heads : int, slice or sequence of int, optional
        Which heads to draw; all by default.
    power : float, optional
        Colours follow the weights to this power: by default 1, and 0.5 for more than 64 keys, where
        nearly all weights are too small to be told from 0 otherwise.
    axes : matplotlib.axes.Axes or sequence of them, optional
        Where to draw, one for each head; by default in a new figure.

    Returns
    -------
    matplotlib.figure.Figure
        What was drawn on.

    Raises
    ------
    ImportError
        If there is no matplotlib.
    IndexError
        If there is no such head.
    TypeError, ValueError
        If the weights are none, or labels or axes are not as many as there must be.

    See Also
    --------
    polyattn.attention_weights : Where the weights come from.

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
    titles, maps = _maps(weights, heads)
    rows, columns = maps.shape[1:]
    labels = _labels("queries", queries, rows), _labels("keys", keys, columns)
    if power is None:
        power = 1.0 if columns <= 64 else 0.5
    elif not power > 0:
        raise ValueError(f"power must be above 0; got {power!r}")
    places = _given(axes, len(maps)) if axes is not None else _grid(figures, maps.shape, labels)
    colours = require_matplotlib("colors").PowerNorm(power, vmin=0, vmax=maps.max() or 1)
    aspect = "equal" if 1 / 3 <= rows / columns <= 3 else "auto"
    for place, title, one in zip(places, titles, maps, strict=True):
        image = place.axes.imshow(one, cmap=COLOURS, norm=colours, aspect=aspect)
        if title:
            place.axes.set_title(title, fontsize="medium")
        _write(place.axes.yaxis, "query", labels[0], place.at_left)
        _write(place.axes.xaxis, "key", labels[1], place.at_bottom)
    figure = places[0].axes.figure
    figure.colorbar(image, ax=[place.axes for place in places], label="weight", **BAR)
    return figure


def entropy(weights: Array | Sequence[Array], *, axes: Any = None) -> Any:
    """Draw the entropy of the weights for each layer and head, the mean over the rows, in bits.

    It is 0 where a row attends to one key, and log₂ n where it attends to n keys alike. What a row
    gives to no key, such as to a sink, is left out, and so is a row that sees no key; a head of
    such rows alone is grey.

    Parameters
    ----------
    weights : Array or sequence of Array
        Shape (layers, H, L, S), or an array of shape (H, L, S) for each layer, as
        `polyattn.attention_weights` returns them.
    axes : matplotlib.axes.Axes, optional
        Where to draw, by default in a new figure.

    Returns
    -------
    matplotlib.figure.Figure
        What was drawn on. The colours reach from 0 to log₂ S.

    Raises
    ------
    ImportError
        If there is no matplotlib.
    TypeError, ValueError
        If the weights are none, or the layers do not have as many heads as each other.

    Examples
    --------
    >>> import numpy as np
    >>> from polyattn import attention_weights, plot
    >>> x = np.random.default_rng(0).normal(size=(6, 12, 5, 8))
    >>> figure = plot.entropy(attention_weights(x, x, is_causal=True))
    >>> figure.axes[0].get_ylabel(), figure.axes[0].get_xlabel()
    ('layer', 'head')
    """
    numpy, figures = importlib.import_module("numpy"), require_matplotlib("figure")
    layers = _layers(weights)
    table = numpy.stack([_mean_entropy(layer, numpy) for layer in layers])
    keys = max(layer.shape[-1] for layer in layers)
    if axes is None:
        size = [2 + 0.42 * min(number, 20) for number in table.shape]
        axes = figures.Figure(figsize=(size[1] + 0.6, size[0]), layout="compressed").add_subplot()
    colours = require_matplotlib("colors").Normalize(0, math.log2(keys) or 1)
    shades = require_matplotlib().colormaps[COLOURS].with_extremes(bad=NOTHING)
    image = axes.imshow(table, cmap=shades, norm=colours)
    _write(axes.yaxis, "layer", None, True)
    _write(axes.xaxis, "head", None, True)
    axes.figure.colorbar(image, ax=axes, label="entropy, bits", **BAR)
    _write_numbers(axes, table, shades(colours(table)))
    return axes.figure


def mask(
    mask: Mask | Array | Callable[..., Array],
    query_length: int | None = None,
    key_length: int | None = None,
    *,
    axes: Any = None,
    **options: Any,
) -> Any:
    """Draw which keys a mask lets the rows see, and which tiles are empty, mixed and full.

    Parameters
    ----------
    mask : Mask, Array of bool or function
        What ``mask=`` of `polyattn.attention` takes.
    query_length, key_length : int, optional
        L and S; by default those of the mask's arrays, or 64.
    axes : matplotlib.axes.Axes, optional
        Where to draw, by default in a new figure.
    **options : Any
        As `polyattn.plot.mask.draw_mask` takes them: ``query_offset``, ``tile``, ``batch``,
        ``item``, ``head``, ``like``.

    Returns
    -------
    matplotlib.figure.Figure
        What was drawn on.

    Raises
    ------
    ImportError
        If there is no matplotlib.
    TypeError, ValueError
        If it is no mask, or not for such a call.

    Examples
    --------
    >>> from polyattn import masks, plot
    >>> figure = plot.mask(masks.causal() & masks.window(16, 0), 64)
    >>> figure.axes[0].get_title()
    'masks.causal() & masks.window(16, 0)'
    """
    shown = as_mask(mask)
    if axes is None:
        figure = require_matplotlib("figure").Figure(figsize=(4.6, 5.5), layout="compressed")
        axes = figure.add_subplot()
    return draw_mask(shown, query_length, key_length, axes=axes, **options).figure


# ---- what is drawn -----------------------------------------------------------------------------


def _maps(weights: Array, heads: int | slice | Sequence[int] | None) -> tuple[list[str], Any]:
    """Return a title for each head that is drawn, and their weights, shape (heads, L, S)."""
    _check_rank(weights, {2: "(L, S)", 3: "(H, L, S)"}, "weights")
    if len(weights.shape) == 2:
        if heads is not None:
            raise ValueError(f"heads={heads!r} is for weights of shape (H, L, S); got (L, S)")
        return [""], _host(weights, "weights")[None]
    number = weights.shape[0]
    if heads is None or isinstance(heads, slice):
        chosen = list(range(number)[heads or slice(None)])
    else:
        many = heads if isinstance(heads, Sequence) else [heads]
        chosen = [check_int("heads", head, WHICH) for head in many]
    for head in chosen:
        if not -number <= head < number:
            raise IndexError(f"heads: there are {number}, and {head} is none of them")
    if not chosen:
        raise ValueError(f"heads must name at least one; got {heads!r}")
    numpy = importlib.import_module("numpy")
    maps = numpy.stack([_host(weights[head, ...], "weights") for head in chosen])
    return [f"head {head % number}" for head in chosen], maps


def _layers(weights: Any) -> list[Any]:
    """Return the weights of each layer, shapes (H, L, S)."""
    if is_array(weights):
        _check_rank(weights, {4: "(layers, H, L, S)"}, "weights")
        given = [weights[number, ...] for number in range(weights.shape[0])]
    else:
        given = list(weights)
    if not given:
        raise ValueError("weights must hold a layer to draw; got an empty sequence")
    for number, layer in enumerate(given):
        _check_rank(layer, {3: "(H, L, S)"}, f"weights[{number}]")
    heads = [layer.shape[0] for layer in given]
    if len(set(heads)) != 1:
        raise ValueError(f"all layers must have as many heads as each other; got {heads}")
    return [_host(layer, f"weights[{number}]") for number, layer in enumerate(given)]


def _check_rank(weights: Any, shapes: dict[int, str], name: str) -> None:
    library_of(weights, name)
    shape = tuple(weights.shape)
    if len(shape) not in shapes:
        batch = (
            f": choose an item of the batch, as of {name}[0]" if len(shape) > max(shapes) else ""
        )
        raise ValueError(
            f"{name} must have the shape {' or '.join(shapes.values())}; got {shape}{batch}"
        )
    if 0 in shape:
        raise ValueError(f"{name} must hold something to draw; got the shape {shape}")


def _host(weights: Array, name: str) -> Any:
    """Return weights as a NumPy array, float32 so that every dtype goes the same way."""
    numpy, xp = importlib.import_module("numpy"), library_of(weights).xp
    host = convert_like(cast(xp, weights, xp.float32), numpy.zeros(1))
    # Written so that NaN is refused too.
    if not host.min() >= 0 or host.max() == math.inf:
        raise ValueError(
            f"{name} must be finite and at least 0; got {host.min()} to {host.max()}: pass what"
            " attention_weights returns, not scores"
        )
    return host


def _mean_entropy(weights: Any, numpy: Any) -> Any:
    """Return the mean entropy of the rows of each head, NaN where no row sees a key."""
    given = weights.sum(-1, keepdims=True)
    some = given > 0
    shares = numpy.divide(weights, given, out=numpy.zeros_like(weights), where=some)
    logarithms = numpy.log2(shares, out=numpy.zeros_like(shares), where=shares > 0)
    rows = -(shares * logarithms).sum(-1, dtype="float64")
    number = some.sum((-2, -1))
    return numpy.divide(
        rows.sum(-1), number, out=numpy.full(number.shape, math.nan), where=number > 0
    )


# ---- where it is drawn -------------------------------------------------------------------------


class _Place(NamedTuple):
    """Axes, and whether they are the ones that the labels of a row or column stand at."""

    axes: Any
    at_left: bool = True
    at_bottom: bool = True


def _given(axes: Any, number: int) -> list[_Place]:
    given = [axes] if hasattr(axes, "imshow") else list(getattr(axes, "flat", axes))
    if len(given) != number:
        raise ValueError(f"axes must be as many as heads are drawn, {number}; got {len(given)}")
    return [_Place(one) for one in given]


def _grid(figures: Any, shape: tuple[int, int, int], labels: Sequence[Any]) -> list[_Place]:
    """Return places in a new figure, as large as the maps and their labels ask for."""
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


# ---- what is written ---------------------------------------------------------------------------


def _labels(name: str, tokens: Sequence[Any] | None, length: int) -> list[str] | None:
    """Return tokens as they are written: blanks are seen, and what is long is cut short."""
    if tokens is None:
        return None
    if len(tokens) != length:
        raise ValueError(f"{name} must be the {length} tokens of the weights; got {len(tokens)}")
    return [_label(str(token)) for token in tokens]


def _label(token: str) -> str:
    inner = token.strip(" ")
    ends = len(token) - len(token.lstrip(" ")), len(token) - len(token.rstrip(" "))
    text = "␣" * ends[0] + inner + ("␣" * ends[1] if inner else "")
    text = "".join(BLANK.get(letter, letter) for letter in text)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


def _write(axis: Any, name: str, tokens: list[str] | None, shown: bool) -> None:
    """Name an axis and its ticks, where they are to be shown."""
    ticker = require_matplotlib("ticker")
    is_x = axis.axis_name == "x"
    axis.set_tick_params(
        labelsize=FONT, length=2, **{"labelbottom" if is_x else "labelleft": shown}
    )
    axis.set_label_text(name if shown else "")
    if tokens is None:
        axis.set_major_locator(ticker.MaxNLocator(6, integer=True, min_n_ticks=1))
        return
    axis.set_major_locator(_thinned(axis, len(tokens), ticker))
    # A dollar would begin a formula.
    texts = {at: token.replace("$", r"\$") for at, token in enumerate(tokens)}
    axis.set_major_formatter(ticker.FuncFormatter(lambda at, _: texts.get(round(at), "")))
    if is_x:
        axis.set_tick_params(rotation=90)


def _thinned(axis: Any, number: int, ticker: Any) -> Any:
    """Return what finds the ticks of so many labels: as many as there is room for."""

    class Thinned(ticker.Locator):  # type: ignore[misc]
        def __call__(self) -> range:
            # Asked whenever the figure is drawn, so that it holds for every size and layout.
            box, across = axis.axes.get_window_extent(), axis.axis_name == "x"
            points = (box.width if across else box.height) * 72 / axis.axes.figure.dpi
            first, last = sorted(axis.get_view_interval())
            step = math.ceil(ROOM * FONT * (last - first) / max(points, 1))
            return range(max(0, math.ceil(first)), min(number, math.floor(last) + 1), max(step, 1))

    return Thinned()


def _write_numbers(axes: Any, table: Any, shades: Any) -> None:
    """Write each number in its cell, if they fit there."""
    box = axes.get_window_extent()
    side = min(box.height / table.shape[0], box.width / table.shape[1]) * 72 / axes.figure.dpi
    if side < 3 * FONT:
        return
    for row, cells in enumerate(table):
        for column, number in enumerate(cells):
            dark = shades[row, column, :3] @ (0.2126, 0.7152, 0.0722) < 0.45
            text = "–" if math.isnan(number) else f"{number:.1f}"
            colour = "white" if dark else "black"
            axes.text(column, row, text, ha="center", va="center", fontsize=FONT, color=colour)
