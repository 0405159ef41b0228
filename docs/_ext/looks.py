"""Give pictures the size that they are drawn for, formulas room, commands a button each.

The pages stay plain Markdown, which says nothing of any of this.
"""

import re
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

from docutils import nodes
from PIL import Image
from repository import DOCS, MADE, ROOT
from sphinx.application import Sphinx

#: Dots of a picture in an inch of the page. Pictures have more, for screens that show them.
DPI = 84
#: A formula in a table of more characters may break into lines, and so may code in a sentence.
LONG, LONG_CODE = 23, 60
EDIT = "https://github.com/polyattn/polyattn/edit/main/"


def size_pictures(doctree: nodes.document) -> None:
    """Give each picture that says how many dots it has in an inch its width on the page."""
    for node in doctree.findall(nodes.image):
        file = DOCS / node["uri"]
        if file.suffix == ".png":
            with Image.open(file) as picture:
                dots = picture.info.get("dpi", (DPI,))[0]
                node["width"] = f"{round(picture.width * DPI / dots)}px"


def is_code(node: nodes.Node) -> bool:
    """Say if a node is code, or a link to code."""
    return isinstance(node, nodes.literal) or list(map(type, node.children)) == [nodes.literal]


def mark_formulas(doctree: nodes.document) -> None:
    """Mark cells that hold only code, a shape or a figure, and long code in sentences."""
    for cell in doctree.findall(nodes.entry):
        parts = [part for paragraph in cell.children for part in paragraph.children]
        code_only = len(parts) == 1 and is_code(parts[0])
        if code_only or re.fullmatch(r"\(\d.*\)", cell.astext()):
            cell["classes"].append("formula" if len(cell.astext()) <= LONG else "long-formula")
        elif re.match(r"[\d.]+", cell.astext()) and any(cell.findall(nodes.strong)):
            cell["classes"].append("figure")
    for code in doctree.findall(nodes.literal):
        if len(code.astext()) > LONG_CODE:
            code["classes"].append("long-code")


def commands(text: str) -> Iterator[str]:
    """Yield each command of a console, with its output."""
    command = ""
    for line in text.splitlines(keepends=True):
        if line.startswith("$ ") and command:
            yield command
            command = ""
        command += line
    yield command


def split_consoles(doctree: nodes.document) -> None:
    """Make a block of each command of a console, so that each has a button that copies it."""
    for block in list(doctree.findall(nodes.literal_block)):
        parts = list(commands(block.astext()))
        if block.get("language") == "console" and len(parts) > 1:
            blocks = [block.copy() for _ in parts]
            for part, text in zip(blocks, parts, strict=True):
                part.rawsource = text.rstrip("\n")
                part += nodes.Text(part.rawsource)
            block.replace_self(nodes.container("", *blocks, classes=["commands"]))


def improve(app: Sphinx, doctree: nodes.document) -> None:
    """Do all of it on a page."""
    size_pictures(doctree)
    mark_formulas(doctree)
    split_consoles(doctree)


def source_of(page: str) -> Path:
    """Return the file that a page is written in."""
    if not page.startswith(f"{MADE}/"):
        return DOCS / f"{page}.md"
    shown = ROOT / page.removeprefix(f"{MADE}/")
    return shown if shown.is_file() else shown.with_name(f"{shown.name}.md")


def link_to_source(
    app: Sphinx, page: str, template: str, context: dict[str, object], doctree: nodes.document
) -> None:
    """Link a page to the file that one edits to change it."""
    if doctree is not None:
        path = source_of(page).relative_to(ROOT).as_posix()
        context["theme_source_edit_link"] = EDIT + path


def describe(
    app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: nodes.document
) -> None:
    """Describe a page to search engines by its first sentences."""
    if doctree is not None and (first := next(doctree.findall(nodes.paragraph), None)):
        text = escape(" ".join(first.astext().split())[:200])
        context["metatags"] += f'\n<meta name="description" content="{text}" />'


def setup(app: Sphinx) -> dict[str, bool]:
    """Register with Sphinx."""
    app.connect("doctree-read", improve, priority=900)  # after images have their addresses
    app.connect("html-page-context", link_to_source)
    app.connect("html-page-context", describe, priority=900)  # after the theme's
    return {"parallel_read_safe": True, "parallel_write_safe": True}
