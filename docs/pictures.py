"""Save figures for the pages."""

from io import BytesIO
from pathlib import Path

from matplotlib.figure import Figure
from PIL import Image

#: Dots per inch: twice as many as a page shows, for screens that have them.
DPI = 168


def drawn(figure: Figure, dpi: int = DPI) -> Image.Image:
    """Return the picture of a figure."""
    pixels = BytesIO()
    figure.savefig(pixels, format="png", dpi=dpi)
    return Image.open(pixels).convert("RGB")


def write(picture: Image.Image, file: Path, dpi: int = DPI) -> None:
    """Write a picture as a PNG of few colours, for a small file, with its dots per inch."""
    few = picture.quantize(128, kmeans=1)
    few.save(file, format="png", optimize=True, dpi=(dpi, dpi))


def save(figure: Figure, file: Path, dpi: int = DPI) -> None:
    """Save a figure."""
    write(drawn(figure, dpi), file, dpi)
