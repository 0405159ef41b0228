"""Describe the call that is timed: its arrays, its options and its operations and bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Workload:
    """A call of `polyattn.attention` without its length."""

    batch: int = 1
    heads: int = 8
    key_heads: int = 8
    size: int = 64  # of keys and values
    dtype: str = "float32"
    causal: bool = False
    window: tuple[int | None, int | None] | None = None  # visible keys before and after
    decode: bool = False  # whether there is one query; the length is then that of the keys
    kernel: str | None = None  # the required one

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Workload:
        """Return the workload of these fields, in the plain types of JSON."""
        window = fields["window"]
        return cls(**{**fields, "window": None if window is None else tuple(window)})

    def __str__(self) -> str:
        heads = (
            f"{self.heads}" if self.heads == self.key_heads else f"{self.heads}/{self.key_heads}"
        )
        parts = [f"batch {self.batch}", f"{heads} heads of {self.size}", self.dtype]
        parts += ["causal"] if self.causal else []
        if self.window is not None:
            left, right = ("all" if end is None else end for end in self.window)
            parts.append(f"window {left} before and {right} after")
        parts += ["decoding one token"] if self.decode else []
        parts += [f"kernel {self.kernel}"] if self.kernel is not None else []
        return ", ".join(parts)

    def shapes(self, length: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the shapes of the query and of key and value."""
        rows = 1 if self.decode else length
        query = (self.batch, self.heads, rows, self.size)
        return query, (self.batch, self.key_heads, length, self.size)

    def arrays(self, length: int) -> list[Any]:
        """Return query, key and value as NumPy arrays, the same each time."""
        random = np.random.default_rng(0)
        query, key = self.shapes(length)
        return [
            random.standard_normal(shape, dtype=np.float32).astype(self.dtype)
            for shape in (query, key, key)
        ]

    def options(self) -> dict[str, Any]:
        """Return the options of the call, without the backend."""
        return {"is_causal": self.causal, "window": self.window, "kernel": self.kernel}

    def flops(self, length: int) -> int:
        """Return the operations of both matrix products over the visible scores."""
        return 2 * self._visible(length) * 2 * self.size * self.batch * self.heads

    def bytes(self, length: int) -> int:
        """Return the bytes of query, output, and the keys and values that any query sees."""
        rows, seen = (1, self._visible(length)) if self.decode else (length, length)
        elements = 2 * self.heads * rows + 2 * self.key_heads * seen
        return int(self.batch * elements * self.size * np.dtype(self.dtype).itemsize)

    def _visible(self, length: int) -> int:
        """Return the number of visible scores of a head."""
        ends = self.window or (None, None)
        left, right = (length if end is None else min(end, length) for end in ends)
        if self.decode:
            return min(left, length - 1) + 1
        beside = _capped_sum(left, length)
        return length + beside + (0 if self.causal else _capped_sum(right, length))


def _capped_sum(most: int, length: int) -> int:
    """Return the sum of min(most, n) over the n below a length that is no less than `most`."""
    return most * (most - 1) // 2 + (length - most) * most
