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
#: A formula of more characters may break into lines.
LONG = 23
GROUP = re.compile(
    r'<p class="caption"[^>]*><span class="caption-text">(?P<name>.*?)</span></p>\s*'
    r"(?P<list><ul.*?</ul>)",
    flags=re.DOTALL,
)
EDIT = "https://github.com/polyattn/polyattn/edit/main/"


def size_pictures(doctree: nodes.document) -> None:
    """Give each picture that says how many dots it has in an inch its width on the page."""
    for node in doctree.findall(nodes.image):
        file = DOCS / node["uri"]
        if file.suffix == ".png":
            with Image.open(file) as picture:
                dots = picture.info.get("dpi", (DPI,))[0]
                node["width"] = f"{round(picture.width * DPI / dots)}px"


def mark_formulas(doctree: nodes.document) -> None:
    """Mark the cells of tables that hold code or a shape only, which the style sheet gives room."""
    for cell in doctree.findall(nodes.entry):
        parts = [part for paragraph in cell.children for part in paragraph.children]
        is_code = len(parts) == 1 and isinstance(parts[0], nodes.literal)
        if is_code or re.fullmatch(r"\(\d.*\)", cell.astext()):
            cell["classes"].append("formula" if len(cell.astext()) <= LONG else "long-formula")


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
    """Describe a page to search engines by its first sentences, and fold the sidebar's groups."""
    if doctree is not None and (first := next(doctree.findall(nodes.paragraph), None)):
        text = escape(" ".join(first.astext().split())[:200])
        context["metatags"] += f'\n<meta name="description" content="{text}" />'
    context["furo_navigation_tree"] = GROUP.sub(folded, context.get("furo_navigation_tree", ""))


def folded(group: re.Match[str]) -> str:
    """Return a group of the sidebar, open if the page belongs to it."""
    is_open = " open" if "current" in group["list"] else ""
    summary = f'<summary class="caption">{group["name"]}</summary>'
    return f"<details{is_open}>{summary}{group['list']}</details>"


def setup(app: Sphinx) -> dict[str, bool]:
    """Register with Sphinx."""
    app.connect("doctree-read", improve, priority=900)  # after images have their addresses
    app.connect("html-page-context", link_to_source)
    app.connect("html-page-context", describe, priority=900)  # after the theme's
    return {"parallel_read_safe": True, "parallel_write_safe": True}
