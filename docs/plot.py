"""Draw the pictures of plot.md by running the code below each."""

from pathlib import Path

from pages import run
from pictures import save

PAGE = Path(__file__).with_name("plot.md")


def main(folder: Path = PAGE.parent) -> None:
    """Draw the pictures."""
    for done in run(PAGE):
        if done.block.picture is not None:
            save(done.names["figure"], folder / done.block.picture)


if __name__ == "__main__":
    main()
