"""Integrate polyattn into other libraries; each module imports the library that it is for."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any


def with_names(module: ModuleType, **names: Any) -> ModuleType:
    """Return a module with the names of another one, and these in place of its own."""
    changed = ModuleType(module.__name__)
    vars(changed).update(vars(module), **names)
    return changed


def subclasses(kind: type[Any]) -> Iterator[type[Any]]:
    """Yield all direct and indirect subclasses."""
    for subclass in kind.__subclasses__():
        yield subclass
        yield from subclasses(subclass)
