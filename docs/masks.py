"""Draw the pictures of masks.md and plot.md by the code below each, and write masks.md's table."""

import re
from pathlib import Path

import matplotlib
from pages import run
from pictures import save

matplotlib.use("Agg")
FOLDER = Path(__file__).parent
PAGE = FOLDER / "masks.md"
START, END = "<!-- gallery -->\n", "<!-- end -->\n"
#: Pictures in a row of the table.
ACROSS = 4
SECTION = re.compile(r"^### (.+)\n\n!\[[^]]+\]\((.+)\)$", flags=re.MULTILINE)


def cell(heading: str, picture: str) -> str:
    """Return a picture that links to its section, with the name of a mask or of whose it is."""
    by = re.search(r"\((.+)\)", heading)
    name = by[1] if by else heading if " " in heading or heading.istitle() else f"`{heading}`"
    place = re.sub(r"[^\w -]", "", heading).replace(" ", "-").lower()
    return f"[![]({picture})<br>{name}](#{place})"


def page() -> str:
    """Return masks.md with a cell of the table for each section that has a picture."""
    before, rest = PAGE.read_text(encoding="utf-8").split(START)
    after = rest.partition(END)[2]
    cells = [cell(*section) for section in SECTION.findall(after)]
    cells += [""] * (-len(cells) % ACROSS)
    rows = ["| " * ACROSS + "|", "|---" * ACROSS + "|"]
    rows += [f"| {' | '.join(cells[n : n + ACROSS])} |" for n in range(0, len(cells), ACROSS)]
    return "\n".join([before + START, *rows, "", END + after])


def main(folder: Path = FOLDER) -> None:
    """Draw the pictures."""
    for done in (*run(PAGE), *run(FOLDER / "plot.md")):
        if done.block.picture is not None:
            save(done.names["figure"], folder / done.block.picture)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    main()
