"""A cache of bounded size that is safe under threads."""

from __future__ import annotations

import threading
from collections.abc import Hashable
from typing import Generic, TypeVar

__all__ = ["Recent"]

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Recent(Generic[K, V]):
    """A cache of at most `capacity` entries, 2 or more, that drops entries not used recently.

    New entries are young. When half of the capacity is young, the young entries become the old
    ones and the previous old ones are dropped. A lookup makes an old entry young again. So a lookup
    of an entry in use only reads one dict, which needs no lock.
    """

    def __init__(self, capacity: int) -> None:
        self._half = capacity // 2
        self._young: dict[K, V] = {}
        self._old: dict[K, V] = {}
        # Reentrant: a finalizer may run while the lock is held, and call attention.
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def get(self, key: K) -> V | None:
        """Return an entry or None; a lookup may miss an entry while another thread writes."""
        value = self._young.get(key)
        if value is None:
            value = self._old.get(key)
            if value is not None:
                self[key] = value
        return value

    def __setitem__(self, key: K, value: V) -> None:
        with self._lock:
            if len(self._young) >= self._half and key not in self._young:
                self._old, self._young = self._young, {}
            self._young[key] = value
            self._old.pop(key, None)

    def clear(self) -> None:
        """Drop all entries."""
        with self._lock:
            self._young, self._old = {}, {}
