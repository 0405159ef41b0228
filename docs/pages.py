"""Run the code of a page as a reader would: in order, in one namespace, in an empty folder.

A page runs once in a process; later requests get the same result. ``python docs/pages.py PAGE``
prints what the code prints.
"""

import contextlib
import io
import re
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

__all__ = ["Block", "Ran", "blocks", "commands", "run", "surprises"]

BLOCK = re.compile(
    r"(?:^!\[[^]]*\]\((?P<picture>[^)]+)\)\n\n)?"
    r"^```python\n(?P<code>.*?)^```\n"
    r"(?:\n```text\n(?P<shown>.*?)^```\n)?",
    flags=re.DOTALL | re.MULTILINE,
)
CONSOLE = re.compile(r"^```console\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)


class Block(NamedTuple):
    """A block of Python, the text and the picture next to it, and the lines above its code."""

    code: str
    shown: str | None  # directly below it: what it prints
    picture: str | None  # directly above it: what it draws
    line: int


class Ran(NamedTuple):
    """A block that was run, with its printed text, all names after it, and its figure."""

    block: Block
    printed: str
    names: dict[str, Any]
    figure: Any


def blocks(page: Path) -> Iterator[Block]:
    """Yield the blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    for found in BLOCK.finditer(text):
        line = text.count("\n", 0, found.start("code"))
        yield Block(found["code"], found["shown"], found["picture"], line)


@cache
def run(page: Path) -> tuple[Ran, ...]:
    """Run all blocks of a page, once."""
    names: dict[str, Any] = {}
    done = []
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), np.printoptions():
        for block in blocks(page):
            # Empty lines before the code make an error name the line of the page.
            code = compile("\n" * block.line + block.code, str(page), "exec")
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                exec(code, names)
            done.append(Ran(block, printed.getvalue(), dict(names), figure()))
    return tuple(done)


def surprises(page: Path) -> list[tuple[Block, str]]:
    """Return the blocks that print something else than the page shows, with what they print."""
    return [(ran.block, ran.printed) for ran in run(page) if ran.printed != (ran.block.shown or "")]


def figure() -> Any:
    """Return the figure that pyplot holds, or None, and close it."""
    pyplot = sys.modules.get("matplotlib.pyplot")
    if pyplot is None or not pyplot.get_fignums():
        return None
    held = pyplot.gcf()
    pyplot.close("all")
    return held


def commands(page: Path) -> list[str]:
    """Return the lines of a page that start polyattn, without comments."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    consoles = "\n".join(CONSOLE.findall(text))
    found = re.findall(r"^\$ (polyattn\b.*?)(?: +#.*)?$", consoles, flags=re.MULTILINE)
    return list(dict.fromkeys(found))


if __name__ == "__main__":
    if not (page := Path(*sys.argv[1:2])).is_file():
        sys.exit("usage: python docs/pages.py PAGE, such as docs/learn/heads.md")
    for done in run(page.resolve()):
        print(done.printed, end="")
