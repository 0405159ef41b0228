"""Read the entry points of plugins, one distribution at a time.

`importlib.metadata.entry_points` raises if it cannot parse one line of one distribution, in any
group.
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

__all__ = ["Entry", "entries"]

GROUP = "polyattn.backends"

_FILE = "entry_points.txt"
_LINE = re.compile(r"(?P<name>[^=]*[^=\s])\s*=\s*(?P<value>[\w.]+\s*:\s*[\w.]+\s*(\[.*\])?)")


class Entry(NamedTuple):
    """An entry point of our group, or a malformed line there, whose fault `flaw` describes."""

    name: str
    value: str
    distribution: str
    flaw: str | None = None

    def load(self) -> object:
        """Import the module and return the object that the entry point names."""
        return EntryPoint(self.name, self.value, GROUP).load()


def entries() -> list[Entry]:
    """Return the entry points of our group in all distributions on the path."""
    by_distribution: dict[str, list[Entry]] = {}
    for installed in distributions():
        text = _text_of(installed)
        if GROUP in text:
            name = _name_of(installed)
            if name not in by_distribution and not _is_hidden(name, text):
                by_distribution[name] = list(_parsed(text, name))
    return [entry for listed in by_distribution.values() for entry in listed]


def _text_of(installed: Distribution) -> str:
    try:
        return installed.read_text(_FILE) or ""
    except UnicodeDecodeError as error:
        # The bad byte may be in another group. In ours, it makes the line malformed.
        return bytes(error.object).decode(errors="replace")
    except Exception:  # for example an archive that was deleted
        return ""


def _name_of(installed: Distribution) -> str:
    try:
        name = installed.metadata["Name"]
    except Exception:
        name = None  # METADATA is missing or unreadable
    return name or f"an unnamed distribution in {installed.locate_file('')}"


def _is_hidden(name: str, text: str) -> bool:
    """Return whether a distribution of this name earlier on the path hides this one."""
    try:
        first = distribution(name)
    except PackageNotFoundError:
        return False
    # The lookup goes by the folder's name, which may differ from the name in broken metadata.
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
