"""Empty, full and mixed tiles of the scores by a mask.

`TileQuery` is one tile, in Python numbers; `TileGrid` is all tiles of one size, in arrays. Both
work on traced arrays if nothing is read, and build no array as large as the scores.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from polyattn._base.arrays import Array, as_count, as_index, index_range, is_array, with_rank
from polyattn._base.span import Span
from polyattn._core.call.operands import Operands
from polyattn._core.call.problem import Problem
from polyattn._core.expressions.coverage import Bounds, Coverage, TileTable
from polyattn._core.expressions.indices import INDEX_LIMIT, saturating_sum
from polyattn._core.expressions.masks import And, DenseMask, Mask, RuleMask


def combined_mask(problem: Problem, x: Operands) -> Mask | None:
    """Return causal, window and ``mask=`` as one mask, if there is any. A bias may hide more."""
    parts: list[Mask] = [] if problem.band is None else [problem.band]
    if isinstance(x.mask, Mask):
        parts.append(x.mask)
    elif x.mask is not None:
        parts.append(RuleMask(x.mask) if callable(x.mask) else DenseMask(x.mask))
    if len(parts) < 2:
        return parts[0] if parts else None
    return And(tuple(parts))


class TileQuery:
    """A tile of all batch items and heads; `reads` says whether contents of arrays may decide."""

    def __init__(
        self, problem: Problem, x: Operands, xp: Any, rows: Span, columns: Span, *, reads: bool
    ) -> None:
        self.rows, self.columns, self.reads = rows, columns, reads
        self.xp, self._rank = xp, len(problem.batch) + 3
        self._offset: Any = problem.query_offset
        if self._offset is None and reads and x.query_offset is not None:
            self._offset = with_rank(x.query_offset, self._rank)

    def of(self, mask: Mask) -> Coverage:
        """Return the coverage of the tile by a mask, two Python bools."""
        some, every = mask.coverage(self)
        xp = self.xp
        return Coverage(
            some if isinstance(some, bool) else bool(xp.any(some)),
            every if isinstance(every, bool) else bool(xp.all(every)),
        )

    @property
    def positioned(self) -> bool:
        """Whether the positions of the rows among the keys are known."""
        return self._offset is not None

    @property
    def row(self) -> Bounds:
        """The rows."""
        return Bounds(self.rows[0], self.rows[1] - 1)

    @property
    def column(self) -> Bounds:
        """The keys."""
        return Bounds(self.columns[0], self.columns[1] - 1)

    def position(self, shift: int = 0) -> Bounds:
        """Return the positions of the rows among the keys, plus `shift`."""
        offset = self._offset
        own = None if isinstance(offset, int) else index_range(self.xp, 0, 1, offset).dtype
        by = saturating_sum(offset, shift, self.xp, own)
        return Bounds(self.rows[0] + by, self.rows[1] - 1 + by)

    def relative_position(self, modulus: int) -> Bounds:
        """Return the remainders of key minus position of the row by a modulus: all."""
        return Bounds(0, modulus - 1)

    def per_item(self, numbers: Any) -> Any:
        """Return the number of each batch item, from one for all or an array (...,)."""
        if isinstance(numbers, int):
            return min(numbers, INDEX_LIMIT)
        return with_rank(as_count(self.xp, numbers)[..., None, None, None], self._rank)

    def per_row(self, numbers: Array) -> Bounds:
        """Return the numbers of the rows, from an array (..., L)."""
        low, high = self._bounds(numbers, 0)
        return Bounds(self.xp.matrix_transpose(low), self.xp.matrix_transpose(high))

    def per_key(self, numbers: Array) -> Bounds:
        """Return the numbers of the keys, from an array (..., S)."""
        return Bounds(*self._bounds(numbers, 1))

    def any_and_all(self, seen: Array) -> tuple[Array, Array]:
        """Return whether any and whether all of a mask array holds."""
        if len(seen.shape) > 1 and seen.shape[-2] != 1:
            seen = seen[..., slice(*self.rows), :]
        if seen.shape and seen.shape[-1] != 1:
            seen = seen[..., slice(*self.columns)]
        return self.xp.any(seen), self.xp.all(seen)

    def table(self, table: TileTable) -> Coverage:
        """Return the coverage that a table of tiles gives."""
        return table.of_block(self.rows, self.columns)

    def _bounds(self, numbers: Array, axis: int) -> tuple[Array, Array]:
        """Return the least and greatest of each block, shape (..., 1, 1, blocks)."""
        part = as_index(self.xp, numbers[..., slice(*(self.rows, self.columns)[axis])])
        low, high = self.xp.min(part, axis=-1), self.xp.max(part, axis=-1)
        low, high = (with_rank(end[..., None, None, None], self._rank) for end in (low, high))
        return low, high


class TileGrid(TileQuery):
    """All tiles of one size, rows and keys, whose coverage a mask gives at once.

    The last tiles may be smaller. `like` is an array on the device of the result. `reads` says
    whether the result may depend on arrays; they may be traced.
    """

    def __init__(
        self,
        problem: Problem,
        x: Operands,
        xp: Any,
        size: tuple[int, int],
        like: Array,
        *,
        reads: bool = True,
    ) -> None:
        self.lengths, self.tile_size = (problem.query_length, problem.key_length), size
        self._like, self._shape = like, (*problem.batch, problem.heads)
        blocks = tuple(-(-length // n) for length, n in zip(self.lengths, size, strict=True))
        self._blocks = blocks
        rank = len(problem.batch) + 3
        rows, columns = (
            tuple([with_rank(xp.reshape(edge, shape), rank) for edge in self._edges(xp, axis)])
            for axis, shape in enumerate(((-1, 1), (1, -1)))
        )
        super().__init__(problem, x, xp, rows, columns, reads=reads)  # type: ignore[arg-type]

    def _edges(self, xp: Any, axis: int) -> tuple[Array, Array]:
        size, length = self.tile_size[axis], self.lengths[axis]
        first = index_range(xp, 0, self._blocks[axis], self._like) * size
        stop = first + size
        return first, xp.where(stop > length, xp.full_like(stop, length), stop)

    def of(self, mask: Mask) -> Coverage:
        """Return the coverage of each tile by a mask.

        The arrays broadcast to (..., H, tiles down, tiles across), with those two axes whole.
        """
        return Coverage(*[self._whole(flags) for flags in mask.coverage(self)])

    def _whole(self, flags: Any) -> Array:
        xp = self.xp
        if not is_array(flags):
            flags = xp.full_like(self.columns[0], flags, dtype=xp.bool)
        return xp.broadcast_to(flags, (*flags.shape[:-2], *self._blocks))

    def any_and_all(self, seen: Array) -> tuple[Array, Array]:
        """Return whether any and whether all of each block of a mask array holds."""
        xp = self.xp
        seen = with_rank(seen, self._rank)
        folded: list[Array] = []
        for reduce in (xp.any, xp.all):
            rows = [seen]
            if seen.shape[-2] != 1:
                rows = [
                    reduce(seen[..., slice(*span), :], axis=-2, keepdims=True)
                    for span in Span(0, self.lengths[0]).split(self.tile_size[0])
                ]
            joined = rows[0] if len(rows) == 1 else xp.concat(rows, axis=-2)
            folded.append(joined if seen.shape[-1] == 1 else self.fold_blocks(joined, 1, reduce))
        return folded[0], folded[1]

    def table(self, table: TileTable) -> Coverage:
        """Return the coverage that a table of tiles gives."""
        xp, size = self.xp, table.size

        def count(half: bytes) -> Array:
            flags = xp.asarray(list(half), dtype=xp.int32)
            return self._summed(xp.reshape(flags, table.shape), size)

        def area() -> Array:
            rows, columns = (
                -(-edges[1] // size) - edges[0] // size for edges in (self.rows, self.columns)
            )
            return xp.reshape(rows * columns, (1, 1, *self._blocks))

        some, every = count(table.any_visible) > 0, count(table.all_visible) == area()
        batch = self._shape[:-1]
        if table.shape[0] == 1:
            batch = (1,) * len(batch)
        shape = (*batch, *some.shape[1:])
        return Coverage(xp.reshape(some, shape), xp.reshape(every, shape))

    def _summed(self, table: Array, size: int) -> Array:
        """Return the sums of a table over each block: differences of sums from its corner."""
        xp = self.xp
        for axis, (first, stop) in ((-2, self.rows), (-1, self.columns)):
            sums = xp.cumulative_sum(table, axis=axis, include_initial=True)
            low, high = (xp.reshape(edge, (-1,)) for edge in (first // size, -(-stop // size)))
            table = xp.take(sums, high, axis=axis) - xp.take(sums, low, axis=axis)
        return table

    def _bounds(self, numbers: Array, axis: int) -> tuple[Array, Array]:
        """Return the least and greatest of each block, shape (..., 1, 1, blocks)."""
        xp, numbers = self.xp, as_index(self.xp, numbers)
        low, high = (self.fold_blocks(numbers, axis, reduce) for reduce in (xp.min, xp.max))
        low, high = (with_rank(end[..., None, None, :], self._rank) for end in (low, high))
        return low, high

    def fold_blocks(self, array: Array, axis: int, reduce: Callable[..., Array]) -> Array:
        """Reduce each block of the last axis, that of rows (0) or keys (1), to one entry."""
        xp, size = self.xp, self.tile_size[axis]
        missing = -self.lengths[axis] % size
        if missing:  # to repeat the last entry changes no minimum, maximum, any or all
            last = xp.broadcast_to(array[..., -1:], (*array.shape[:-1], missing))
            array = xp.concat((array, last), axis=-1)
        return reduce(xp.reshape(array, (*array.shape[:-1], -1, size)), axis=-1)
