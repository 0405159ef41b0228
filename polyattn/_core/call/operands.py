"""The arrays of a call, by when they exist: its arguments, its results, and derivatives of both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from polyattn._base.arrays import Array
from polyattn._core.expressions.replacements import Similarity


class Operands(NamedTuple):
    """The arrays and functions of a call, heads before length; query, key, value of rank >= 3."""

    query: Array  #: (..., H, L, D)
    key: Array  #: (..., G, S, D); see `Kernel.reads_quantized`
    value: Array  #: (..., G, S, E); a call for weights has none
    #: An array broadcasts to (..., H, L, S); a function takes (b, h, i, j).
    mask: Array | Callable[..., Array] | None = None
    bias: Array | None = None  #: broadcasts to (..., H, L, S)
    #: An array has the shape (..., 1, 1, 1); otherwise the problem has the number.
    query_offset: int | Array | None = None
    key_lengths: Array | None = None  #: of a block table, (...); the mask hides the same keys
    #: The pages of each item, (..., n), in key and value of the shapes (pages, G, page, size).
    block_table: Array | None = None
    score_mod: Callable[..., Array] | None = None  #: a function takes (score, b, h, i, j)
    sinks: Array | None = None  #: (H,)
    similarity: Similarity | None = None  #: the replacement for q·k
    seed: int | Array | None = None  #: of dropout
    #: Where the hash of dropout begins, (4,), if the problem has no numbers for it.
    dropout_start: Array | None = None
    #: What stands for `Indices`, where the keys were gathered and are not those of the call.
    indices: Any = None

    @classmethod
    def of_options(cls, **options: Any) -> Operands:
        """Return options without arrays that they are for, as those of a mask that is looked at."""
        return cls(query=None, key=None, value=None, **options)


#: The arrays of which a call has each, but for the value of a call for weights.
ARGUMENTS = Operands._fields[:3]


class Residuals(NamedTuple):
    """The results of a call, which its derivatives start from."""

    output: Array  #: (..., H, L, E)
    #: (..., H, L); None with a normalizer. It may be that of more keys than are given
    logsumexp: Array


class Cotangents(NamedTuple):
    """The gradients of a loss with respect to the results of a call."""

    output: Array  #: (..., H, L, E)
    logsumexp: Array | None = None  #: (..., H, L); None for 0


class Tangents(NamedTuple):
    """The direction of a derivative: the tangents of arguments, each in its shape; None for 0."""

    query: Array | None = None
    key: Array | None = None
    value: Array | None = None
    bias: Array | None = None
    sinks: Array | None = None


R = TypeVar("R", Residuals, Cotangents, Tangents)
_SUFFIXES = {Residuals: "", Cotangents: "_gradient", Tangents: "_tangent"}


def mapped(record: R, change: Callable[[str, Any], Any]) -> R:
    """Return a record with ``change(name, array)`` for each array, by the caller's name for it."""
    suffix = _SUFFIXES[type(record)]
    pairs = zip(record._fields, record, strict=True)
    return type(record)(*[None if x is None else change(name + suffix, x) for name, x in pairs])


def named_arrays(record: Residuals | Cotangents | Tangents) -> list[tuple[str, Any]]:
    """Return the arrays of a record by the caller's names for them."""
    suffix = _SUFFIXES[type(record)]
    return [(n + suffix, array) for n, array in record._asdict().items() if array is not None]
