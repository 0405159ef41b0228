"""Write parts of the reference from the code at each build."""

import importlib
import inspect
import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from numpydoc.docscrape import FunctionDoc
from repository import relinked
from sphinx.application import Sphinx

import polyattn
from polyattn._api.names import FOREIGN
from polyattn._dispatch import errors

ROOT = Path(__file__).resolve().parents[2]


def said_by(*arguments: str) -> str:
    """Return the output of the command line, at the width of a page."""
    return subprocess.run(
        [sys.executable, "-P", "-m", "polyattn", *arguments],
        env=os.environ | {"COLUMNS": "88", "NO_COLOR": "1"},
        capture_output=True,
        check=True,
        encoding="utf-8",
    ).stdout


def commands() -> str:
    """Return the help of the command line, and of each of its commands."""
    overall = said_by("--help")
    parts = [f"```text\n{overall}```"]
    for name in re.findall(r"^    (\w+) ", overall, flags=re.MULTILINE):
        parts.append(f"### polyattn {name}\n\n```text\n{said_by(name, '--help')}```")
    return "\n\n".join(parts)


def raised() -> Iterator[tuple[str, str]]:
    """Yield each exception that a public function's docstring names, with the function."""
    for name in polyattn.__all__:
        function: Any = getattr(polyattn, name)
        if inspect.isfunction(function):
            yield from ((entry.type, name) for entry in FunctionDoc(function)["Raises"])


def error_table() -> str:
    """Return a table of the exceptions: their meanings and the functions that raise them."""
    by = defaultdict(list)
    for kind, name in raised():
        by[kind].append(f"{{py:func}}`~polyattn.{name}`")
    lines = ["| exception | is also | means | raised by |", "|---|---|---|---|"]
    for name, kind in vars(errors).items():
        if not (inspect.isclass(kind) and issubclass(kind, errors.BackendError)):
            continue
        bases = ", ".join(f"`{base.__name__}`" for base in kind.__bases__)
        meaning = inspect.getdoc(kind).partition("\n")[0]
        raisers = ", ".join(by[name]) or "as one of the errors below"
        lines.append(f"| {{py:exc}}`~polyattn.{name}` | {bases} | {meaning} | {raisers} |")
    return "\n".join(lines)


def names_table() -> str:
    """Return a table of the arguments of other libraries, with what to pass instead."""
    there = defaultdict(list)
    for name, ours in FOREIGN.items():
        there[re.sub(r"\w+=([^\s,;([]|\(.*?\)|\[.*?\])*", r"`\g<0>`", ours)].append(f"`{name}=`")
    rows = (f"| {', '.join(names)} | {ours} |" for ours, names in there.items())
    return "\n".join(["| there | pass |", "|---|---|", *rows])


def readme() -> str:
    """Return the README without its title and its links to the pages, for the landing page."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    text = text.partition("\n")[2].partition("## Where to go next")[0]
    return re.sub(r'<img src="(.*?)".* alt="(.*?)">', r"![\2](\1)", text)


WRITERS = {f.__name__.replace("_", "-"): f for f in (commands, error_table, names_table, readme)}
PLACE = re.compile(rf"^```{{({'|'.join(WRITERS)})}}\n```$", flags=re.MULTILINE)
NAMES = re.compile(r"^```{((?:current)?module)} (\S+)\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)


def listed(page: str) -> Iterator[tuple[str, str, list[str]]]:
    """Yield the kind, the module and the names of each list of a page.

    An empty list has the names of the module that no other list has.
    """
    lists = [
        (kind, module, re.findall(r"\w+", names)) for kind, module, names in NAMES.findall(page)
    ]
    for kind, module, names in lists:
        others = [name for _, other, more in lists for name in more if other == module]
        rest = (n for n in importlib.import_module(module).__all__ if n not in others)
        yield kind, module, names or list(rest)


def described(kind: str, module: str, names: list[str]) -> str:
    """Return the directives that describe the names of a module, classes with their members."""
    lines = ["```{eval-rst}", f".. {kind}:: {module}"]
    for name in names:
        value = getattr(importlib.import_module(module), name)
        if not inspect.isclass(value):
            lines.append(f".. autofunction:: {name}")
        elif issubclass(value, Exception):
            lines.append(f".. autoexception:: {name}")
        else:
            lines += [f".. autoclass:: {name}", "   :members:"]
    return "\n".join([*lines, "```"])


def write(app: Sphinx, page: str, source: list[str]) -> None:
    """Replace the name of each writer by its result, and lists of names by descriptions."""

    def written(found: re.Match[str]) -> str:
        app.env.reread_always.add(page)  # its sources are not part of the page's file
        return relinked(WRITERS[found[1]](), ROOT)

    lists = listed(source[0])
    text = PLACE.sub(written, source[0])
    source[0] = NAMES.sub(lambda _: described(*next(lists)), text)


def setup(app: Sphinx) -> dict[str, bool]:
    """Register with Sphinx."""
    app.connect("source-read", write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
