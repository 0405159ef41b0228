"""Check a built site: links have targets, and nothing loads from elsewhere."""

import argparse
import re
import sys
from collections.abc import Iterator
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

# Tags whose targets load with the page.
LOADED = {("img", "src"), ("script", "src"), ("link", "href"), ("source", "src"), ("iframe", "src")}
FROM_AFAR = re.compile(r"(?:url\(|@import)\s*[\"']?((?:https?:)?//[^\"')]+)")


class Link(NamedTuple):
    """A link of a page, and whether the page loads its target."""

    to: str
    loaded: bool


class Page(HTMLParser):
    """The anchors and links of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[Link] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        """Record the anchors and links of a tag."""
        for name, value in attributes:
            if name == "id" and value:
                self.anchors.add(value)
            if name in ("href", "src") and value:
                self.links.append(Link(value, (tag, name) in LOADED))


@cache
def page(file: Path) -> Page:
    """Return a page, read once."""
    return Page(file.read_text(encoding="utf-8"))


def wrong(file: Path, link: Link) -> str | None:
    """Return the fault of a link of a page, or None."""
    to = urlsplit(link.to)
    if to.scheme or to.netloc:
        if link.loaded and to.scheme != "data":
            return "is loaded from another site"
        well_formed = to.scheme in ("http", "https") and "." in to.netloc and " " not in link.to
        return None if well_formed or to.scheme in ("mailto", "data") else "is not an address"
    target = file.parent / unquote(to.path) if to.path else file
    if not target.is_file():
        return "does not lead to a file"
    known = target.suffix != ".html" or not to.fragment
    return None if known or unquote(to.fragment) in page(target).anchors else "has no such anchor"


def problems(folder: Path) -> Iterator[str]:
    """Yield every wrong link of a site, with its page."""
    for file in sorted(folder.rglob("*.html")):
        for link in dict.fromkeys(page(file).links):
            if reason := wrong(file, link):
                yield f"{file.relative_to(folder)}: {link.to} {reason}"
    for file in sorted(folder.rglob("*.css")):
        for address in FROM_AFAR.findall(file.read_text(encoding="utf-8")):
            yield f"{file.relative_to(folder)}: {address} is loaded from another site"


def main() -> int:
    """Print what is wrong, and return 1 if there is anything."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="the folder of the built site")
    folder = parser.parse_args().folder
    if not (folder / "index.html").is_file():
        parser.error(f"{folder} holds no index.html: build the site first, make docs")
    found = list(problems(folder))
    print(*found, sep="\n", end="\n" if found else "")
    count = len(list(folder.rglob("*.html")))
    print(f"{count} pages: {len(found) or 'no'} link{'s' * (len(found) != 1)} wrong")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
