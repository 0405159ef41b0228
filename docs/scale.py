"""Draw the picture of scale.md: which device holds and computes what."""

from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
from pictures import BLUE, GREEN, GREY, ORANGE, save

matplotlib.use("Agg")
PICTURE = Path(__file__).with_name("images") / "scale.png"
SIZE, DPI = 4, 84
GAP = 0.06  # a pixel, so that all gaps look alike
COLOURS = (BLUE, ORANGE, GREEN, GREY)
WAYS = (
    ("ring, contiguous", "contiguous", "rows"),
    ("ring, zigzag", "zigzag", "rows"),
    ("heads", "contiguous", "heads"),
    ("decode", "contiguous", "keys"),
)


def owners(layout: str) -> list[int]:
    """Return the rank that holds each of 2n chunks."""
    if layout == "contiguous":
        return [chunk // 2 for chunk in range(2 * SIZE)]
    return [min(chunk, 2 * SIZE - 1 - chunk) for chunk in range(2 * SIZE)]


def draw(axes: Any, title: str, layout: str, by: str) -> None:
    """Draw the pairs of chunks of a causal call in the colours of the ranks that compute them."""
    chunks = 2 * SIZE
    owner = owners(layout)
    rows = 1 if by == "keys" else chunks
    for row in range(rows):
        for key in range(chunks if by == "keys" else row + 1):
            if by == "heads":  # each rank computes its heads of every pair
                for rank in range(SIZE):
                    box(axes, key + rank / SIZE, row, 1 / SIZE, COLOURS[rank])
            else:
                box(axes, key, row, 1, COLOURS[owner[row if by == "rows" else key]])
    for chunk in range(chunks):
        box(axes, chunk, -1.6, 1, COLOURS[owner[chunk]])  # who holds the keys
        if by != "keys":
            box(axes, -1.6, chunk, 1, COLOURS[owner[chunk]])
    axes.set(xlim=(-1.8, chunks + 0.1), ylim=(chunks + 0.1, -1.8), aspect="equal")
    axes.set_title(title, fontsize=10)
    axes.axis("off")


def box(axes: Any, x: float, y: float, width: float, colour: str) -> None:
    """Fill a part of a cell."""
    axes.add_patch(plt.Rectangle((x, y), width - GAP, 1 - GAP, color=colour, lw=0))


def main(file: Path = PICTURE) -> None:
    """Draw the picture."""
    figure, all_axes = plt.subplots(1, len(WAYS), figsize=(9.6, 2.9))
    for axes, way in zip(all_axes, WAYS, strict=True):
        draw(axes, *way)
    figure.legend(
        handles=[plt.Rectangle((0, 0), 1, 1, color=c) for c in COLOURS],
        labels=[f"rank {rank}" for rank in range(SIZE)],
        loc="lower center", ncols=SIZE, frameon=False, fontsize=9,
    )  # fmt: skip
    figure.tight_layout(rect=(0, 0.08, 1, 1))
    save(figure, file, DPI)
    plt.close(figure)


if __name__ == "__main__":
    main()
