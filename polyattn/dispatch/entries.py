"""Reads the entry points of plugins, each distribution by itself.

`importlib.metadata.entry_points` raises if it cannot parse one line of one distribution, of
whatever group.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.metadata import (
    Distribution,
    EntryPoint,
    PackageNotFoundError,
    distribution,
    distributions,
)
from typing import NamedTuple

__all__ = ["GROUP", "Entry", "entries"]

GROUP = "polyattn.backends"

_FILE = "entry_points.txt"
_LINE = re.compile(r"(?P<name>[^=]*[^=\s])\s*=\s*(?P<value>[\w.]+\s*:\s*[\w.]+\s*(\[.*\])?)")


class Entry(NamedTuple):
    """An entry point of our group, or a line there that is not one: then `flaw` says why."""

    name: str
    value: str
    distribution: str
    flaw: str | None = None

    def load(self) -> object:
        """Import the module and return the object that the entry point names."""
        return EntryPoint(self.name, self.value, GROUP).load()


def entries() -> list[Entry]:
    """Return the entry points of our group in all distributions on the path."""
    found: dict[str, list[Entry]] = {}
    for one in distributions():
        text = _text_of(one)
        if GROUP in text:
            name = _name_of(one)
            if name not in found and not _is_hidden(name, text):
                found[name] = list(_parsed(text, name))
    return [entry for listed in found.values() for entry in listed]


def _text_of(one: Distribution) -> str:
    try:
        return one.read_text(_FILE) or ""
    except UnicodeDecodeError as error:
        # The fault may be in a group that is not ours. In ours, the line is then malformed.
        return bytes(error.object).decode(errors="replace")
    except Exception:  # such as an archive that is gone: there is nothing to be known of it
        return ""


def _name_of(one: Distribution) -> str:
    try:
        name = one.metadata["Name"]
    except Exception:
        name = None  # there is no METADATA, or it cannot be read
    return name or f"an unnamed distribution in {one.locate_file('')}"


def _is_hidden(name: str, text: str) -> bool:
    """Whether a distribution of this name comes earlier on the path, which is then imported."""
    try:
        first = distribution(name)
    except PackageNotFoundError:
        return False
    # It is looked up by its folder, which a broken one may have named otherwise.
    return _text_of(first) != text and _name_of(first) == name


def _parsed(text: str, distribution: str) -> Iterator[Entry]:
    group = None
    for line in map(str.strip, text.splitlines()):
        if line.startswith("[") and line.endswith("]"):
            group = line[1:-1]
        elif group == GROUP and line and not line.startswith("#"):
            match = _LINE.fullmatch(line)
            if match is not None:
                yield Entry(match["name"], match["value"], distribution)
                continue
            name = re.split(r"[\s=:]", line)[0] or distribution
            flaw = (
                f"the {_FILE} of {distribution} has the line {line!r}, which must be of the form"
                " name = module:object; install another release of it, or uninstall it"
            )
            yield Entry(name, line, distribution, flaw)
