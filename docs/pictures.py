"""Save figures for the pages."""

from io import BytesIO
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

#: Dots per inch: twice as many as a page shows, for screens that have them.
DPI = 168
# Okabe and Ito's colours. A line has a style or marker of its own besides, a bar a hatch.
BLUE, ORANGE, GREEN, RED, GREY = "#0072b2", "#e69f00", "#009e73", "#d55e00", "#6b7280"


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


def bare(axes: Axes) -> None:
    """Remove the frame's top and right."""
    axes.spines[["top", "right"]].set_visible(False)
