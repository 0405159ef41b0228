"""The page that says where things are names what is there, and every kernel."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "where.md").read_text(encoding="utf-8")
PARTS = {  # what each part of the page says, by the folders that its files are in
    tuple(re.findall(r"`([\w/]+)`", re.search(r"^Files are in ([^.]*)", part, re.M)[1])): part
    for part in re.split(r"^## ", PAGE, flags=re.M)[1:]
}


def names_of(body, owner=""):
    """Yield the names that Python statements define, those of a class after its name."""
    for node in body:
        for one in getattr(node, "targets", [getattr(node, "target", node)]):
            yield owner + str(getattr(one, "id", getattr(one, "name", "")))
        yield from names_of(node.body, f"{node.name}.") if isinstance(node, ast.ClassDef) else ()


def defines(text, name, suffix):
    if suffix == ".py":
        return name in names_of(ast.parse(text).body)
    function = rf"^[ \w<>,:*&]*[\w>*&] [*&]?{name}\([^;{{}}]*\{{"
    return re.search(rf"{function}|\b(?:struct|class) {name} \{{", text, re.M)


def test_every_name_on_the_page_is_where_it_says():
    for folders, part in PARTS.items():
        for path, listed in re.findall(r"`([\w/]+\.(?:py|h|cpp|cu))(?:: ([^`]+))?`", part):
            found = [ROOT / folder / path for folder in (*folders, "polyattn", "backends")]
            file = next((one for one in found if one.exists()), None)
            assert file, path
            text = file.read_text(encoding="utf-8")
            for name in listed.split(", ") if listed else ():
                assert defines(text, name, file.suffix), f"{path}: {name}"


def test_every_kernel_of_the_wheel_has_a_row_or_a_column():
    for file in [*(ROOT / "backends").glob("polyattn_*/**/*.py"), *ROOT.glob("polyattn/_kernels/*.py")]:
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            ...
