"""Make a page for each file outside docs/ that a page links to.

The pages are plain Markdown, whose links are correct on a forge. For the site, a linked Markdown
file becomes a page as it is, a folder its README, and any other file a page of its text.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path

from pygments.lexers import get_lexer_for_filename
from pygments.util import ClassNotFound
from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
# Made by a build, and ignored by git.
MADE = "_files"
LINK = re.compile(r"(?<=\]\()([^)\s#:]+)((?:#[^)\s]*)?\))")
PICTURES = {".png", ".svg"}


def pages() -> list[Path]:
    """Return the pages that are written by hand."""
    found = sorted(DOCS.rglob("*.md"))
    return [p for p in found if not any(part[0] == "_" for part in p.relative_to(DOCS).parts)]


def page_of(file: Path) -> str:
    """Return the name of the page that shows a file."""
    path = file.relative_to(ROOT).as_posix()
    if file.is_relative_to(DOCS) and file.suffix == ".md":
        return file.relative_to(DOCS).with_suffix("").as_posix()
    return f"{MADE}/{path.removesuffix('.md')}"


def home(page: str) -> Path:
    """Return the folder to which the links of a page are relative."""
    folder = Path(page).parent
    return ROOT / folder.relative_to(MADE) if page.startswith(f"{MADE}/") else DOCS / folder


def target(folder: Path, link: str) -> Path | None:
    """Return the repository file that a link leads to, or None."""
    file = (folder / link).resolve()
    if not file.is_relative_to(ROOT) or file == ROOT:
        return None
    if file.is_dir():
        file /= "README.md"
    return file if file.is_file() else None


def led_to(text: str, folder: Path) -> Iterator[Path]:
    """Return the files that a text links to, without pictures."""
    found = (target(folder, link) for link, _ in LINK.findall(text))
    return (file for file in found if file and file.suffix not in PICTURES)


def relinked(text: str, folder: Path) -> str:
    """Return a text with its links rewritten for the site."""

    def replaced(found: re.Match[str]) -> str:
        file = target(folder, found[1])
        if file is None:
            return found[0]
        if file.suffix in PICTURES:
            return f"/{Path(os.path.relpath(file, DOCS)).as_posix()}{found[2]}"
        return f"/{page_of(file)}.md{found[2]}"

    return LINK.sub(replaced, text)


def text_of(file: Path) -> str:
    """Return the text of the page that shows a file."""
    if file.suffix == ".md":
        return f"---\norphan: true\n---\n\n{file.read_text(encoding='utf-8')}"
    try:
        language = get_lexer_for_filename(file.name).aliases[0]
    except ClassNotFound:
        language = "text"
    path = file.relative_to(ROOT).as_posix()
    return (
        f"---\norphan: true\nnosearch: true\n---\n\n# `{path}`\n\n"
        f"```{{literalinclude}} /../{path}\n:language: {language}\n```\n"
    )


def make(app: Sphinx) -> None:
    """Write a page for each file that pages link to, and delete those of an earlier build."""
    texts = [(page.read_text(encoding="utf-8"), page.parent) for page in pages()]
    made: dict[Path, str] = {}
    while texts:
        for file in led_to(*texts.pop()):
            page = DOCS / f"{page_of(file)}.md"
            if page.is_relative_to(DOCS / MADE) and page not in made:
                made[page] = text_of(file)
                texts.append((made[page], file.parent))
    for page in set((DOCS / MADE).rglob("*.md")) - set(made):
        page.unlink()
    for page, text in made.items():
        page.parent.mkdir(parents=True, exist_ok=True)
        if not page.exists() or page.read_text(encoding="utf-8") != text:
            page.write_text(text, encoding="utf-8")


def read(app: Sphinx, page: str, source: list[str]) -> None:
    """Rewrite the links of a page for the site."""
    source[0] = relinked(source[0], home(page))


def setup(app: Sphinx) -> dict[str, bool]:
    """Register with Sphinx."""
    app.connect("config-inited", lambda app, config: make(app))
    app.connect("source-read", read)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
