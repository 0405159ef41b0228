"""Write files beside their places, then rename them, so that a failure leaves older ones whole."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory


def check_file(name: str, file: Path) -> None:
    """Raise if a file cannot be written or replaced, before any work."""
    if not file.parent.is_dir():
        raise ValueError(f"{name} needs a file in an existing folder; got {file}")
    if file.exists() and not file.is_file():
        kind = "folder" if file.is_dir() else "device, a pipe or a socket"
        raise ValueError(f"{name} needs a regular file; {file} is a {kind}")
    if not os.access(file.parent, os.W_OK | os.X_OK):
        raise ValueError(f"{name} cannot write {file}: the folder {file.parent} is read-only")


def write_file(file: Path, content: str) -> None:
    """Write a text, in UTF-8."""
    with replacing(file.parent, file.name) as made:
        (made / file.name).write_text(content, encoding="utf-8")


@contextmanager
def replacing(folder: Path, *names: str) -> Iterator[Path]:
    """Let files that are written to the new folder this yields take their places in another.

    The new folder is on the same disk. The block writes all `names`. If it fails, `folder` is as
    before. Places are replaced, not written to, such as a symbolic link. An error of the system
    names the last of them, not the file beside it.
    """
    try:
        with TemporaryDirectory(prefix=".polyattn-", dir=folder, ignore_cleanup_errors=True) as new:
            made = Path(new)
            yield made
            for name in names:
                with (made / name).open("r+b") as stream:  # Windows flushes only what is writable
                    os.fsync(stream.fileno())
            for name in names:
                (made / name).replace(folder / name)
    except OSError as error:
        if error.errno is not None:
            error.filename = str(folder / names[-1])
        raise
