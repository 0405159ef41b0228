"""A table of bounded size for what is worked out once and asked for again."""

from __future__ import annotations

import threading
from collections.abc import Hashable
from typing import Generic, TypeVar

__all__ = ["Recent"]

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Recent(Generic[K, V]):
    """A table that forgets what was not used for long, and may be used by threads at once.

    New entries are young. When half of the table is young, those become the old ones, and the old
    ones of before are forgotten; an old one that is asked for is young again. So a lookup of what
    is in use reads one dict and writes nothing, which needs no lock.

    Parameters
    ----------
    most : int
        How many entries it has at most, 2 or more.
    """

    def __init__(self, most: int) -> None:
        self._half = most // 2
        self._young: dict[K, V] = {}
        self._old: dict[K, V] = {}
        # Reentrant: a finalizer may run while it is held, and make a call.
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def get(self, key: K) -> V | None:
        """Return an entry, or None; a thread that comes while another one writes may miss one."""
        found = self._young.get(key)
        if found is None:
            found = self._old.get(key)
            if found is not None:
                self[key] = found
        return found

    def __setitem__(self, key: K, value: V) -> None:
        with self._lock:
            if len(self._young) >= self._half and key not in self._young:
                self._old, self._young = self._young, {}
            self._young[key] = value
            self._old.pop(key, None)

    def clear(self) -> None:
        """Forget all."""
        with self._lock:
            self._young, self._old = {}, {}
