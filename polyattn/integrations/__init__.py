"""Integrate polyattn into other libraries; each module imports the library that it is for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def subclasses(kind: type[Any]) -> Iterator[type[Any]]:
    """Yield all direct and indirect subclasses."""
    for subclass in kind.__subclasses__():
        yield subclass
        yield from subclasses(subclass)
