"""Read the entry points of plugins, one distribution at a time, and what the user says of them.

`importlib.metadata.entry_points` raises if it cannot parse one line of one distribution, in any
group.
"""

from __future__ import annotations

import os
import re
from importlib.metadata import (
    Distribution,
    EntryPoint,
    PackageNotFoundError,
    distribution,
    distributions,
)
from typing import NamedTuple

BACKENDS, KERNELS = GROUPS = ("polyattn.backends", "polyattn.kernels")
# Whose plugins run unnamed. To install those of others changes no call until they are allowed.
OURS = ("polyattn", "polyattn-native")
# Variables that have a meaning of their own.
_RESERVED = ("POLYATTN_BACKEND", "POLYATTN_NATIVE_ISA", "POLYATTN_NUM_THREADS")


class Entry(NamedTuple):
    """An entry point of our groups, or a distribution whose entry points `flaw` says are broken."""

    name: str
    value: str
    distribution: str
    flaw: str | None = None
    group: str = BACKENDS

    def load(self) -> object:
        """Import the module and return the object that the entry point names."""
        return EntryPoint(self.name, self.value, self.group).load()

    def standing(self) -> tuple[bool, str | None]:
        """Return whether the plugin may run unnamed, and the reason if it is left out."""
        variable = variable_of(self.name)
        if variable in _RESERVED:
            return False, f"{variable} would leave it out, and means something else: rename it"
        value = os.environ.get(variable, "")
        if value not in ("", "0", "1"):
            raise ValueError(
                f"{variable} must be 0, which leaves out {self.name}, or 1, which lets it run"
                f" unnamed, or not be set; it is {value!r}"
            )
        reason = f"{variable}=0 leaves it out" if value == "0" else None
        return self.distribution in OURS or value == "1", reason


def variable_of(name: str) -> str:
    """Return the environment variable that leaves out a plugin, or allows it."""
    return "POLYATTN_" + re.sub(r"\W", "_", name).upper()


def entries() -> list[Entry]:
    """Return the entry points of our groups in all distributions on the path."""
    by_distribution: dict[str, list[Entry]] = {}
    for installed in distributions():
        # To parse the files of all distributions takes 2 to 3 times as long as to read them.
        text = _text_of(installed)
        if any(group in text for group in GROUPS):
            name = _name_of(installed)
            if name not in by_distribution and not _is_hidden(name, installed):
                by_distribution[name] = _read(installed, name)
    return [entry for listed in by_distribution.values() for entry in listed]


def _read(installed: Distribution, name: str) -> list[Entry]:
    try:
        ours = [one for one in installed.entry_points if one.group in GROUPS]
        return [_entry(one, name) for one in ours]
    except Exception:  # a line or a byte that cannot be parsed, in any group
        return _read_lines(_text_of(installed), name)


def _read_lines(text: str, name: str) -> list[Entry]:
    """Return the entries of our groups that can be parsed, and one for what cannot."""
    found, broken = [], f"the entry points of {name}"
    for group in GROUPS:
        section = text.partition(f"[{group}]")[2].partition("\n[")[0]
        for line in map(str.strip, section.splitlines()):
            if line[:1] in ("", "#"):
                continue
            key, _, value = map(str.strip, line.partition("="))
            try:
                found.append(_entry(EntryPoint(key, value, group), name))
            except Exception:
                broken = f"the line {line!r} in the entry points of {name}"
    flaw = f"{broken} cannot be read: install another release of it, or uninstall it"
    return [*found, Entry(name, "", name, flaw)]


def _entry(one: EntryPoint, distribution: str) -> Entry:
    flaw = None
    if one.attr is None:
        line = f"{one.name} = {one.value}"
        flaw = f"the line {line!r} must be of the form name = module:object"
    return Entry(one.name, one.value, distribution, flaw, one.group)


def _text_of(installed: Distribution) -> str:
    try:
        return installed.read_text("entry_points.txt") or ""
    except UnicodeDecodeError as error:
        return bytes(error.object).decode(errors="replace")
    except Exception:  # for example an archive that was deleted
        return ""


def _name_of(installed: Distribution) -> str:
    try:
        name = installed.metadata["Name"]
    except Exception:
        name = None  # METADATA is missing or unreadable
    return name or f"an unnamed distribution in {installed.locate_file('')}"


def _is_hidden(name: str, installed: Distribution) -> bool:
    """Return whether a distribution of this name earlier on the path hides this one."""
    try:
        first = distribution(name)
    except PackageNotFoundError:
        return False
    # The lookup goes by the folder's name, which may differ from the name in broken metadata.
    return _text_of(first) != _text_of(installed) and _name_of(first) == name
