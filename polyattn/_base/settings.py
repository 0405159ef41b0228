"""Values of ``with`` blocks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Generic, TypeVar

from polyattn._base.forks import forkable_lock

T = TypeVar("T")


@dataclass(eq=False)
class _OpenBlock(Generic[T]):
    """A block, and the one around it where it was entered."""

    value: T
    outer: _OpenBlock[T] | None
    is_open: bool = True


class Context(Generic[T]):
    """The value of the innermost block that is open.

    A block in a generator may end after the block around it, or in another thread or task. So a
    block that ends is marked as closed, and what held at its entry is not restored.
    """

    def __init__(self, name: str) -> None:
        self._innermost: ContextVar[_OpenBlock[T] | None] = ContextVar(name, default=None)
        self._lock, self._blocks_open = forkable_lock(), 0
        #: Read before the variable, in less time; torch.compile guards on it, not on the number.
        self.is_open_anywhere = False

    def get(self) -> T | None:
        """Return the value, or None outside of all blocks."""
        block = self._open()
        return None if block is None else block.value

    @contextmanager
    def block(self, value: T) -> Iterator[None]:
        """Let a value hold inside a block."""
        self.count(1)
        block = _OpenBlock(value, self._open())
        self._innermost.set(block)
        try:
            yield
        finally:
            block.is_open = False
            self._innermost.set(self._open())
            self.count(-1)

    def count(self, change: int) -> None:
        """Add to the number of blocks that are open, 1 at each entry and -1 at each end."""
        with self._lock:
            self._blocks_open += change
            self.is_open_anywhere = self._blocks_open > 0

    def _open(self) -> _OpenBlock[T] | None:
        block = self._innermost.get()
        while block is not None and not block.is_open:
            block = block.outer
        return block
