"""Show the progress of work that takes seconds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def progress(work: Iterable[Any] | None = None, *, unit: str, total: int | None = None) -> Any:
    """Return a bar on standard error, if that is a terminal, that iterates over the work."""
    from tqdm import tqdm

    return tqdm(work, total=total, unit=unit, disable=None, leave=False, dynamic_ncols=True)
