"""Name the case in the traceback of a process that a native library ends."""

from __future__ import annotations

import faulthandler
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def print_fatal_errors() -> None:
    """Let a fatal signal, such as a division by zero in native code, print the Python frames."""
    if not faulthandler.is_enabled() and sys.__stderr__ is not None:
        faulthandler.enable(sys.__stderr__, all_threads=False)


def call_named(name: str, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call a function from a frame with a name, which is then a line of every traceback.

    A handler of fatal signals can print names of frames, and no other text.
    """

    def frame() -> R:
        return function(*args, **kwargs)

    frame.__code__ = frame.__code__.replace(co_name=name)
    return frame()
