"""Use the standard streams of the command line, which may be closed or full."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import nullcontext, suppress
from typing import Any

from polyattn._base.text_table import printable


def open_streams() -> None:
    """Replace closed streams by memory, and print ? for letters that a stream cannot encode."""
    sys.stdout = sys.stdout or io.StringIO()
    sys.stderr = sys.stderr or io.StringIO()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def show(text: object) -> None:
    """Print a result at once, even into a pipe."""
    print(printable(str(text)), flush=True)


def complain(text: str) -> None:
    """Print to standard error, unless that is full."""
    with suppress(OSError):
        print(printable(text), file=sys.stderr, flush=True)


def reason(error: OSError) -> str:
    """Return what went wrong, also of an error that is not the system's."""
    return error.strerror or ", ".join(map(str, error.args)) or type(error).__name__


def settle() -> None:
    """Discard what standard output cannot write: Python would report it at its end."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def progress(work: Iterable[Any] | None = None, *, unit: str, total: int | None = None) -> Any:
    """Return a bar on standard error, if that is a terminal, that iterates over the work."""
    look = {"unit": unit, "disable": None, "leave": False, "dynamic_ncols": True}
    return bars()(work, total=total, **look)


def bars() -> Any:
    """Return the class of progress bars: tqdm's, or one that shows nothing where that is not."""
    try:
        from tqdm import tqdm
    except ImportError:
        return _NoBar
    return tqdm


class _NoBar:
    """Iterates over the work as a bar of tqdm does."""

    external_write_mode = nullcontext

    def __init__(self, work: Iterable[Any] | None = None, **look: Any) -> None:
        self._work = work or ()

    def __iter__(self) -> Iterator[Any]:
        return iter(self._work)

    def __enter__(self) -> _NoBar:
        return self

    def __exit__(self, *error: object) -> None: ...

    def set_description(self, text: str, refresh: bool = True) -> None: ...

    def update(self, count: int) -> None: ...
