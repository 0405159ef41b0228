"""Draws the pictures of masks.md by running the code that stands beside each."""

import re
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib import pyplot
from matplotlib.figure import Figure
from PIL import Image

matplotlib.use("Agg")
PAGE = Path(__file__).with_name("masks.md")
DPI = 84


def blocks() -> Iterator[tuple[str | None, str]]:
    """The code of the page in order, each block with the picture above it, if there is one."""
    text = PAGE.read_text(encoding="utf-8")
    pattern = r"(?:^!\[[^]]*\]\(([^)]+)\)\n\n)?^```python\n(.*?)^```"
    for found in re.finditer(pattern, text, flags=re.DOTALL | re.MULTILINE):
        yield found[1], found[2]


def run() -> Iterator[tuple[str | None, dict[str, Any]]]:
    """Run the blocks as a reader would, and yield each one's picture and the names so far."""
    names: dict[str, Any] = {}
    for picture, code in blocks():
        exec(compile(code, str(PAGE), "exec"), names)
        yield picture, names


def save(figure: Figure, file: Path) -> None:
    """Save a figure as a PNG of few colours, which is a fraction of the size."""
    pixels = BytesIO()
    figure.savefig(pixels, format="png", dpi=DPI)
    picture = Image.open(pixels).convert("RGB").quantize(128, kmeans=1)
    picture.save(file, format="png", optimize=True)


def main(folder: Path = PAGE.parent) -> None:
    """Draw the pictures."""
    for picture, _ in run():
        if picture is not None:
            save(pyplot.gcf(), folder / picture)
        pyplot.close("all")


if __name__ == "__main__":
    main()
