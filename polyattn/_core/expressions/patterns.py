"""Masks by position, by lengths and by ids."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from polyattn._base.arrays import Array
from polyattn._core.expressions.coverage import Block, Coverage
from polyattn._core.expressions.indices import (
    INDEX_LIMIT,
    ScoreDims,
    ScoreIndices,
)
from polyattn._core.expressions.masks import Mask
from polyattn._core.expressions.parts import Part


@dataclass(frozen=True, eq=False, repr=False)
class Band(Mask):
    """Keys from `left` before to `right` after the row's position, None for no bound.

    ``masks.causal()`` is the band (None, 0).
    """

    name: ClassVar[str] = "window"
    axes: ClassVar[dict[str, str]] = {}
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
        any_visible = all_visible = True
        if self.left is not None:
            any_visible = any_visible & (stop - 1 >= block.first(-self.left))
            all_visible = all_visible & (first >= block.last(-self.left))
        if self.right is not None:
            any_visible = any_visible & (first <= block.last(self.right))
            all_visible = all_visible & (stop - 1 <= block.first(self.right))
        return Coverage(any_visible, all_visible)

    def intersection(self, other: Band) -> Band:
        """Return the band of the keys that both show."""
        return Band(_least(self.left, other.left), _least(self.right, other.right))

    def __repr__(self) -> str:
        if (self.left, self.right) == (None, 0):
            return "masks.causal()"
        return f"masks.window({self.left}, {self.right})"


def _least(one: int | None, other: int | None) -> int | None:
    """Return the smaller of two bounds, of which None is no bound."""
    return other if one is None else one if other is None else min(one, other)


@dataclass(frozen=True, eq=False, repr=False)
class Dilated(Mask):
    name: ClassVar[str] = "dilated"
    axes: ClassVar[dict[str, str]] = {}
    positional: ClassVar[bool] = True
    step: int

    def seen(self, at: ScoreIndices) -> Array:
        return at.away_from_row(min(self.step, INDEX_LIMIT)) == 0

    def _coverage(self, block: Block) -> Coverage:
        return Coverage(True, self.step == 1)


@dataclass(frozen=True, eq=False, repr=False)
class GlobalTokens(Mask):
    name: ClassVar[str] = "global_tokens"
    axes: ClassVar[dict[str, str]] = {"first": "."}
    positional: ClassVar[bool] = True
    positions: tuple[int, ...]
    first: Any = 0  # the position of the first key

    def seen(self, at: ScoreIndices) -> Array:
        tokens = [min(token, INDEX_LIMIT) - at.per_item(self.first) for token in self.positions]
        seen = [(at.column == token) | (at.position() == token) for token in tokens]
        return functools.reduce(operator.or_, seen)

    def _coverage(self, block: Block) -> Coverage:
        first, stop = block.columns
        origin = block.per_item(self.first)
        some = every = False
        for low, high in ((first, stop - 1), (block.first(), block.last())):
            for one, other in _runs(self.positions):
                start, end = one - origin, other - origin
                some = some | ((low <= end) & (start <= high))
                every = every | ((start <= low) & (high <= end))
        return Coverage(some, every)

    def part(self, part: Part) -> GlobalTokens:
        return GlobalTokens(self.positions, part.counted(self.first, -part.columns.start))

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


@dataclass(frozen=True, eq=False, repr=False)
class Prefix(Mask):
    name: ClassVar[str] = "prefix"
    axes: ClassVar[dict[str, str]] = {"lengths": "."}
    lengths: Any

    def seen(self, at: ScoreIndices) -> Array:
        return at.column < at.per_item(self.lengths)

    def _coverage(self, block: Block) -> Coverage:
        length = block.per_item(self.lengths)
        return Coverage(block.columns[0] < length, block.columns[1] <= length)

    def with_lengths(self, change: Callable[[int], Any]) -> Prefix:
        return Prefix(_changed(self.lengths, change))

    def part(self, part: Part) -> Prefix:
        return Prefix(part.counted(self.lengths, part.columns.start))

    def check(self, dims: ScoreDims) -> None:
        dims.check_per_item("masks.prefix: lengths", self.lengths)


def _changed(lengths: Any, change: Callable[[int], Any]) -> Any:
    return change(lengths) if isinstance(lengths, int) else lengths


@dataclass(frozen=True, eq=False, repr=False)
class Padding(Mask):
    name: ClassVar[str] = "padding"
    axes: ClassVar[dict[str, str]] = {"key_lengths": ".", "query_lengths": "."}
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

    def with_lengths(self, change: Callable[[int], Any]) -> Padding:
        return type(self)(_changed(self.key_lengths, change), _changed(self.query_lengths, change))

    def part(self, part: Part) -> Padding:
        return Padding(
            part.counted(self.key_lengths, part.columns.start),
            part.counted(self.query_lengths, part.rows.start),
        )

    def check(self, dims: ScoreDims) -> None:
        dims.check_per_item("masks.padding: key_lengths", self.key_lengths)
        dims.check_per_item("masks.padding: query_lengths", self.query_lengths)


@dataclass(frozen=True, eq=False, repr=False)
class CachePadding(Padding):
    """The padding of a memory of keys, where the rows are the last tokens before the padding.

    It hides what ``masks.padding`` hides. Its class says besides that the query offset of the call
    is the number of keys − L, which a kernel cannot see in two arrays.
    """


@dataclass(frozen=True, eq=False, repr=False)
class Segments(Mask):
    name: ClassVar[str] = "segments"
    axes: ClassVar[dict[str, str]] = {"query_ids": ".L", "key_ids": ".S"}
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
        # Two ranges that overlap may share an id; they surely do if both have one id only.
        meet = (low <= most) & (least <= high)
        return Coverage(meet, meet & (low == high) & (least == most))

    def part(self, part: Part) -> Segments:
        return Segments(part.array(self.query_ids, ".L"), part.array(self._keys, ".S"))

    def apart(self) -> Segments:
        return Segments(self.query_ids, self._keys)

    def check(self, dims: ScoreDims) -> None:
        dims.check_per_token("masks.segments: query_ids", self.query_ids, "L", dims.query_length)
        if self.key_ids is None and dims.query_length != dims.key_length:
            raise ValueError(
                "masks.segments without key_ids needs L = S; got L ="
                f" {dims.query_length} and S = {dims.key_length}: pass key_ids as well"
            )
        if self.key_ids is not None:
            dims.check_per_token("masks.segments: key_ids", self.key_ids, "S", dims.key_length)
