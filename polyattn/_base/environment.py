"""Read environment variables at call time, in little time."""

from __future__ import annotations

import os
from collections.abc import Callable


def reader_of(name: str) -> Callable[[], str | None]:
    """Return a function that reads an environment variable.

    Parameters
    ----------
    name : str
        The name of the variable.

    Returns
    -------
    callable
        Returns the present value, or None if the variable is not set.
    """
    encode = getattr(os.environ, "encodekey", None)
    key = None if encode is None else encode(name)

    def read() -> str | None:
        # 8 times as fast as os.environ.get, which raises inside if the variable is not set: a
        # repeated call would be 3 to 5 % slower. CPython's os.environ is a view of this dict.
        stored = getattr(os.environ, "_data", None)
        if stored is not None and key is not None and key not in stored:
            return None
        return os.environ.get(name)

    return read
