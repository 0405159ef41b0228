"""Workarounds for Python and torch that the core needs, and the versions in which each was seen.

`QUIRKS` names them. For each, tests/base/test_quirks.py has a test of its name, which fails where
the workaround is no longer needed.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from types import ModuleType
from typing import Generic, TypeVar

QUIRKS = {
    "os_environ_get_is_slow": "CPython 3.11 to 3.14: os.environ.get takes 1.8 µs for a variable"
    " that is not set, because it raises inside. A repeated call of attention on NumPy, which reads"
    " two, takes 15 µs.",
    "torch_cannot_trace_a_context_variable": "torch 2.9 to 2.13: torch.compile cannot trace"
    " ContextVar.get (pytorch#186449).",
}

T = TypeVar("T")


def reader_of(name: str) -> Callable[[], str | None]:
    """Return a function that reads an environment variable: None if it is not set.

    os_environ_get_is_slow: os.environ is a view of a dict, in which a look-up raises nothing.
    """
    encode = getattr(os.environ, "encodekey", None)
    key = None if encode is None else encode(name)

    def read() -> str | None:
        stored = getattr(os.environ, "_data", None)
        if stored is not None and key is not None and key not in stored:
            return None
        return os.environ.get(name)

    return read


class TracedValue(ModuleType, Generic[T]):
    """The value of a function, which programs of torch.compile read as a constant.

    torch_cannot_trace_a_context_variable: torch.compile reads an attribute of a module as a
    constant, and its guard reads it again in the task that calls the program.
    """

    def __init__(self, read: Callable[[], T]) -> None:
        super().__init__("value")
        self._read = read

    @property
    def value(self) -> T:
        """The value that the function returns now."""
        return self._read()
