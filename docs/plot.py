"""Draws the pictures of plot.md by running the code that stands below each."""

import re
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from PIL import Image

PAGE = Path(__file__).with_name("plot.md")
DPI = 84


def run() -> Iterator[tuple[str, Figure]]:
    """Run the code of the page as a reader would, and yield each picture's name and figure."""
    names: dict[str, Any] = {}
    text = PAGE.read_text(encoding="utf-8")
    pattern = r"(?:^!\[[^]]*\]\(([^)]+)\)\n\n)?^```python\n(.*?)^```"
    for picture, code in re.findall(pattern, text, flags=re.DOTALL | re.MULTILINE):
        exec(compile(code, str(PAGE), "exec"), names)
        if picture:
            yield picture, names["figure"]


def save(figure: Figure, file: Path) -> None:
    """Save a figure as a PNG of few colours, which is a fraction of the size."""
    pixels = BytesIO()
    figure.savefig(pixels, format="png", dpi=DPI)
    picture = Image.open(pixels).convert("RGB").quantize(256, kmeans=1)
    picture.save(file, format="png", optimize=True)


def main(folder: Path = PAGE.parent) -> None:
    """Draw the pictures."""
    for picture, figure in run():
        save(figure, folder / picture)


if __name__ == "__main__":
    main()
