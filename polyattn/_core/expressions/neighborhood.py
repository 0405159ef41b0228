"""The mask of neighbourhood attention: a window on a grid of tokens that stays inside the grid."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from polyattn._base.arguments import check_int, got
from polyattn._base.arrays import Array, is_array, library_of
from polyattn._core.expressions.coverage import Block, Coverage, logical_not
from polyattn._core.expressions.indices import ScoreDims, ScoreIndices
from polyattn._core.expressions.intervals import Intervals, Rows, TooManyError
from polyattn._core.expressions.masks import Mask


class GridAxis(NamedTuple):
    """An axis of a grid. The coordinates of one phase of the dilation see no others."""

    step: int  # tokens from one coordinate to the next
    length: int
    kernel_size: int
    stride: int
    dilation: int
    is_causal: bool

    def coordinate(self, token: Any) -> Any:
        """Return the coordinate of a token."""
        return token // self.step % self.length

    def window(self, x: Any, longest: Any = None) -> tuple[Any, Any]:
        """Return the window of a coordinate, counted within its phase; `longest` is its length."""
        if longest is None:
            longest = (self.length - x % self.dilation - 1) // self.dilation + 1
        x = x // self.dilation
        leads = self.stride - 1 if self.is_causal else self.stride // 2
        leader = _least(x // self.stride * self.stride + leads, longest - 1)
        if self.is_causal:
            return _greatest(leader - self.kernel_size + 1, 0), x + 1
        start = _least(_greatest(leader - self.kernel_size // 2, 0), longest - self.kernel_size)
        return start, start + self.kernel_size

    def reach(self, least: Any, greatest: Any) -> tuple[Any, Any]:
        """Return the first and the last coordinate that those from `least` to `greatest` see."""
        start, _ = self.window(least, self.length // self.dilation)
        _, stop = self.window(greatest, -(-self.length // self.dilation))
        return start * self.dilation, stop * self.dilation - 1


@dataclass(frozen=True, eq=False, repr=False)
class Neighborhood(Mask):
    """Tokens of a grid in row-major order; the fields have a number for each axis of the grid."""

    name: ClassVar[str] = "neighborhood"
    axes: ClassVar[dict[str, str]] = {"first_key": "."}
    positional: ClassVar[bool] = True
    shape: tuple[int, ...]
    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    is_causal: tuple[bool, ...]
    first_key: Any = None

    @property
    def grid(self) -> list[GridAxis]:
        steps = [math.prod(self.shape[axis + 1 :]) for axis in range(len(self.shape))]
        fields = self.shape, self.kernel_size, self.stride, self.dilation, self.is_causal
        return [GridAxis(*numbers) for numbers in zip(steps, *fields, strict=True)]

    def seen(self, at: ScoreIndices) -> Array:
        rows, keys, count = at.position(), at.column, math.prod(self.shape)
        if self.first_key is not None:
            rows, keys = (x + at.per_item(self.first_key) for x in (rows, keys))
        seen = (rows >= 0) & (rows < count) & (keys < count)
        for axis in self.grid:
            x, y = axis.coordinate(rows), axis.coordinate(keys)
            start, stop = axis.window(x)
            at_key = y // axis.dilation
            seen = seen & (at_key >= start) & (at_key < stop)
            if axis.dilation > 1:
                seen = seen & (y % axis.dilation == x % axis.dilation)
        return seen

    def _coverage(self, block: Block) -> Coverage:
        count = math.prod(self.shape)
        first = 0 if self.first_key is None else block.per_item(self.first_key)
        position = block.position()
        rows = position.least + first, position.greatest + first
        keys = block.columns[0] + first, block.columns[1] - 1 + first
        some = (rows[1] >= 0) & (rows[0] < count) & (keys[0] < count)
        rows, keys = (
            tuple([_least(_greatest(end, 0), count - 1) for end in ends]) for ends in (rows, keys)
        )
        at_one: Any = True  # place of the axes before: only then are coordinates a range
        for axis in self.grid:
            (x, last_x), (y, last_y) = (map(axis.coordinate, ends) for ends in (rows, keys))
            low, high = axis.reach(x, last_x)
            some = some & (logical_not(at_one) | ((last_y >= low) & (y <= high)))
            at_one = at_one & (x == last_x) & (y == last_y)
        return Coverage(some, False)

    def _intervals(self, rows: Rows, within: Intervals | None) -> Intervals:
        *_, last = grid = self.grid
        if math.prod(self.kernel_size[: None if last.dilation > 1 else -1]) > rows.most:
            raise TooManyError
        xp, first = rows.xp, rows.per_item(0 if self.first_key is None else self.first_key)
        at = (rows.position + first)[..., None]
        is_seen = (at >= 0) & (at < math.prod(self.shape))
        key, size = xp.zeros_like(at), 1
        for axis in grid:
            x = axis.coordinate(at)
            start, stop = axis.window(x)
            if axis is last and axis.dilation == 1:
                key, size = key + start, stop - start
                continue
            seen = start + xp.arange(axis.kernel_size)
            is_seen = is_seen[..., None] & (seen < stop)[..., None, :]
            key = (
                key[..., None]
                + ((seen * axis.dilation + x % axis.dilation) * axis.step)[..., None, :]
            )
            key, is_seen = (x.reshape(*at.shape[:-1], -1) for x in (key, is_seen))
        key = key - first[..., None]
        free = rows._replace(most=rows.most**2 + 1)
        found = free.packed(key, xp.where(is_seen, key + size, key))
        return rows.complement(free.complement(found))  # intervals that touch become one

    def check(self, dims: ScoreDims) -> None:
        keys, count = dims.key_length, math.prod(self.shape)
        if self.first_key is not None:  # a part may have any number
            return
        if keys > count or (keys < count and not self.is_causal[0]):
            raise ValueError(
                f"masks.neighborhood: the grid {self.shape} has {count} tokens; got S = {keys}, of"
                " which there may be fewer only where the first axis is causal"
            )

    def __repr__(self) -> str:
        given = [f"{self.shape}, {self.kernel_size}"]
        for name, default in (("stride", 1), ("dilation", 1), ("is_causal", False)):
            numbers = getattr(self, name)
            if any(number != default for number in numbers):
                given.append(f"{name}={numbers}")
        return f"masks.neighborhood({', '.join(given)})"


PerAxis = int | tuple[int, ...]


def neighborhood_of(
    shape: PerAxis,
    kernel_size: PerAxis,
    stride: PerAxis,
    dilation: PerAxis,
    is_causal: bool | tuple[bool, ...],
) -> Neighborhood:
    """Check the numbers of `masks.neighborhood`, each one for all axes or a tuple, and make it."""
    axes = len(shape) if isinstance(shape, tuple) else 1
    if not 1 <= axes <= 3:
        raise ValueError(f"masks.neighborhood: shape has one to three axes; {got(shape)}")
    given = {"shape": shape, "kernel_size": kernel_size, "stride": stride, "dilation": dilation}
    numbers = [_per_axis(name, number, axes) for name, number in given.items()]
    lengths, sizes, strides, dilations = numbers
    causal = is_causal if isinstance(is_causal, tuple) else (is_causal,) * axes
    if len(causal) != axes or not all(isinstance(one, bool) for one in causal):
        raise TypeError(f"masks.neighborhood: is_causal is a bool or one an axis; {got(is_causal)}")
    if any(size * d > n or step > size for n, size, step, d in zip(*numbers, strict=True)):
        raise ValueError(
            "masks.neighborhood: kernel_size * dilation must be at most the length, and stride at"
            f" most kernel_size; got {', '.join(f'{k}={v!r}' for k, v in given.items())}"
        )
    return Neighborhood(lengths, sizes, strides, dilations, causal)


def _per_axis(name: str, given: PerAxis, axes: int) -> tuple[int, ...]:
    numbers = given if isinstance(given, tuple) else (given,) * axes
    if len(numbers) != axes:
        raise ValueError(
            f"masks.neighborhood: {name} is a number or one for each of {axes} axes; {got(given)}"
        )
    return tuple([check_int(f"masks.neighborhood: {name}", number, least=1) for number in numbers])


def _least(one: Any, other: Any) -> Any:
    x = next((x for x in (one, other) if is_array(x)), None)
    return min(one, other) if x is None else library_of(x).xp.where(one < other, one, other)


def _greatest(one: Any, other: Any) -> Any:
    x = next((x for x in (one, other) if is_array(x)), None)
    return max(one, other) if x is None else library_of(x).xp.where(one > other, one, other)
