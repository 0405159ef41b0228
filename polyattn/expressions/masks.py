"""Mask expressions: which keys they show, and what they say of a whole block of rows and keys.

A mask answers two questions. `seen`, at some indices (`ScoreIndices`): which keys take part.
`coverage`, for a block (`Block`): whether any key of it may take part, and whether all surely do.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from polyattn.arrays import Array, ArrayFacts, broadcast_shapes, constant_when_traced, is_array
from polyattn.expressions.coverage import UNKNOWN, Block, Coverage, logical_not
from polyattn.expressions.expression import Expression
from polyattn.expressions.indices import (
    INDEX_LIMIT,
    PointIndices,
    ScoreDims,
    ScoreIndices,
    is_ambiguous,
)

__all__ = [
    "And",
    "Causal",
    "Compiled",
    "Dense",
    "Dilated",
    "GlobalTokens",
    "Mask",
    "Not",
    "Or",
    "Padding",
    "Prefix",
    "Rule",
    "Segments",
    "Window",
    "as_mask",
]


class Mask(Expression):
    """Which keys each row may see: a value that composes by ``&``, ``|`` and ``~``.

    It is what `polyattn.masks` makes and ``mask=`` takes. Called as ``mask(b, h, i, j)`` it is a
    mask function in FlexAttention's form, the rows counted from the first key.
    """

    module: ClassVar[str] = "masks"
    positional: ClassVar[bool] = False
    # NumPy's arrays would else take & and | as theirs, element by element.
    __array_ufunc__: ClassVar[None] = None

    def seen(self, at: ScoreIndices) -> Array:
        """Return which keys take part, by arrays that broadcast to the scores of a place.

        Parameters
        ----------
        at : ScoreIndices
            Where.
        """
        raise NotImplementedError

    def coverage(self, block: Block) -> Coverage:
        """Return what can be said of a block as a whole.

        Parameters
        ----------
        block : Block
            Which one.

        Returns
        -------
        Coverage
            Whether any key of it may be seen, and whether all surely are.
        """
        fields = [getattr(self, name) for name in self.__match_args__]
        if not block.reads and any(is_array(field) for field in fields):
            return UNKNOWN
        if self.positional and not block.positioned:
            return UNKNOWN
        return self._coverage(block)

    def _coverage(self, block: Block) -> Coverage:
        return UNKNOWN

    @property
    def has_rule(self) -> bool:
        """Whether part of it is a function that no table tells of."""
        return False

    def check(self, dims: ScoreDims) -> None:
        """Refuse a call that the mask does not fit, by facts alone.

        Parameters
        ----------
        dims : ScoreDims
            The lengths of the call.
        """

    def plot(
        self, query_length: int | None = None, key_length: int | None = None, **options: Any
    ) -> Any:
        """Draw which keys the rows see, and which tiles are empty, full and mixed.

        Parameters
        ----------
        query_length, key_length : int, optional
            L and S; by default those of the mask's arrays, or 64.
        **options : Any
            As for `polyattn.plot.mask`: ``query_offset``, ``tile``, ``batch``,
            ``item``, ``head``, ``like``, ``axes``.

        Returns
        -------
        matplotlib.axes.Axes
            What was drawn on; nothing is shown.
        """
        from polyattn.plot.mask import draw_mask

        return draw_mask(self, query_length, key_length, **options)

    def __call__(self, b: Array, h: Array, i: Array, j: Array) -> Array:
        return self.seen(PointIndices(b, h, i, j))

    def __and__(self, other: Any) -> Mask:
        return And.of(self, other)

    def __rand__(self, other: Any) -> Mask:
        return And.of(other, self)

    def __or__(self, other: Any) -> Mask:
        return Or.of(self, other)

    def __ror__(self, other: Any) -> Mask:
        return Or.of(other, self)

    def __invert__(self) -> Mask:
        return self.mask if isinstance(self, Not) else Not(self)

    def __bool__(self) -> bool:
        raise TypeError("masks compose by & | ~, which `and`, `or` and `not` are not")


def as_mask(thing: Any) -> Mask:
    """Return a mask value as it is, and a function or a bool array as the value that means it."""
    if isinstance(thing, Mask):
        return thing
    if callable(thing) and not isinstance(thing, Expression):
        return Rule(thing)
    if is_array(thing):
        return Dense(thing)
    raise TypeError(
        "a mask composes with masks, functions (b, h, i, j) and bool arrays; got"
        f" a {type(thing).__name__}"
    )


# ---- of masks ----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, repr=False)
class Joined(Mask):
    """Masks joined by one operator.

    Attributes
    ----------
    parts : tuple of Mask
        Two or more, none of them joined by the same operator.
    """

    sign: ClassVar[str]
    join: ClassVar[Callable[[Any, Any], Any]]
    parts: tuple[Mask, ...]

    @classmethod
    def of(cls, *masks: Any) -> Mask:
        """Return masks joined.

        Parameters
        ----------
        *masks : Mask, callable or Array of bool
            What is to be joined; what is joined by the same operator already is taken apart.
        """
        parts: list[Mask] = []
        for mask in map(as_mask, masks):
            parts += mask.parts if isinstance(mask, cls) else (mask,)
        return cls(tuple(parts))

    def seen(self, at: ScoreIndices) -> Array:
        return self._reduced([part.seen(at) for part in self.parts])

    def coverage(self, block: Block) -> Coverage:
        some, every = zip(*[part.coverage(block) for part in self.parts], strict=True)
        return Coverage(self._reduced(some), self._reduced(every))

    def _reduced(self, things: Iterable[Any]) -> Any:
        return functools.reduce(type(self).join, things)

    @property
    def has_rule(self) -> bool:
        return any(part.has_rule for part in self.parts)

    def check(self, dims: ScoreDims) -> None:
        for part in self.parts:
            part.check(dims)

    def __repr__(self) -> str:
        # Of the two, & binds closer.
        parts = [f"({part!r})" if isinstance(part, Or) else repr(part) for part in self.parts]
        return f" {self.sign} ".join(parts)


class And(Joined):
    sign: ClassVar[str] = "&"
    join: ClassVar[Callable[[Any, Any], Any]] = operator.and_


class Or(Joined):
    sign: ClassVar[str] = "|"
    join: ClassVar[Callable[[Any, Any], Any]] = operator.or_


@dataclass(frozen=True, eq=False, repr=False)
class Not(Mask):
    mask: Mask

    def seen(self, at: ScoreIndices) -> Array:
        return ~self.mask.seen(at)

    def coverage(self, block: Block) -> Coverage:
        some, every = self.mask.coverage(block)
        return Coverage(logical_not(every), logical_not(some))

    @property
    def has_rule(self) -> bool:
        return self.mask.has_rule

    def check(self, dims: ScoreDims) -> None:
        self.mask.check(dims)

    def __repr__(self) -> str:
        return f"~({self.mask!r})" if isinstance(self.mask, Joined) else f"~{self.mask!r}"


# ---- of positions ------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, repr=False)
class Causal(Mask):
    name: ClassVar[str] = "causal"
    positional: ClassVar[bool] = True

    def seen(self, at: ScoreIndices) -> Array:
        return at.column <= at.position()

    def _coverage(self, block: Block) -> Coverage:
        first, stop = block.columns
        return Coverage(first <= block.last(), stop - 1 <= block.first())


@dataclass(frozen=True, eq=False, repr=False)
class Window(Mask):
    name: ClassVar[str] = "window"
    positional: ClassVar[bool] = True
    left: int | None
    right: int | None

    def seen(self, at: ScoreIndices) -> Array:
        after = None if self.left is None else at.column >= at.position(-self.left)
        before = None if self.right is None else at.column <= at.position(self.right)
        if after is None:
            return at.column >= 0 if before is None else before
        return after if before is None else after & before

    def _coverage(self, block: Block) -> Coverage:
        first, stop = block.columns
        some = every = True
        if self.left is not None:
            some = some & (stop - 1 >= block.first(-self.left))
            every = every & (first >= block.last(-self.left))
        if self.right is not None:
            some = some & (first <= block.last(self.right))
            every = every & (stop - 1 <= block.first(self.right))
        return Coverage(some, every)

    def __repr__(self) -> str:
        return f"masks.window({self.left}, {self.right})"


@dataclass(frozen=True, eq=False, repr=False)
class Dilated(Mask):
    name: ClassVar[str] = "dilated"
    positional: ClassVar[bool] = True
    step: int

    def seen(self, at: ScoreIndices) -> Array:
        return at.away_from_row(min(self.step, INDEX_LIMIT)) == 0

    def _coverage(self, block: Block) -> Coverage:
        return Coverage(True, self.step == 1)


@dataclass(frozen=True, eq=False, repr=False)
class GlobalTokens(Mask):
    name: ClassVar[str] = "global_tokens"
    positional: ClassVar[bool] = True
    positions: tuple[int, ...]

    def seen(self, at: ScoreIndices) -> Array:
        tokens = [min(token, INDEX_LIMIT) for token in self.positions]
        seen = [(at.column == token) | (at.position() == token) for token in tokens]
        return functools.reduce(operator.or_, seen)

    def _coverage(self, block: Block) -> Coverage:
        first, stop = block.columns
        some = every = False
        for low, high in ((first, stop - 1), (block.first(), block.last())):
            for start, end in _runs(self.positions):
                some = some | ((low <= end) & (start <= high))
                every = every | ((start <= low) & (high <= end))
        return Coverage(some, every)

    def __repr__(self) -> str:
        return f"masks.global_tokens({', '.join(map(str, self.positions))})"


def _runs(numbers: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return the first and last of each run of consecutive numbers."""
    runs: list[tuple[int, int]] = []
    for number in sorted({min(number, INDEX_LIMIT) for number in numbers}):
        if runs and runs[-1][1] == number - 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    return runs


# ---- of lengths and ids ------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, repr=False)
class Prefix(Mask):
    name: ClassVar[str] = "prefix"
    lengths: Any

    def seen(self, at: ScoreIndices) -> Array:
        return at.column < at.per_item(self.lengths)

    def _coverage(self, block: Block) -> Coverage:
        length = block.per_item(self.lengths)
        return Coverage(block.columns[0] < length, block.columns[1] <= length)

    def check(self, dims: ScoreDims) -> None:
        dims.check_per_item("masks.prefix: lengths", self.lengths)


@dataclass(frozen=True, eq=False, repr=False)
class Padding(Mask):
    name: ClassVar[str] = "padding"
    key_lengths: Any
    query_lengths: Any = None

    def seen(self, at: ScoreIndices) -> Array:
        seen = None if self.key_lengths is None else at.column < at.per_item(self.key_lengths)
        if self.query_lengths is None:
            return seen
        rows = at.row < at.per_item(self.query_lengths)
        return rows if seen is None else seen & rows

    def _coverage(self, block: Block) -> Coverage:
        some = every = True
        for lengths, (first, stop) in (
            (self.key_lengths, block.columns),
            (self.query_lengths, block.rows),
        ):
            if lengths is not None:
                length = block.per_item(lengths)
                some, every = some & (first < length), every & (stop <= length)
        return Coverage(some, every)

    def check(self, dims: ScoreDims) -> None:
        dims.check_per_item("masks.padding: key_lengths", self.key_lengths)
        dims.check_per_item("masks.padding: query_lengths", self.query_lengths)


@dataclass(frozen=True, eq=False, repr=False)
class Segments(Mask):
    name: ClassVar[str] = "segments"
    query_ids: Any
    key_ids: Any = None

    @property
    def _keys(self) -> Any:
        return self.query_ids if self.key_ids is None else self.key_ids

    def seen(self, at: ScoreIndices) -> Array:
        return at.per_row(self.query_ids) == at.per_key(self._keys)

    def _coverage(self, block: Block) -> Coverage:
        low, high = block.per_row(self.query_ids)
        least, most = block.per_key(self._keys)
        # Two ranges that meet may have an id in common; ranges of one id each, the same, do.
        meet = (low <= most) & (least <= high)
        return Coverage(meet, meet & (low == high) & (least == most))

    def check(self, dims: ScoreDims) -> None:
        dims.check_per_token("masks.segments: query_ids", self.query_ids, "L", dims.query_length)
        if self.key_ids is None and dims.query_length != dims.key_length:
            raise ValueError(
                f"masks.segments of queries alone stand for keys too, and here L ="
                f" {dims.query_length} and S = {dims.key_length}: pass key_ids as well"
            )
        if self.key_ids is not None:
            dims.check_per_token("masks.segments: key_ids", self.key_ids, "S", dims.key_length)


# ---- of arrays and functions -------------------------------------------------------------------


@dataclass(frozen=True, eq=False, repr=False)
class Dense(Mask):
    name: ClassVar[str] = "dense"
    array: Any

    def seen(self, at: ScoreIndices) -> Array:
        return at.of_scores(self.array)

    def _coverage(self, block: Block) -> Coverage:
        return Coverage(*block.any_and_all(self.array))

    def check(self, dims: ScoreDims) -> None:
        facts: ArrayFacts = self.array
        if facts.dtype != "bool":
            raise TypeError(
                f"masks.dense takes a bool array, True where a key takes part; got {facts}"
            )
        scores = dims.scores
        if is_ambiguous(facts.shape, len(scores)):
            raise ValueError(
                f"masks.dense: {facts.shape} has {len(facts.shape)} axes for scores {scores}, so"
                " its first could be batch or heads: write array[:, None] for a mask per batch"
                " item, array[None] for one per head"
            )
        if len(facts.shape) > len(scores) or broadcast_shapes(facts.shape, scores) != scores:
            raise ValueError(
                f"masks.dense: {facts.shape} does not broadcast to the scores (..., H, L, S) ="
                f" {scores}"
            )


@dataclass(frozen=True, eq=False, repr=False)
class Rule(Mask):
    name: ClassVar[str] = "rule"
    function: Callable[..., Any]

    def seen(self, at: ScoreIndices) -> Array:
        return at.by_rule(self.function)

    @property
    def has_rule(self) -> bool:
        return True


@dataclass(frozen=True, eq=False, repr=False)
class Compiled(Mask):
    """A mask with the table of its tiles.

    Attributes
    ----------
    mask : Mask
        What it was made from.
    query_length, key_length, query_offset, size : int
        L and S, where the rows stand, and how many rows and keys a tile of the table has.
    shape : tuple of int
        Of the table: batch items and heads, 1 where all are alike, and tiles each way.
    any_visible, all_visible : bytes
        The table, a byte for each tile: what `Coverage` says.
    """

    name: ClassVar[str] = "compile"
    mask: Mask
    query_length: int
    key_length: int
    query_offset: int
    size: int
    shape: tuple[int, int, int, int]
    any_visible: bytes
    all_visible: bytes

    def seen(self, at: ScoreIndices) -> Array:
        return self.mask.seen(at)

    def coverage(self, block: Block) -> Coverage:
        return block.table(self) if self.any_visible else UNKNOWN  # a form has no table

    def check(self, dims: ScoreDims) -> None:
        made = (self.query_length, self.key_length, self.query_offset)
        given = (dims.query_length, dims.key_length, dims.query_offset)
        if made != given:
            raise ValueError(
                f"this mask was compiled for L, S, query_offset = {made}, and the call has {given}:"
                " compile it for those"
            )
        items, heads = self.shape[:2]
        if items not in (1, dims.items) or heads not in (1, dims.heads):
            raise ValueError(
                f"this mask was compiled for {items} batch items and {heads} heads, and the call"
                f" has {dims.items} and {dims.heads}"
            )
        self.mask.check(dims)

    def tile(self, rows: tuple[int, int], columns: tuple[int, int]) -> Coverage:
        """Return what the table says of a block of any bounds, over all items and heads.

        Parameters
        ----------
        rows, columns : tuple of int
            The first, and the one after the last.
        """
        # Each by its number, of which torch.compile makes constants where a length is a symbol.
        down, across = (
            tuple(range(first // self.size, -(-stop // self.size)))
            for first, stop in (rows, columns)
        )
        return Coverage(*_tile(self.any_visible, self.all_visible, self.shape, down, across))

    def __repr__(self) -> str:
        given = f"{self.mask!r}, {self.query_length}, {self.key_length}"
        if self.query_offset != self.key_length - self.query_length:
            given += f", query_offset={self.query_offset}"
        for name, number in zip(("batch", "heads"), self.shape, strict=False):
            given += f", {name}={number}" if number != 1 else ""
        given += f", tile={self.size}" if self.size != 128 else ""
        return f"masks.compile({given})"


@constant_when_traced
def _tile(
    some: bytes,
    every: bytes,
    shape: tuple[int, int, int, int],
    down: tuple[int, ...],
    across: tuple[int, ...],
) -> tuple[bool, bool]:
    items, heads, height, width = shape
    left, right = across[0], across[-1] + 1
    starts = [(table * height + row) * width for table in range(items * heads) for row in down]
    lines = [slice(start + left, start + right) for start in starts]
    return any(1 in some[line] for line in lines), all(0 not in every[line] for line in lines)
