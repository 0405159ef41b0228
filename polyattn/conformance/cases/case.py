"""Define a case: one call of attention, made only from its name and fields.

The arrays are the same in every run, on every machine: the seed is a checksum of the name.
"""

# ruff: noqa: N806 -- the letters are those of the semantics

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import ml_dtypes
import numpy as np

from polyattn import explain
from polyattn._base.arrays import is_array
from polyattn.plugin import Problem, joined, split

finfo: Any = ml_dtypes.finfo
Array = np.ndarray[Any, Any]
Shape = tuple[int, ...]
Fields = dict[str, Any]
Group = dict[str, Fields]

#: Cases with more scores check a sample of rows.
MOST_SCORES = 2000


@dataclass(frozen=True)
class Generated:
    """An option that is an array, or an expression with arrays: `make(case, rng)`.

    Floating-point arrays are cast to `dtype`, or to the dtype of the inputs.
    """

    make: Callable[[Any, Any], Any]
    dtype: str | None = None


def with_arrays(option: Any, change: Callable[[Any], Any]) -> Any:
    """Return an option of a call with its arrays, those of `arrays_in`, replaced."""
    skeleton, arrays = split(option, is_array)
    return joined(skeleton, map(change, arrays))


def bits(array: Any) -> bytes:
    """Return the bits of an array of NumPy."""
    return np.ascontiguousarray(array).tobytes()


@dataclass(frozen=True)
class Case:
    """One call of `attention`; the shape fields are the letters of the semantics.

    Attributes
    ----------
    name : str
        The name, which is also the seed of the arrays.
    topic : str
        The part of the semantics that it checks: one of `TOPICS`.
    dtype : str
        The dtype of query, key and value.
    batch, key_batch, value_batch : tuple of int
        The batch axes of query, key and value; None means those of the query.
    H, G, L, S, D, E : int
        The lengths; None means H for G and D for E.
    page : int or None
        The length of a page, where key and value are pools of as many pages as all items need.
    one_head : bool
        Whether the arrays have no axis of heads.
    layout : str
        The order of heads and length.
    values : str
        The distribution of query, key and value.
    view : str or None
        The memory layout of the arrays; None for contiguous ones.
    viewed : str or None
        The array that has this layout; None for all.
    poison : float or None
        NaN or infinity, which fills some rows of the arrays in `poison_in`.
    poisoned : tuple of int
        The rows that it fills; none for the slots of keys and values that no item uses.
    poison_in : tuple of str
        The arrays among query, key and value.
    rows : tuple of int or None
        The query rows that are checked; None for all. Long cases check a sample.
    rounded_once : bool
        Whether a gradient may have only the errors of sums in float32, or float64 for float64
        inputs, and of one rounding, as the kernel promises by `rounds_once`.
    options : tuple of (str, object)
        The other arguments of the call.
    """

    name: str
    topic: str = "formula"
    dtype: str = "float32"
    batch: Shape = (2,)
    key_batch: Shape | None = None
    value_batch: Shape | None = None
    H: int = 2
    G: int | None = None
    L: int = 11
    S: int = 11
    D: int = 8
    E: int | None = None
    page: int | None = None
    one_head: bool = False
    layout: str = "...HLD"
    values: str = "normal"
    view: str | None = None
    viewed: str | None = None
    poison: float | None = None
    poisoned: tuple[int, ...] = ()
    poison_in: tuple[str, ...] = ("key", "value")
    rows: tuple[int, ...] | None = None
    rounded_once: bool = False
    options: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        return self.name

    def __hash__(self) -> int:  # of all fields it would take longer than some checks
        return hash(self.name)

    @property
    def full_batch(self) -> Shape:
        """The batch axes, broadcast."""
        others = (self.key_batch, self.value_batch)
        return np.broadcast_shapes(self.batch, *(x for x in others if x is not None))

    @property
    def score_shape(self) -> Shape:
        """The shape of the scores."""
        heads = () if self.one_head else (self.H,)
        return (*self.full_batch, *heads, self.L, self.S)

    @property
    def value_size(self) -> int:
        """E, or D if E is None."""
        return self.D if self.E is None else self.E

    @property
    def shapes(self) -> tuple[Shape, Shape, Shape]:
        """The shapes of query, key and value, heads first."""
        G = self.H if self.G is None else self.G
        own, theirs = ((), ()) if self.one_head else ((self.H,), (G,))
        k, v = (self.batch if b is None else b for b in (self.key_batch, self.value_batch))
        S = self.S
        if self.page is not None:
            k = v = (math.prod(self.batch) * S // self.page,)
            S = self.page
        query = (*self.batch, *own, self.L, self.D)
        return query, (*k, *theirs, S, self.D), (*v, *theirs, S, self.value_size)

    def arguments(self, poisoned: bool = True) -> tuple[tuple[Array, Array, Array], dict[str, Any]]:
        """Make query, key and value and the options of the call, with or without its poison."""
        rng = np.random.default_rng(zlib.crc32(self.name.encode()))
        dtype = np.dtype(self.dtype)
        arrays = dict(zip(ARRAYS, VALUES[self.values](self, rng), strict=True))
        options: dict[str, Any] = {}
        for name, option in self.options:
            if isinstance(option, Generated):
                change = partial(self._cast, name, np.dtype(option.dtype or dtype))
                option = with_arrays(option.make(self, rng), change)
            options[name] = option
        for name in self.poison_in if poisoned and self.poison is not None else ():
            if self.poisoned:
                arrays[name][..., self.poisoned, :] = self.poison
            else:
                np.swapaxes(arrays[name], -3, -2)[self._unused(options)] = self.poison
        arrays = {name: x.astype(dtype) for name, x in arrays.items()}
        if self.layout == "...LHD":
            arrays = {n: np.ascontiguousarray(np.swapaxes(x, -3, -2)) for n, x in arrays.items()}
        query, key, value = (self._laid_out(name, x) for name, x in arrays.items())
        if self.layout != "...HLD":
            options["layout"] = self.layout
        return (query, key, value), options

    def _unused(self, options: dict[str, Any]) -> Array:
        """Return which slots of the keys no item uses, (pages, page) or (B, S)."""
        (items,), size = self.batch, self.page or self.S
        table = options.get("block_table", np.arange(items)[:, None])
        unused = np.ones((self.shapes[1][0], size), bool)
        for pages, length in zip(
            table, np.broadcast_to(options["key_lengths"], items), strict=True
        ):
            for n in range(length):
                unused[pages[n // size], n % size] = False
        return unused

    def _cast(self, name: str, dtype: Any, x: Array) -> Array:
        """Return a generated array in its dtype and memory layout."""
        return self._laid_out(name, x.astype(dtype) if x.dtype.kind == "f" else x)

    def _laid_out(self, name: str, x: Array) -> Array:
        """Return an argument in its memory layout."""
        return VIEWS[self.view](x) if self.viewed in (None, name) else x

    @cached_property
    def problem(self) -> Problem:
        """The description of the call that kernels get, on arrays of NumPy."""
        arrays, options = self.arguments()
        return explain(*arrays, **options, backend="numpy").problem

    @property
    def features(self) -> frozenset[str]:
        """The features of `polyattn.plugin.FEATURES` that the call needs."""
        return self.problem.features


# Values


ARRAYS = ("query", "key", "value")


def normal(case: Case, rng: Any) -> tuple[Any, ...]:
    return tuple(rng.normal(size=shape) for shape in case.shapes)


def outliers(case: Case, rng: Any) -> tuple[Any, ...]:
    """N(0, 1) + N(0, 100) Bernoulli(0.001), as in the FlashAttention-3 paper."""
    return tuple(
        rng.normal(size=n) + 10 * rng.normal(size=n) * (rng.random(n) < 0.001) for n in case.shapes
    )


def scaled(
    case: Case, rng: Any, query: float = 1.0, key: float = 1.0, value: float = 1.0
) -> tuple[Any, ...]:
    return tuple(x * by for x, by in zip(normal(case, rng), (query, key, value), strict=True))


def subnormal(case: Case, rng: Any) -> tuple[Any, ...]:
    tiny = float(finfo(case.dtype).smallest_normal)
    return scaled(case, rng, key=tiny / 4, value=tiny / 4)


def large(case: Case, rng: Any) -> tuple[Any, ...]:
    return scaled(case, rng, value=1e4 if case.dtype == "float16" else 1e30)


def cancelling(case: Case, rng: Any) -> tuple[Any, ...]:
    """Large values of both signs that nearly cancel in the sum."""
    query, key, value = normal(case, rng)
    signs = 1 - 2 * (np.arange(case.S)[:, None] % 2)
    return 0.01 * query, key, value + 1000.0 * signs


def shifted(
    case: Case, rng: Any, key: float = 0.0, value: float = 0.0, query: float = 1.0
) -> tuple[Any, ...]:
    """Keys of a large mean, as of a bias in a layer, or values, which show the sum of weights."""
    q, k, v = scaled(case, rng, query=query)
    return q, k + key, v + value


def one_key_each(case: Case, rng: Any) -> tuple[Any, ...]:
    """Rows with nearly all weight on one key each: the newest row on the newest key."""
    query, key, value = normal(case, rng)
    at = np.arange(1, case.L + 1) * case.S // max(case.L, 1) - 1
    query[...] = 4 * np.repeat(key, case.H // key.shape[-3], axis=-3)[..., at, :]
    return query, key, value


def items_unlike(case: Case, rng: Any) -> tuple[Any, ...]:
    """Items and heads whose values differ in size: those of another would be seen."""
    query, key, value = normal(case, rng)
    return query, key, value * 4.0 ** np.arange(case.H * len(value)).reshape(-1, case.H, 1, 1)


#: The keys that share a step of each channel.
BLOCK = 8


def quantized(key: Array, value: Array) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    """Return keys and values as integers, and their steps.

    Steps have so few digits that the product is exact in float32.
    """
    pairs = []
    for x, block, axis in ((key, BLOCK, -2), (value, 1, -1)):
        blocks = x.reshape(*x.shape[:-2], -1, block, x.shape[-1])
        steps = np.max(np.abs(blocks), axis=axis, keepdims=True) / 127
        steps = steps.astype(np.float16).astype(x.dtype)
        codes = np.nan_to_num(np.rint(blocks / steps)).astype(np.int8)
        pairs.append((codes.reshape(x.shape), np.squeeze(steps, axis=-2)))
    return pairs[0], pairs[1]


def integers(case: Case, rng: Any) -> tuple[Any, ...]:
    """Keys and values of which `quantized` loses nothing."""
    query, *others = normal(case, rng)
    (key, by), (value, of_values) = quantized(*others)
    return query, key * np.repeat(by, BLOCK, axis=-2), value * of_values


VALUES: dict[str, Callable[[Any, Any], tuple[Any, ...]]] = {
    "normal": normal,
    "outliers": outliers,
    "scores of 1e4": partial(scaled, query=1e4),
    "equal scores": partial(scaled, query=0.0),
    "zero values": partial(scaled, value=0.0),
    "subnormal": subnormal,
    "large values": large,
    "cancelling values": cancelling,
    "keys of mean 64": partial(shifted, key=64.0),
    "one key each": one_key_each,
    "scores of 30": partial(scaled, query=10.0),
    "values of mean 1000": partial(shifted, value=1000.0, query=0.1),
    "items unlike": items_unlike,
    "integers": integers,
}


# Views: the same numbers in other memory layouts


def spaced(x: Array, axis: int = -1) -> Array:
    """Return every other entry of an array twice as long."""
    index = [slice(None)] * x.ndim
    index[axis] = slice(None, None, 2)
    return np.repeat(x, 2, axis)[tuple(index)]


def read_only(x: Array) -> Array:
    x.flags.writeable = False
    return x


def zero_stride(x: Array) -> Array:
    """Replace every batch item by the first, with stride 0."""
    return np.broadcast_to(x[:1], x.shape) if x.ndim > 3 else x


VIEWS: dict[str | None, Callable[[Array], Array]] = {
    None: lambda x: x,
    "transposed": lambda x: np.ascontiguousarray(x.T).T,
    "last axis in steps": spaced,
    "rows in steps": lambda x: spaced(x, -min(x.ndim, 2)),
    "negative strides": lambda x: np.flip(np.flip(x).copy()),
    "zero strides": zero_stride,
    "read-only": read_only,
}


def make_case(name: str, **fields: Any) -> Case:
    """Make a case.

    Parameters
    ----------
    name : str
        What it is called, and the seed of its arrays.
    **fields : Any
        Fields of `Case`; others are options of the call, as a `Generated` if they have arrays.

    Returns
    -------
    Case
    """
    own = {key: fields.pop(key) for key in tuple(fields) if key in Case.__dataclass_fields__}
    return Case(name, options=tuple(fields.items()), **own)


def sampled(case: Case) -> Case:
    """Return a case that checks only rows at edges of blocks if it has many scores."""
    few = case.rows is not None or math.prod(case.score_shape) <= MOST_SCORES
    edges = {n + d for n in (0, 32, 64, 128, 256, 512, case.L // 2, case.L) for d in (-1, 0, 1)}
    rows = tuple(sorted(row for row in edges if 0 <= row < case.L))
    return case if few else replace(case, rows=rows)
