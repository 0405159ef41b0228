"""Draw the pictures of masks.md by running the code below each."""

from io import BytesIO
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure
from pages import run
from PIL import Image

matplotlib.use("Agg")
PAGE = Path(__file__).with_name("masks.md")
DPI = 84


def save(figure: Figure, file: Path) -> None:
    """Save a figure as a PNG of few colours, for a small file."""
    pixels = BytesIO()
    figure.savefig(pixels, format="png", dpi=DPI)
    picture = Image.open(pixels).convert("RGB").quantize(128, kmeans=1)
    picture.save(file, format="png", optimize=True)


def main(folder: Path = PAGE.parent) -> None:
    """Draw the pictures."""
    for done in run(PAGE):
        if done.block.picture is not None:
            save(done.names["figure"], folder / done.block.picture)


if __name__ == "__main__":
    main()
