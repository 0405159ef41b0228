"""Draw the attention of a word: arcs for one head, and a heat map of its layer.

Requirements: every width, shade and number is an attention weight of the model, on one scale for
both sentences; colour-blind readers can tell the colours apart (Okabe and Ito, 2008), and colour
carries no information of its own; the picture is the same on every machine.
"""

from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .reading import Interpretation, is_word
from .weights import NAME

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Everything is laid out in pixels, from the top left corner.
WIDTH, HEIGHT, DPI = 1600, 968, 100
LEFT, GAP = 64, 23
TOPS, BASELINE = (132, 512), 276
MAP_LEFT, CELL = 1262, 30
THICKEST, THINNEST = 46, 1.2  # the arcs of a weight of 1, and of the weights too small to see

INK, QUIET, FAINT, PAPER = "#1f2430", "#6b7280", "#c9cdd4", "#ffffff"
BLUE, VERMILION = "#0072b2", "#d55e00"
SHADES = ("#f3f4f7", "#8d97b3", INK)
TITLE, NUMBER, TOKEN, TEXT, SMALL = 38, 50, 29, 22, 19


def draw(pair: tuple[Interpretation, Interpretation], file: Path) -> None:
    """Save the picture of the result of `read_pair` as a PNG file."""
    from matplotlib import style
    from matplotlib.figure import Figure

    # Without pyplot, which would need a window system, and without the user's style.
    with style.context("default"):
        figure = Figure(figsize=(WIDTH / DPI, HEIGHT / DPI), dpi=DPI, facecolor=PAPER)
        axes = figure.add_axes((0, 0, 1, 1), xlim=(0, WIDTH), ylim=(HEIGHT, 0))
        axes.set_axis_off()
        page = Page(axes, pair)
        page.heading()
        for reading, top in zip(pair, TOPS, strict=True):
            page.call_out(reading, top)
            page.arcs(reading, top)
            page.tokens(reading, top)
            page.heat_map(reading, top)
        page.footing()
        save(figure, file)


def save(figure: "Figure", file: Path) -> None:
    """Save a figure as a PNG of few colours."""
    from PIL import Image

    pixels = BytesIO()
    figure.savefig(pixels, format="png")
    # A palette takes a third of the size; with k-means the difference is invisible.
    picture = Image.open(pixels).convert("RGB").quantize(256, kmeans=1)
    small = BytesIO()
    picture.save(small, format="png", optimize=True)
    write(small.getvalue(), file)


def write(content: bytes, file: Path) -> None:
    """Write a file whole, or leave what was there as it was."""
    beside = file.with_name(f".{file.name}.part")
    try:
        beside.write_bytes(content)
        beside.replace(file)
    except OSError as error:
        error.filename = str(file)  # that of a full disk names none
        raise
    finally:
        beside.unlink(missing_ok=True)


class Page:
    """The axes, and the columns, colours and scale that both sentences share."""

    def __init__(self, axes: "Axes", pair: tuple[Interpretation, Interpretation]) -> None:
        one, other = pair
        self.axes = axes
        self.word = one.tokens[one.at]
        self.layer, self.head = one.layer + 1, one.head + 1
        self.heads = one.maps.shape[0] * one.maps.shape[1]
        self.columns = centre_columns(pair)
        self.differs = [a != b for a, b in zip(one.tokens, other.tokens, strict=True)]
        self.colours = {other.tokens[other.top]: VERMILION, one.tokens[one.top]: BLUE}
        self.darkest = max(float(reading.mean_between_words.max()) for reading in pair)

    def heading(self) -> None:
        """Write the title."""
        place = f"layer {self.layer}, head {self.head} of {NAME}"
        self.write(LEFT, 60, f"What does “{self.word}” mean?", TITLE, weight="bold")
        self.write(LEFT, 98, f"Where “{self.word}” looks in {place}", TEXT, QUIET)
        self.write(MAP_LEFT, 98, f"Layer {self.layer}, mean of heads", TEXT, QUIET)

    def footing(self) -> None:
        """Write how to read the picture."""
        left = (
            f"Percentages: where its attention goes, in the one of {self.heads} heads in which "
            "the sentences differ most.\n"
            "The grey labels [CLS], [SEP] and . are no words: BERT rests attention there."
        )
        right = f"Words only. Rows look at\ncolumns; the darkest is {self.darkest:.0%}."
        self.write(LEFT, 888, left, SMALL, QUIET, va="top", linespacing=1.45)
        self.write(MAP_LEFT, 888, right, SMALL, QUIET, va="top", linespacing=1.45)

    def call_out(self, reading: Interpretation, top: int) -> None:
        """Write the largest share in large type, above the end of the sentence."""
        token, x = reading.tokens[reading.top], self.columns[-3]
        percent, colour = f"{reading.shares[reading.top]:.0%}", self.colours[token]
        self.write(x, top + 42, percent, NUMBER, colour, weight="bold", ha="center")
        self.write(x, top + 76, f"at “{token}”", TEXT, colour, ha="center")

    def arcs(self, reading: Interpretation, top: int) -> None:
        """Draw an arc from the word to each other token, as thick as its share."""
        # Light arcs first, so that heavy ones lie on top.
        for j in np.argsort(reading.shares):
            if j != reading.at:
                ends = self.columns[reading.at], self.columns[j]
                colour = self.colours.get(reading.tokens[j], FAINT)
                self.arc(ends, top + BASELINE - 32, float(reading.shares[j]), colour)

    def arc(self, ends: tuple[float, float], base: float, share: float, colour: str) -> None:
        """Draw one arc."""
        from matplotlib.patches import PathPatch
        from matplotlib.path import Path as Curve

        start, end = ends
        rise = base - 50 - 0.38 * abs(end - start)
        corners = [(start, base), (start, rise), (end, rise), (end, base)]
        curve = Curve(corners, [Curve.MOVETO, Curve.CURVE4, Curve.CURVE4, Curve.CURVE4])
        width = points(max(THINNEST, share * THICKEST))
        self.axes.add_patch(
            PathPatch(curve, fill=False, color=colour, linewidth=width, capstyle="butt")
        )

    def tokens(self, reading: Interpretation, top: int) -> None:
        """Write the sentence, and below each token its share."""
        for j, (x, token) in enumerate(zip(self.columns, reading.tokens, strict=True)):
            colour = self.colours.get(token, INK if is_word(token) else QUIET)
            named = token in self.colours
            strong = bold(named or j == reading.at or self.differs[j])
            self.write(x, top + BASELINE, token, TOKEN, colour, weight=strong, ha="center")
            y, percent = top + BASELINE + 36, f"{reading.shares[j]:.0%}"
            self.write(x, y, percent, SMALL, colour, weight=bold(named), ha="center")

    def heat_map(self, reading: Interpretation, top: int) -> None:
        """Draw the attention between the words, in the mean of the layer's heads."""
        side = len(reading.words) * CELL
        for row, i in enumerate(reading.words):
            token, y = reading.tokens[i], top + row * CELL + 22
            strong = bold(i == reading.at)
            self.write(MAP_LEFT - 10, y, token, SMALL, weight=strong, ha="right")
        for column, j in enumerate(reading.words):
            token, x = reading.tokens[j], MAP_LEFT + column * CELL + CELL / 2
            colour = self.colours.get(token, INK)
            self.write(x, top + side + 6, token, SMALL, colour, rotation=90, va="top", ha="center")
        self.squares(reading.mean_between_words, top)
        row = reading.words.index(reading.at)
        frame = MAP_LEFT - 3, top + row * CELL - 3, side + 4, CELL + 4
        self.rectangle(*frame, fill=False, color=INK, linewidth=2)

    def squares(self, weights: NDArray[np.float32], top: int) -> None:
        """Draw a square per weight, the darker the larger."""
        from matplotlib.colors import LinearSegmentedColormap

        shades = LinearSegmentedColormap.from_list("ink", SHADES)
        for (row, column), weight in np.ndenumerate(weights):
            x, y = MAP_LEFT + column * CELL, top + row * CELL
            shade = shades(float(weight) / self.darkest)
            self.rectangle(x, y, CELL - 2, CELL - 2, color=shade, linewidth=0)

    def rectangle(self, x: float, y: float, width: float, height: float, **style: Any) -> None:
        """Draw one rectangle."""
        from matplotlib.patches import Rectangle

        self.axes.add_patch(Rectangle((x, y), width, height, **style))

    def write(
        self, x: float, y: float, text: str, size: float, colour: str = INK, **style: Any
    ) -> None:
        """Write one text."""
        self.axes.text(x, y, text, fontsize=points(size), color=colour, **style)


def centre_columns(pair: tuple[Interpretation, Interpretation]) -> list[float]:
    """Centre each token so that the same words of both sentences stand below each other."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextPath

    font = FontProperties(family="DejaVu Sans", weight="bold")
    centres, x = [], float(LEFT)
    for tokens in zip(*(reading.tokens for reading in pair), strict=True):
        paths = [TextPath((0, 0), token, size=TOKEN, prop=font) for token in tokens]
        width = max(path.get_extents().width for path in paths)
        centres.append(x + width / 2)
        x += width + GAP
    return centres


def bold(strong: bool) -> str:
    """Name the font weight."""
    return "bold" if strong else "normal"


def points(pixels: float) -> float:
    """Turn pixels into matplotlib's unit of type and lines, 1/72 inch."""
    return pixels * 72 / DPI
