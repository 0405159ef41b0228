"""Read the entry points of plugins, one distribution at a time, and what the user says of them.

`importlib.metadata.entry_points` raises if it cannot parse one line of one distribution, in any
group.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from importlib.metadata import Distribution, EntryPoint, distributions
from typing import NamedTuple

BACKENDS, KERNELS = GROUPS = ("polyattn.backends", "polyattn.kernels")
# Whose plugins run unnamed. To install those of others changes no call until they are allowed.
OURS = ("polyattn", "polyattn-native")
# Variables that have a meaning of their own.
RESERVED = (
    "POLYATTN_BACKEND",
    "POLYATTN_INSTALL",
    "POLYATTN_NATIVE_ISA",
    "POLYATTN_NUM_THREADS",
)


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
        if variable in RESERVED:
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


def not_allowed(name: str) -> str:
    """Return why a plugin of others does not run unnamed, and how it does."""
    return f"it is not polyattn's: it runs if the call names it, or with {variable_of(name)}=1"


def entries() -> list[Entry]:
    """Return the entry points of our groups in all distributions on the path."""
    ours: dict[str, Distribution] = {}
    for installed in distributions():
        # To parse the files of all distributions takes 2 to 3 times as long as to read them.
        with suppress(Exception):  # a file that is not UTF-8, or an archive that was deleted
            text = installed.read_text("entry_points.txt") or ""
            if any(group in text for group in GROUPS):
                # The first on the path hides others.
                ours.setdefault(_name_of(installed), installed)
    return [entry for name, installed in ours.items() for entry in _read(installed, name)]


def _read(installed: Distribution, name: str) -> list[Entry]:
    try:
        points = [one for one in installed.entry_points if one.group in GROUPS]
        return [Entry(one.name, one.value, name, _flaw(one), one.group) for one in points]
    except Exception:  # a line or a byte that cannot be parsed, in any group
        mend = "install another release of it, or uninstall it"
        return [Entry(name, "", name, f"the entry points of {name} cannot be read: {mend}")]


def _flaw(one: EntryPoint) -> str | None:
    if one.attr:
        return None
    return f"the line '{one.name} = {one.value}' must be of the form name = module:object"


def _name_of(installed: Distribution) -> str:
    with suppress(Exception):  # METADATA is missing or unreadable
        if name := installed.metadata["Name"]:
            return name
    return f"an unnamed distribution in {installed.locate_file('')}"
