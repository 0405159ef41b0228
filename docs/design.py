"""Write the list of folders in design.md, from the first lines of their docstrings."""

import ast
import sys
from pathlib import Path

import polyattn

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from test_imports import ROOMS

ROOT = Path(polyattn.__file__).parent
PAGE = Path(__file__).with_name("design.md")
START, END = "<!-- folders -->\n", "<!-- end -->\n"


def purpose(file: Path) -> str:
    """Return the first line of a module's docstring."""
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return text.partition("\n")[0].removesuffix(".").replace("``", "`")


def page() -> str:
    """Return the whole page, with a line for each folder, before those that import it."""
    before, rest = PAGE.read_text(encoding="utf-8").split(START)
    rows = [
        f"- `{room.replace('.', '/')}/`: {purpose(file)}"
        for room in ROOMS
        if room != "__init__" and (file := ROOT.joinpath(*room.split("."), "__init__.py")).exists()
    ]
    return "\n".join([before + START, *rows, "", END + rest.split(END)[1]])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
