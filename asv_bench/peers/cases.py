"""The attention calls that the scripts compare: a shape, a dtype, and the kind of call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from polyattn import masks, scores

Array = Any
Options = dict[str, Any]


class Case(NamedTuple):
    """A shape (B, H, G, L, S, D), the kind of call, and the dtype."""

    batch: int
    heads: int
    groups: int
    length: int
    keys: int
    size: int
    kind: str = "full"
    dtype: str = "float32"

    @property
    def shape(self) -> str:
        """The shape as text."""
        heads = f"{self.heads}" if self.heads == self.groups else f"{self.heads} on {self.groups}"
        return f"({self.batch}, {heads}, {self.length}, {self.keys}, {self.size})"

    @property
    def title(self) -> str:
        """The shape, the kind and another dtype than float32 as text."""
        return f"{self.shape} {self.kind}" + f" {self.dtype}" * (self.dtype != "float32")

    @property
    def is_causal(self) -> bool:
        """Whether each row sees the keys up to its own."""
        return self.kind == "causal"

    @property
    def scores(self) -> int:
        """The number of scores."""
        return self.batch * self.heads * self.length * self.keys

    @property
    def visible(self) -> float:
        """The number of visible scores."""
        rows = self.batch * self.heads * self.length
        seen = {"causal": self.keys / 2, "window": 257, "padding": self.key_lengths.mean()}
        return float(rows * seen.get(self.kind, self.keys))

    @property
    def key_lengths(self) -> Array:
        """The number of keys of each item of a padded batch, from an eighth of all on."""
        rng = np.random.default_rng(1)
        return rng.integers(self.keys // 8, self.keys, self.batch, endpoint=True)

    def arguments(self) -> tuple[list[Array], Options]:
        """Return query, key and value, and the options for `polyattn.attention`."""
        rng = np.random.default_rng(0)
        shapes = [(self.batch, self.heads, self.length, self.size)]
        shapes += [(self.batch, self.groups, self.keys, self.size)] * 2
        dtype = self._numpy_dtype()
        arrays = [rng.standard_normal(shape, dtype=np.float32).astype(dtype) for shape in shapes]
        if self.kind.startswith("pages of "):
            return self._in_pages(arrays, int(self.kind.removeprefix("pages of ")))
        if self.kind == "low scores":  # all but one far below the largest
            arrays[0][:], arrays[1][:], arrays[1][:, :, 0] = 1.0, -100 / self.size**0.5, 0.0
        return arrays, KINDS[self.kind](self, rng)

    def _in_pages(self, arrays: list[Array], page: int) -> tuple[list[Array], Options]:
        """Return the keys and values in pages in random order, and their table."""
        query, *whole = arrays
        table = np.random.default_rng(1).permutation(self.batch * self.keys // page)
        pools = []
        for array in whole:
            pages = array.reshape(self.batch, self.groups, -1, page, self.size).swapaxes(1, 2)
            pools.append(np.empty((len(table), *pages.shape[2:]), array.dtype))
            pools[-1][table] = pages.reshape(pools[-1].shape)
        options = {"block_table": table.reshape(self.batch, -1), "key_lengths": self.keys}
        return [query, *pools], options

    def _numpy_dtype(self) -> Any:
        if self.dtype != "bfloat16":
            return self.dtype
        import ml_dtypes

        return ml_dtypes.bfloat16

    def mask(self, options: Options) -> Array | None:
        """Return which keys each row sees, as an array, or None for all."""
        rows, keys = np.arange(self.length)[:, None], np.arange(self.keys)
        if self.kind == "padding":
            return keys < self.key_lengths[:, None, None, None]
        if self.kind == "causal":
            return keys <= rows
        if self.kind == "window":
            return (keys <= rows) & (keys >= rows - 256)
        return options.get("mask")


def _normal(rng: Any, *shape: int) -> Array:
    return rng.standard_normal(shape, dtype=np.float32)


def _of_pairs(case: Case, rng: Any) -> Array:
    return _normal(rng, 1, case.heads, case.length, case.keys).astype(case._numpy_dtype())


def _shown_keys(case: Case, rng: Any) -> Array:
    shown = rng.random((case.batch, 1, 1, case.keys)) < 0.9
    shown[..., 0] = True
    return shown


def _half_of_keys(case: Case) -> Array:
    return np.linspace(case.keys / 8, case.keys * 7 / 8, case.batch).astype(int)


#: The options of each kind of call, from the case and random numbers.
KINDS: dict[str, Callable[[Case, Any], Options]] = {
    "full": lambda case, rng: {},
    "low scores": lambda case, rng: {},
    "causal": lambda case, rng: {"is_causal": True},
    "window": lambda case, rng: {"window": (256, 0)},
    "softcap": lambda case, rng: {"softcap": 30.0},
    "softcap, window": lambda case, rng: {"softcap": 30.0, "window": (255, 0)},
    "documents": lambda case, rng: {"mask": masks.segments(np.arange(case.keys) // 256)},
    "padding": lambda case, rng: {"mask": masks.padding(case.key_lengths)},
    "mask": lambda case, rng: {"mask": rng.random((case.length, case.keys)) > 0.5},
    "bias": lambda case, rng: {"bias": _normal(rng, case.length, case.keys)},
    "pairs": lambda case, rng: {"bias": _of_pairs(case, rng), "mask": _shown_keys(case, rng)},
    "sinks": lambda case, rng: {"sinks": _normal(rng, case.heads)},
    "half the keys": lambda case, rng: {"key_lengths": _half_of_keys(case)},
    "alibi": lambda case, rng: {"score_mod": scores.alibi(case.heads)},
    "function": lambda case, rng: {"score_mod": lambda s, b, h, i, j: s + 0.001 * j},
    "dropout": lambda case, rng: {"dropout": (0.1, 1)},
    "by_norm": lambda case, rng: {"scale": scores.by_norm()},
    "sigmoid": lambda case, rng: {"normalizer": scores.sigmoid()},
    "cosine": lambda case, rng: {"similarity": scores.cosine()},
    "distance": lambda case, rng: {"similarity": scores.distance()},
}


def both(batch: int, heads: int, length: int, size: int, dtype: str = "float32") -> list[Case]:
    """Return a full and a causal case."""
    shape = (batch, heads, heads, length, length, size)
    return [Case(*shape, kind, dtype) for kind in ("full", "causal")]
