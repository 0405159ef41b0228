"""Draw the picture of native.md: a panel of rows and a block of keys."""

from pathlib import Path

import matplotlib
import numpy as np
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from pictures import BLUE, ORANGE, save

matplotlib.use("Agg")
PICTURE = Path(__file__).with_name("images") / "native.png"
# Float32 with AVX2: two vectors of 8 lanes, 6 keys at once. Keys and sizes are fewer than usual.
LANES, KEYS, SIZE, MOST = 16, 24, 8, 6
FIRST_ROW = 6  # the position of the first lane's row, under causal
SILVER, PALE = "#c9ced6", "#dfe9f0"


def tiles(count: int) -> list[int]:
    """Return where the tiles of so many keys end: their sizes differ by one at most."""
    number = -(-count // MOST)
    return [count * (tile + 1) // number for tile in range(number)]


def grid(axes: Axes, x: float, y: float, colours: np.ndarray) -> None:
    """Draw a matrix of coloured cells, its first row on top."""
    for (i, j), colour in np.ndenumerate(colours):
        cell = Rectangle((x + j, y + i), 1, 1, facecolor=colour, edgecolor="white", linewidth=0.6)
        axes.add_patch(cell)


def frame(axes: Axes, x: float, y: float, width: float, height: float) -> None:
    """Draw what one run of the microkernel reads or writes."""
    axes.add_patch(
        Rectangle((x, y), width, height, fill=False, edgecolor=ORANGE, linewidth=2, zorder=3)
    )


def scores() -> np.ndarray:
    """Return the colours of the scores of a causal call."""
    key, position = np.arange(KEYS)[:, None], FIRST_ROW + np.arange(LANES)
    seen = np.where(key <= position, BLUE, SILVER).astype(object)
    seen[key[:, 0] > position.max()] = "white"
    return seen


def first(axes: Axes) -> None:
    """Draw the product of keys and query, and the direction of the softmax."""
    grid(axes, 0, -SIZE - 1, np.full((SIZE, LANES), PALE))
    grid(axes, -SIZE - 1, 0, np.full((KEYS, SIZE), PALE))
    grid(axes, 0, 0, scores())
    last = FIRST_ROW + LANES
    start, end = tiles(last)[:2]
    frame(axes, 0, start, LANES, end - start)
    frame(axes, -SIZE - 1, start, SIZE, end - start)
    frame(axes, 0, -SIZE - 1, LANES, SIZE)
    axes.plot([8, 8], [-SIZE - 1.4, KEYS], color="black", linewidth=0.8, linestyle=":")
    axes.annotate(
        "", (3.5, last - 0.3), (3.5, 0.3),
        arrowprops={"arrowstyle": "->", "color": "white", "linewidth": 1.8},
    )  # fmt: skip
    axes.text(LANES / 2, -SIZE - 1.6, "query: a panel of 16 rows", ha="center", va="bottom")
    axes.text(-SIZE - 1.4, KEYS / 2, "keys, where they lie", rotation=90, ha="right", va="center")
    right = LANES + 0.5
    axes.text(right, FIRST_ROW / 2, "all rows see:\nno mask", va="center")
    axes.text(
        right, (FIRST_ROW + last) / 2, "compared with\nthe last key\nof each row", va="center"
    )
    axes.text(right, (last + KEYS) / 2, "not computed", va="center")
    axes.set_title("scores [key][row], and their softmax down the lanes", fontsize=9)


def second(axes: Axes) -> None:
    """Draw the product of values and weights."""
    below = FIRST_ROW + LANES + 1
    grid(axes, 0, 0, scores()[: below - 1])
    grid(axes, -SIZE - 1, 0, np.full((below - 1, SIZE), PALE))
    grid(axes, 0, below, np.full((SIZE, LANES), PALE))
    end = tiles(SIZE)[0]
    frame(axes, 0, 0, LANES, below - 1)
    frame(axes, -SIZE - 1, 0, end, below - 1)
    frame(axes, 0, below, LANES, end)
    axes.text(-SIZE - 1.4, (below - 1) / 2, "values, where they lie", rotation=90, ha="right",
              va="center")  # fmt: skip
    axes.text(LANES / 2, -0.4, "weights [key][row]", ha="center", va="bottom")
    axes.text(LANES + 0.5, below + SIZE / 2, "output\n[element][row]", va="center")
    axes.set_title("output, before the division", fontsize=9)


def main(file: Path = PICTURE) -> None:
    """Draw the picture."""
    with pyplot.rc_context({"font.size": 8}):
        figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 4.6), width_ratios=(1.08, 1))
        first(left)
        second(right)
        for axes in (left, right):
            axes.set(xlim=(-SIZE - 3, LANES + 8), ylim=(KEYS + SIZE, -SIZE - 3), aspect="equal")
            axes.axis("off")
        left.set_ylim(KEYS + 0.5, -SIZE - 3)
        right.set_ylim(KEYS + SIZE - 0.5, -2)
        figure.tight_layout()
        save(figure, file)
        pyplot.close(figure)


if __name__ == "__main__":
    main()
