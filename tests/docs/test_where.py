"""The page that says where things are names what is there."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
PARTS = {  # of the page, by the folders that their files are in
    tuple(re.findall(r"`([\w/]+)`", files[1])): part
    for part in re.split(r"^##+ ", PAGE, flags=re.M)
    if (files := re.search(r"^Files are in ([^.]*)", part, re.M))
}
CPP = r"^(?:[ \w<>,:*&]*[\w>*&] [*&]?|.*\b(?:struct|class) )(\w+)(?:\([^;{}]*| )\{"


def names_of(body, owner=""):
    """Yield the names that Python statements define; those of a class after its name and a dot."""
    for node in body:
        for one in getattr(node, "targets", [getattr(node, "target", node)]):
            yield owner + str(getattr(one, "id", getattr(one, "name", "")))
        yield from names_of(node.body, f"{node.name}.") if isinstance(node, ast.ClassDef) else ()


def test_every_name_on_the_page_is_in_its_file():
    for folders, part in PARTS.items():
        for path, kind, names in re.findall(r"`([\w/]+\.(py|h|cpp|cu))(?::\s+([^`]+))?`", part):
            places = [ROOT / folder / path for folder in (*folders, "polyattn", "backends")]
            text = next(one for one in places if one.exists()).read_text(encoding="utf-8")
            found = names_of(ast.parse(text).body) if kind == "py" else re.findall(CPP, text, re.M)
            assert {*filter(None, re.split(r",\s+", names))} <= {*found}, path
