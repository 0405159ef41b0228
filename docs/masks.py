"""Draw the pictures of masks.md and plot.md by running the code below each."""

from pathlib import Path

import matplotlib
from matplotlib.figure import Figure
from pages import run
from pictures import DPI, drawn, write
from PIL import Image

matplotlib.use("Agg")
FOLDER = Path(__file__).parent
#: Dots across a thumbnail.
ACROSS = 288


def thumbnail(picture: Image.Image, figure: Figure) -> Image.Image:
    """Return the part of a picture that is inside of its axes, small."""
    box = figure.axes[0].get_window_extent().transformed(figure.dpi_scale_trans.inverted())
    left, bottom, right, top = (DPI * inches for inches in box.extents)
    inside = picture.crop((left, picture.height - top, right, picture.height - bottom))
    return inside.resize((ACROSS, ACROSS), Image.Resampling.LANCZOS)


def save(figure: Figure, file: Path) -> None:
    """Save a figure, and the thumbnail of a mask."""
    picture = drawn(figure)
    write(picture, file)
    name = file.name.replace("mask-", "thumb-")
    if name != file.name:
        write(thumbnail(picture, figure), file.with_name(name))


def main(folder: Path = FOLDER) -> None:
    """Draw the pictures."""
    for done in (*run(FOLDER / "masks.md"), *run(FOLDER / "plot.md")):
        if done.block.picture is not None:
            save(done.names["figure"], folder / done.block.picture)


if __name__ == "__main__":
    main()
