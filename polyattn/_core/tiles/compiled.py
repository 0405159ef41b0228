"""Masks with a table of their tiles, for functions whose tiles cannot be known otherwise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from polyattn._base.arguments import check_int, check_signature
from polyattn._base.arrays import (
    Array,
    broadcast_shapes,
    index_range,
    is_array,
    is_one_of,
    library_of,
    numpy_namespace,
)
from polyattn._base.host import destination_of, is_host
from polyattn._base.span import Span
from polyattn._core.expressions.coverage import UNKNOWN, Block, Coverage, TileTable
from polyattn._core.expressions.indices import PointIndices, ScoreDims, ScoreIndices
from polyattn._core.expressions.intervals import Intervals, Rows
from polyattn._core.expressions.masks import Mask, as_mask
from polyattn._core.expressions.parts import Part


@dataclass(frozen=True, eq=False, repr=False)
class Compiled(Mask):
    """A mask with the fields of a `TileTable`, which was made for such lengths and offset."""

    name: ClassVar[str] = "compile"
    has_rule = False
    mask: Mask
    query_length: int
    key_length: int
    query_offset: int
    size: int
    shape: tuple[int, int, int, int]
    any_visible: bytes
    all_visible: bytes

    @property
    def conditions(self) -> tuple[Mask, ...]:
        return self.mask.conditions

    def seen(self, at: ScoreIndices) -> Array:
        return self.mask.seen(at)

    def coverage(self, block: Block) -> Coverage:
        if not self.any_visible:  # a spec has no table
            return UNKNOWN
        return block.table(TileTable(self.size, self.shape, self.any_visible, self.all_visible))

    def _intervals(self, rows: Rows, within: Intervals | None) -> Intervals:
        return self.mask._intervals(rows, within)

    def part(self, part: Part) -> Mask:
        inner: Mask = self.mask.part(part)
        starts = part.heads.start, part.rows.start, part.columns.start
        if not all(isinstance(start, int) for start in starts) or any(
            start % self.size for start in starts[1:]
        ):
            return inner  # its tiles are not those of the table
        cut = TileTable(self.size, self.shape, self.any_visible, self.all_visible).of_part(part)
        lengths = part.rows.length, part.columns.length, self.query_offset + part.offset_shift
        return Compiled(inner, *lengths, cut.size, cut.shape, cut.any_visible, cut.all_visible)

    def check(self, dims: ScoreDims) -> None:
        made = (self.query_length, self.key_length, self.query_offset)
        given = (dims.query_length, dims.key_length, dims.query_offset)
        if made != given:
            raise ValueError(
                f"this mask was compiled for L, S, query_offset = {made}, and the call has {given}:"
                " compile it for those"
            )
        items, heads = self.shape[:2]
        if not (is_one_of(items, 1, dims.items) and is_one_of(heads, 1, dims.heads)):
            raise ValueError(
                f"this mask was compiled for {items} batch items and {heads} heads, and the call"
                f" has {dims.items} and {dims.heads}"
            )
        super().check(dims)

    def __repr__(self) -> str:
        given = f"{self.mask!r}, {self.query_length}, {self.key_length}"
        if self.query_offset != self.key_length - self.query_length:
            given += f", query_offset={self.query_offset}"
        for name, number in zip(("batch", "heads"), self.shape, strict=False):
            given += f", {name}={number}" if number != 1 else ""
        given += f", tile={self.size}" if self.size != 128 else ""
        return f"masks.compile({given})"


# Shadows the builtin on purpose: FlexAttention users look for this name.
def compile(
    mask: Mask | Callable[..., Array] | Array,
    query_length: int,
    key_length: int | None = None,
    *,
    query_offset: int | None = None,
    like: Array | None = None,
    batch: int | tuple[int, ...] = 1,
    heads: int = 1,
    tile: int = 128,
) -> Mask:
    """Evaluate a mask once, and store which of its tiles are empty, full and mixed.

    This is for masks given as functions, whose tiles are otherwise unknown: compile the mask once,
    and use it in every layer and at every step. Kernels skip its empty tiles, and do not evaluate
    it in full ones. They call it in mixed tiles, so a mask is pickled only with a function of a
    module, not a lambda.

    Parameters
    ----------
    mask : Mask, callable or Array of bool
        The mask to compile.
    query_length, key_length : int
        L and S of the calls that will use it; S is L by default.
    query_offset : int, optional
        The position of the first row among the keys, S − L by default.
    like : Array, optional
        An array of the library and device to evaluate the mask on; by default those of the arrays
        in the mask, or else NumPy.
    batch : int or tuple of int
        Number of batch items, or the batch axes, for a mask that differs between items.
    heads : int
        Number of query heads, for a mask that differs between heads.
    tile : int
        Number of rows and keys of a tile. Smaller tiles leave less to compute, and take longer to
        look up.

    Returns
    -------
    Mask
        The same mask, with the table of its tiles.

    Examples
    --------
    >>> import numpy as np
    >>> from polyattn import attention, masks
    >>> def checkered(b, h, i, j):
    ...     return (i // 256 + j // 256) % 2 == 0
    >>> mask = masks.compile(checkered, 512)
    >>> mask
    masks.compile(masks.rule(checkered), 512, 512)
    >>> x = np.ones((1, 512, 8), dtype=np.float32)
    >>> attention(x, x, x, mask=mask).shape
    (1, 512, 8)
    """
    mask = as_mask(mask)
    given = {
        "query_length": query_length, "heads": heads, "tile": tile,
        "key_length": query_length if key_length is None else key_length,
    }  # fmt: skip
    length, heads, size, keys = (
        check_int(f"masks.compile: {name}", number, least=1) for name, number in given.items()
    )
    axes = batch if isinstance(batch, tuple) else (batch,)
    axes = tuple([check_int("masks.compile: batch", number, least=1) for number in axes])
    offset = keys - length
    if query_offset is not None:
        offset = check_int("masks.compile: query_offset", query_offset)
    dims = ScoreDims(axes, heads, length, keys, offset)
    return _compiled(mask, dims, size, like)


def _compiled(mask: Mask, dims: ScoreDims, size: int, like: Array | None) -> Compiled:
    """Evaluate every key of a mask once, and return the mask with the table of its tiles."""
    if isinstance(mask, Compiled):
        mask = mask.mask
    _check_fits(mask, dims)
    arrays = [thing for _, thing in mask.carried() if is_array(thing)]
    # Beside other arrays, those of NumPy are numbers to place.
    arrays = [like, *sorted(arrays, key=is_host)]
    example = next((array for array in arrays if array is not None), None)
    xp: Any = numpy_namespace()
    if example is not None:
        xp = library_of(example).xp
    destination = None if example is None else destination_of(example)
    placed = mask if destination is None else mask.placed(destination)
    assert dims.query_offset is not None
    size, shape, any_visible, all_visible = _table_of(placed, xp, example, dims, size)
    lengths = dims.query_length, dims.key_length, dims.query_offset
    return Compiled(mask, *lengths, size, shape, any_visible, all_visible)


def _check_fits(mask: Mask, dims: ScoreDims) -> None:
    """Raise if the mask does not fit such calls, so that its table would mean nothing."""
    for _, thing in mask.carried():
        if not is_array(thing):
            check_signature("the mask function", thing, "b, h, i, j")
    try:
        mask.spec().check(dims)
    except ValueError as error:
        raise ValueError(
            f"{error}; masks.compile was called with batch={dims.batch}, heads={dims.heads}"
        ) from None


def _table_of(mask: Mask, xp: Any, like: Array | None, dims: ScoreDims, size: int) -> TileTable:
    """Evaluate all keys of a mask, one block of rows at a time."""
    heads, length, keys = dims.scores[-3:]

    def indices(first: int, stop: int, *shape: int) -> Array:
        return xp.reshape(index_range(xp, first, stop, like), shape)

    b, h = indices(0, dims.items, -1, 1, 1, 1), indices(0, heads, -1, 1, 1)
    blocks: list[list[Array]] = [[], []]
    lead = (1, 1)
    for block in Span(0, length).split(size):
        rows = indices(*block, -1, 1)
        at = PointIndices(
            b, h, rows, indices(0, keys, 1, -1), offset=dims.query_offset or 0, batch=dims.batch
        )
        seen = mask.seen(at)
        whole = (dims.items, heads, block.length, keys)
        if len(seen.shape) > 4 or broadcast_shapes(tuple(seen.shape), whole) != whole:
            raise ValueError(
                f"the result of the mask function must broadcast to {whole}, the shape that its"
                f" index arrays broadcast to; it returned {tuple(seen.shape)}"
            )
        seen = xp.reshape(seen, (1,) * (4 - len(seen.shape)) + tuple(seen.shape))
        lead = seen.shape[:2]
        seen = xp.broadcast_to(seen, (*lead, seen.shape[2], keys))
        for half, reduce in zip(blocks, (xp.any, xp.all), strict=True):
            by_key = reduce(seen, axis=2)
            tiles = [
                reduce(by_key[..., slice(*span)], axis=-1) for span in Span(0, keys).split(size)
            ]
            half.append(xp.reshape(xp.stack(tiles, axis=-1), (-1, len(tiles))))
    down, across = -(-length // size), -(-keys // size)
    halves = [bytes(_as_list(xp.reshape(xp.stack(half, axis=1), (-1,)))) for half in blocks]
    return TileTable(size, (lead[0], lead[1], down, across), halves[0], halves[1])


def _as_list(flags: Array) -> list[bool]:
    """Return an array of bools as a list, in one step where the library can."""
    if hasattr(flags, "tolist"):
        return list(flags.tolist())
    return [bool(flags[n]) for n in range(flags.shape[0])]
