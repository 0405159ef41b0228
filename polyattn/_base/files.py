"""Write files beside their places, then rename them, so that a failure leaves older ones whole."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkdtemp


def check_file(name: str, file: Path) -> None:
    """Raise if a file cannot be written or replaced, before any work."""
    if not file.parent.is_dir():
        raise ValueError(f"{name} needs a file in an existing folder; got {file}")
    if file.exists() and not file.is_file():
        kind = "folder" if file.is_dir() else "device, a pipe or a socket"
        raise ValueError(f"{name} needs a regular file; {file} is a {kind}")
    if not os.access(file.parent, os.W_OK | os.X_OK):
        raise ValueError(f"{name} cannot write {file}: the folder {file.parent} is read-only")
    if file.exists() and not os.access(file, os.W_OK):
        raise ValueError(f"{name} cannot write {file}: the file is read-only")


def write_file(file: Path, content: str) -> None:
    """Write a text, in UTF-8; errors name the file, not the one beside it."""
    try:
        with replacing(file.parent, [file.name]) as made:
            (made / file.name).write_text(content, encoding="utf-8")
    except OSError as error:
        error.filename = str(file)
        raise


@contextmanager
def replacing(folder: Path, names: Sequence[str], *, removed: Sequence[str] = ()) -> Iterator[Path]:
    """Let files that are written to the new folder this yields take their places in another.

    The new folder is on the same disk. The block writes all `names`, whose places are replaced, not
    written to, such as a symbolic link; `removed` names files to remove then. If the block or a
    renaming fails, `folder` is as before.
    """
    beside = Path(mkdtemp(prefix=".polyattn-", dir=folder))
    new, old = beside / "new", beside / "old"
    try:
        new.mkdir()
        old.mkdir()
        yield new
        for name in names:
            _finish(new / name, beside / "mode")
        _exchange(folder, names, removed, new, old)
    finally:
        put_back = not any(beside.glob("old/*")) or not os.path.lexists(new / names[-1])
        if put_back:  # or all is renamed; otherwise old files are only here
            shutil.rmtree(beside, ignore_errors=True)


def _finish(file: Path, example: Path) -> None:
    """Give a file the permissions of any new file, and wait until the disk has it."""
    with file.open("r+b") as stream:  # Windows waits for files that may be written only
        os.fsync(stream.fileno())
    example.touch()  # whose permissions are those that the umask gives
    file.chmod(example.stat().st_mode & 0o777)


def _exchange(
    folder: Path, names: Sequence[str], removed: Sequence[str], new: Path, old: Path
) -> None:
    """Rename new files to their places, or else put back what was there."""
    *others, last = names
    moves: list[tuple[Path, Path]] = []
    for name in (*removed, *others):
        if os.path.lexists(folder / name):
            moves.append((folder / name, old / name))
        if name in others:
            moves.append((new / name, folder / name))
    moves.append((new / last, folder / last))  # in one step, as nothing that may fail follows
    begun: list[tuple[Path, Path]] = []
    try:
        for source, place in moves:
            begun.append((source, place))
            source.replace(place)
    except BaseException:
        undone = begun if os.path.lexists(new / last) else []  # the last move ends all
        for source, place in reversed(undone):
            if not os.path.lexists(source):
                place.replace(source)
        raise
