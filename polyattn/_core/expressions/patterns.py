"""Masks by position, by lengths and by ids."""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass
from typing import Any, ClassVar

from polyattn._base.arrays import Array
from polyattn._core.expressions.coverage import Bounds
from polyattn._core.expressions.indices import ScoreDims, ScoreIndices, saturating_sum
from polyattn._core.expressions.intervals import FARTHEST, Intervals, Rows, farthest
from polyattn._core.expressions.masks import Comparison, Joined, Mask, Not
from polyattn._core.expressions.parts import Part


@dataclass(frozen=True, eq=False, repr=False)
class Band(Comparison):
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

    def _intervals(self, rows: Rows, within: Intervals | None) -> Intervals:
        position, far = rows.position, 2 * FARTHEST
        first = position * 0 if self.left is None else position - min(self.left, far)
        stop = rows.keys if self.right is None else position + 1 + min(self.right, far)
        return rows.one(first, stop)

    def __repr__(self) -> str:
        if (self.left, self.right) == (None, 0):
            return "masks.causal()"
        return f"masks.window({self.left}, {self.right})"


@dataclass(frozen=True, eq=False, repr=False)
class Dilated(Comparison):
    name: ClassVar[str] = "dilated"
    axes: ClassVar[dict[str, str]] = {}
    positional: ClassVar[bool] = True
    step: int

    def seen(self, at: ScoreIndices) -> Array:
        return at.relative_position(self.step) == 0

    def _intervals(self, rows: Rows, within: Intervals | None) -> Intervals:
        if self.step == 1:
            return rows.one(rows.position * 0, rows.keys)
        return rows.multiples(min(self.step, FARTHEST), within)


@dataclass(frozen=True, eq=False, repr=False)
class GlobalTokens(Comparison):
    name: ClassVar[str] = "global_tokens"
    axes: ClassVar[dict[str, str]] = {"first_key": "."}
    positional: ClassVar[bool] = True
    positions: tuple[int, ...]
    first_key: Any = None

    def seen(self, at: ScoreIndices) -> Array:
        origin = 0 if self.first_key is None else at.per_item(self.first_key)
        runs = _runs(self.positions)

        def is_token(index: Array) -> Array:
            in_runs = [
                index == first - origin
                if first == last
                else (index >= first - origin) & (index <= last - origin)
                for first, last in runs
            ]
            return functools.reduce(operator.or_, in_runs)

        return is_token(at.column) | is_token(at.position())

    def _intervals(self, rows: Rows, within: Intervals | None) -> Intervals:
        origin = rows.per_item(0 if self.first_key is None else self.first_key)
        at = rows.position
        runs = [(one - origin, other + 1 - origin) for one, other in _runs(self.positions)]
        is_token = functools.reduce(operator.or_, [(x <= at) & (at < stop) for x, stop in runs])
        found = [rows.one(*run) for run in runs] + [
            rows.one(0, rows.xp.where(is_token, rows.keys, 0))
        ]
        return functools.reduce(rows.either, found)

    def __repr__(self) -> str:
        return f"masks.global_tokens({', '.join(map(str, self.positions))})"


def _runs(numbers: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return the first and last of each run of consecutive numbers."""
    runs: list[tuple[int, int]] = []
    for number in sorted(set(numbers)):
        if runs and runs[-1][1] == number - 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    return runs


class FirstTokens(Comparison):
    """The first keys or rows of each batch item: a field is their number, or an array of those."""

    def _given(self) -> list[tuple[str, Any]]:
        given: list[tuple[str, Any]] = []
        for name, axis in self.counts.items():
            lengths = getattr(self, name)
            if lengths is not None:
                given.append((axis, lengths))
        return given

    @property
    def first_keys(self) -> Any:
        (axis, lengths), *more = self._given() or [("", None)]
        return lengths if axis == "columns" and not more else None

    def seen(self, at: ScoreIndices) -> Array:
        seen: Any = None
        for axis, lengths in self._given():
            index = at.row if axis == "rows" else at.column
            of_axis = index < at.per_item(lengths)
            seen = of_axis if seen is None else seen & of_axis
        return seen

    def _intervals(self, rows: Rows, within: Intervals | None) -> Intervals:
        stop: Any = rows.per_item(rows.keys)
        for axis, lengths in self._given():
            length = rows.per_item(lengths)
            if axis == "rows":
                stop = rows.xp.where(rows.xp.arange(rows.length) < length, stop, 0)
            else:
                stop = rows.xp.minimum(stop, length)
        return rows.one(0, stop)

    def check(self, dims: ScoreDims) -> None:
        for name in self.counts:
            dims.check_per_item(f"masks.{self.name}: {name}", getattr(self, name))


@dataclass(frozen=True, eq=False, repr=False)
class Prefix(FirstTokens):
    name: ClassVar[str] = "prefix"
    axes: ClassVar[dict[str, str]] = {"lengths": "."}
    counts: ClassVar[dict[str, str]] = {"lengths": "columns"}
    lengths: Any


@dataclass(frozen=True, eq=False, repr=False)
class Padding(FirstTokens):
    name: ClassVar[str] = "padding"
    axes: ClassVar[dict[str, str]] = {"key_lengths": ".", "query_lengths": "."}
    counts: ClassVar[dict[str, str]] = {"key_lengths": "columns", "query_lengths": "rows"}
    key_lengths: Any
    query_lengths: Any = None


@dataclass(frozen=True, eq=False, repr=False)
class CachePadding(Padding):
    """The padding of ``key_lengths=``, where the rows are the last tokens before the padding.

    It hides what ``masks.padding`` hides. Its class says besides that the query offset of the call
    is the number of keys − L, which a kernel cannot see in two arrays.
    """

    def part(self, part: Part) -> Any:
        return Padding(self.key_lengths, self.query_lengths).part(part)

    def check(self, dims: ScoreDims) -> None:
        dims.check_per_item("key_lengths", self.key_lengths)


@dataclass(frozen=True, eq=False, repr=False)
class Segments(Comparison):
    name: ClassVar[str] = "segments"
    axes: ClassVar[dict[str, str]] = {"query_ids": ".L", "key_ids": ".S"}
    query_ids: Any
    key_ids: Any = None

    @property
    def _keys(self) -> Any:
        return self.query_ids if self.key_ids is None else self.key_ids

    def seen(self, at: ScoreIndices) -> Array:
        rows = at.per_row(self.query_ids)
        same = rows == at.per_key(self._keys)
        return same & (rows >= 0) if self._mixes_signs else same

    @property
    def _mixes_signs(self) -> bool:
        """Whether one array is unsigned: its ids beyond int64 are compared as negative ones."""
        kinds = ["uint" in str(ids.dtype) for ids in (self.query_ids, self._keys)]
        return kinds[0] != kinds[1]

    def _intervals(self, rows: Rows, within: Intervals | None) -> Intervals:
        of_rows, of_keys = rows.per_token(self.query_ids), rows.per_token(self._keys)
        if self._mixes_signs and max(farthest(of_rows), farthest(of_keys)) > FARTHEST:
            return rows.of_elements(self)
        return rows.of_ids(of_rows, of_keys)

    def part(self, part: Part) -> Segments:
        return Segments(part.array(self.query_ids, ".L"), part.array(self._keys, ".S"))

    def with_array_per_axis(self) -> Segments:
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


@dataclass(frozen=True, eq=False, repr=False)
class Positions(Comparison):
    """A mask with given positions in place of the indices; a key below 0 is absent."""

    name: ClassVar[str] = "positions"
    axes: ClassVar[dict[str, str]] = {"query_positions": ".L", "key_positions": ".S"}
    query_positions: Any
    key_positions: Any
    mask: Mask = Band(None, 0)

    def seen(self, at: ScoreIndices) -> Array:
        rows, keys = at.per_row(self.query_positions), at.per_key(self.key_positions)
        given = _GivenIndices(at, rows, keys)
        return self.mask.seen(given) & (keys >= 0)  # type: ignore[arg-type]

    def _intervals(self, rows: Rows, within: Intervals | None) -> Intervals:
        tokens = self.query_positions, self.key_positions
        of_rows, of_keys = (rows.integers(rows.per_token(x)) for x in tokens)
        if max(farthest(of_rows), farthest(of_keys)) > FARTHEST:
            return rows.of_elements(self)
        last = int(of_keys.max(initial=-1))
        counted = rows._replace(keys=last + 1, position=of_rows[:, None], evaluates=False)
        return rows.by_position(of_keys, self.mask._intervals(counted, None))

    def part(self, part: Part) -> Positions:
        arrays = part.array(self.query_positions, ".L"), part.array(self.key_positions, ".S")
        # The mask counts by positions, which a part does not move.
        return Positions(*arrays, self.mask.map_arrays(lambda axes, x: part.array(x, axes)))

    def check(self, dims: ScoreDims) -> None:
        for name, letter in (("query_positions", "L"), ("key_positions", "S")):
            length = dims.query_length if letter == "L" else dims.key_length
            array = getattr(self, name)
            dims.check_per_token(f"masks.positions: {name}", array, letter, length)
        super().check(dims)


def by_index(mask: Mask) -> Mask | None:
    """Return a part of a mask that does not go by positions only, None if there is none."""
    if isinstance(mask, Joined):
        return next((one for one in map(by_index, mask.parts) if one is not None), None)
    if isinstance(mask, Not):
        return by_index(mask.mask)
    return None if isinstance(mask, (Band, Dilated, GlobalTokens, Prefix)) else mask


class _GivenIndices:
    """The indices of a mask that goes by given positions of rows and keys, or their bounds."""

    def __init__(self, at: ScoreIndices, rows: Any, keys: Any) -> None:
        self.xp, self.per_item, self._rows, self.column = at.xp, at.per_item, rows, keys

    def position(self, shift: int = 0) -> Any:
        if type(rows := self._rows) is Bounds:
            return Bounds(self._shifted(rows.least, shift), self._shifted(rows.greatest, shift))
        return self._shifted(rows, shift)

    def relative_position(self, modulus: int) -> Any:
        if type(self.column) is Bounds:
            return Bounds(0, modulus - 1)
        if modulus > self.xp.iinfo(self.column.dtype).max:  # equal ones only are a multiple apart
            return self.column - self._rows
        return (self.column % modulus - self._rows % modulus) % modulus

    def _shifted(self, positions: Array, shift: int) -> Array:
        """Return given positions plus `shift`, limited to the numbers of their dtype."""
        limit = int(self.xp.iinfo(positions.dtype).max)
        return saturating_sum(positions, shift, self.xp, positions.dtype, limit)
