"""The facts of a call, without the contents of its arrays: checks and plans use only these."""

from __future__ import annotations

from typing import Any, NamedTuple

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
        """Return the call over gathered keys and values, if they are in pages."""
        if self.block_table is None:
            return self
        *batch, pages = self.block_table.shape

        def whole(facts: ArrayFacts) -> ArrayFacts:
            _, *heads_and_slots, size = facts.shape
            axis = 1 if self.layout == "...HLD" else 0
            # Not in place, which Dynamo of torch 2.11 cannot trace here.
            sizes = [x * pages if i == axis else x for i, x in enumerate(heads_and_slots)]
            return facts._replace(shape=(*batch, *sizes, size))

        changed: dict[str, Any] = {"key": whole(self.key)}
        if self.value is not None:
            changed["value"] = whole(self.value)
        tangents = self.tangents
        if tangents is not None:
            given = {name: getattr(tangents, name) for name in changed}
            paged = [n for n, x in given.items() if x and x.shape == getattr(self, n).shape]
            tangents = tangents._replace(**{name: whole(given[name]) for name in paged})
        return self._replace(**changed, tangents=tangents)

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


class Letters(NamedTuple):
    """The lengths and numbers of a call, in the letters of the semantics."""

    batch: Shape  #: broadcast
    heads: int  #: H
    key_heads: int  #: G
    query_length: int  #: L
    key_length: int  #: S
    head_size: int  #: D
    value_size: int  #: E
    query_offset: int | None = None
    scale: float = 1.0


def axes_of(shape: Shape, layout: str) -> tuple[Shape, int, int, int]:
    """Return batch axes, heads, length and size of query, key or value in the caller's layout."""
    if len(shape) == 2:
        return (), 1, shape[0], shape[1]
    heads, length = (shape[-3], shape[-2]) if layout == "...HLD" else (shape[-2], shape[-3])
    return shape[:-3], heads, length, shape[-1]
