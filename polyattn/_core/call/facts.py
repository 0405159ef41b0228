"""The facts of a call, without the contents of its arrays: checks and plans use only these."""

from __future__ import annotations

from typing import NamedTuple

from polyattn._base.arguments import Shape, WindowSize
from polyattn._base.arrays import ArrayFacts
from polyattn._core.call.operands import Cotangents, Residuals, Tangents, named_arrays
from polyattn._core.call.options import FROM_ZERO, Start
from polyattn._core.expressions.masks import Mask
from polyattn._core.expressions.replacements import Normalizer, ScaleRule, Similarity
from polyattn._core.expressions.scores import Score


class Call(NamedTuple):
    """The facts of a call; plans are cached by them.

    The records of a derivative hold facts in place of arrays. A call for gradients has cotangents,
    one for a directional derivative has tangents, and both have residuals.
    """

    query: ArrayFacts
    key: ArrayFacts
    value: ArrayFacts | None  # a call for weights has none
    mask: ArrayFacts | Mask | str | None = None
    bias: ArrayFacts | None = None
    is_causal: bool = False
    window: WindowSize | None = None
    query_offset: ArrayFacts | int | None = None
    key_lengths: ArrayFacts | None = None  # of a block table
    block_table: ArrayFacts | None = None
    scale: float | ScaleRule | None = None
    softcap: float | None = None
    score_mod: Score | str | None = None
    sinks: ArrayFacts | None = None
    dropout: float = 0.0
    seed: ArrayFacts | None = None
    dropout_start: ArrayFacts | Start = FROM_ZERO
    similarity: Similarity | None = None
    normalizer: Normalizer | None = None
    layout: str = "...HLD"
    logsumexp: bool = False
    transforms: frozenset[str] = frozenset()
    known_logsumexp: ArrayFacts | None = None  # of a call for weights
    residuals: Residuals | None = None
    cotangents: Cotangents | None = None
    tangents: Tangents | None = None

    def with_whole_keys(self) -> Call:
        """Return the call over the gathered keys and values, which are in pages."""
        assert self.block_table is not None
        *batch, count = self.block_table.shape

        def whole(pool: ArrayFacts) -> ArrayFacts:
            _, first, second, size = pool.shape
            axes = (first, count * second) if self.layout == "...HLD" else (count * first, second)
            return pool._replace(shape=(*batch, *axes, size))

        value = None if self.value is None else whole(self.value)
        return self._replace(key=whole(self.key), value=value)

    def operands(self) -> list[tuple[str, ArrayFacts]]:
        """Return the names and facts of query, key and value."""
        given = [("query", self.query), ("key", self.key)]
        return given if self.value is None else [*given, ("value", self.value)]

    def arrays(self) -> list[tuple[str, ArrayFacts]]:
        """Return the name and facts of each array; an array in a mask is named ``mask.key_ids``."""
        arrays: list[tuple[str, ArrayFacts]] = []
        for name, given in zip(self._fields, self, strict=True):
            if given is None:  # as most are
                continue
            if isinstance(given, ArrayFacts):
                arrays.append((name, given))
            elif isinstance(given, (Mask, Score, Similarity)):
                arrays += [(f"{name}.{field}", facts) for field, facts in given.carried()]
            elif isinstance(given, (Residuals, Cotangents, Tangents)):
                arrays += named_arrays(given)
        return arrays


def axes_of(shape: Shape, layout: str) -> tuple[Shape, int, int, int]:
    """Return batch axes, heads, length and size of query, key or value in the caller's layout."""
    if len(shape) == 2:
        return (), 1, shape[0], shape[1]
    heads, length = (shape[-3], shape[-2]) if layout == "...HLD" else (shape[-2], shape[-3])
    return shape[:-3], heads, length, shape[-1]
