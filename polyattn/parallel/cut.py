"""The options of a call over all rows, keys and heads, for some of them.

The options describe the whole sequence. A kernel counts the rows, keys and heads that it gets from
0. So arrays are cut to the block, lengths are counted from its start, and functions get the indices
of the whole sequence. Masks keep their structure, by which kernels skip tiles.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from polyattn._base.arrays import Array, cast, is_array, library_of
from polyattn._core.expressions.expression import Expression
from polyattn._core.expressions.indices import PointIndices
from polyattn._core.expressions.masks import And, Dense, Mask, Not, Or, Rule
from polyattn._core.expressions.patterns import (
    Band,
    Dilated,
    GlobalTokens,
    Padding,
    Prefix,
    Segments,
)
from polyattn._core.expressions.replacements import Normalizer, ScaleRule, Similarity
from polyattn._core.expressions.scores import Alibi, Chain, Function, RelativeBias, Score
from polyattn.parallel.blocks import place, take


class Block(NamedTuple):
    """Some rows, keys and heads of a call: the start, which JAX may trace, and the length."""

    rows: tuple[Any, int]
    keys: tuple[Any, int]
    heads: tuple[Any, int]
    offset: Any  # the position of row 0 of the whole: a number, or one for each batch item
    batch: tuple[int, ...]

    def _along(self, axes: str, rank: int) -> list[tuple[int, tuple[Any, int]]]:
        """Return the last axes of an array, which follow these of the scores, and their parts."""
        parts = {"H": self.heads, "L": self.rows, "S": self.keys}
        letters = reversed(axes.lstrip("."))
        return [(-n, parts[letter]) for n, letter in enumerate(letters, 1) if n <= rank]

    def array(self, array: Array, axes: str) -> Array:
        """Return the entries of an array whose last axes follow these axes of the scores."""
        for axis, (start, length) in self._along(axes, len(array.shape)):
            if array.shape[axis] != 1:
                array = take(array, axis, start, length)
        return array

    def placed(self, gradient: Array, whole: Array, axes: str) -> Array:
        """Return the gradient of an array from that of its entries."""
        for axis, (start, _) in self._along(axes, len(gradient.shape)):
            gradient = place(gradient, axis, start, whole.shape[axis])
        return gradient

    def expression(self, value: Expression) -> Any:
        """Return an expression with the same meaning in the block."""
        match value:
            case Mask():
                return cut_mask(value, self)
            case Score():
                return cut_score(value, self)
            case Similarity() | ScaleRule() | Normalizer():
                return value  # they know no positions
        raise TypeError(f"{value!r} cannot be cut into blocks")

    def shifted(self, offset: Any) -> Any:
        """Return the query offset of the block, from that of the whole."""
        return offset + self.rows[0] - self.keys[0]

    def after(self, start: Any) -> Any:
        """Return what batch item, head, row and key begin with, from those of the whole."""
        firsts = (0, self.heads[0], self.rows[0], self.keys[0])
        found = [a + b for a, b in zip(start, firsts, strict=True)]
        arrays = [number for number in found if is_array(number)]
        if not arrays:
            return tuple(found)
        return library_of(arrays[0]).xp.stack([number + 0 * arrays[0] for number in found])

    def moved(self, rule: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function of indices of the block, from one (…, b, h, i, j) of the whole."""
        (i0, _), (j0, _), (h0, _) = self.rows, self.keys, self.heads
        return lambda *given: rule(
            *given[:-3], _after(given[-3], h0), _after(given[-2], i0), _after(given[-1], j0)
        )

    def points(self, b: Array, h: Array, i: Array, j: Array) -> PointIndices:
        """Return the indices of the whole that these of the whole are."""
        offset = self.offset
        if is_array(offset):
            xp = library_of(offset).xp
            offset = xp.reshape(xp.broadcast_to(offset, self.batch), (-1,))
        return PointIndices(b, h, i, j, offset=offset, batch=self.batch)


def _after(index: Array, start: Any) -> Array:
    return index if isinstance(start, int) and start == 0 else index + start


def cut_mask(mask: Mask, block: Block) -> Mask:
    """Return a mask expression for a block."""
    (i0, rows), (j0, keys) = block.rows, block.keys
    match mask:
        case And() | Or():
            return type(mask)(tuple([cut_mask(part, block) for part in mask.parts]))
        case Not():
            return Not(cut_mask(mask.mask, block))
        case Band() | Dilated():
            return mask  # they depend on the distance only
        case Prefix():
            return Prefix(_from(mask.lengths, j0))
        case Padding():
            return Padding(_from(mask.key_lengths, j0), _from(mask.query_lengths, i0))
        case Segments():
            ids = mask.query_ids if mask.key_ids is None else mask.key_ids
            return Segments(take(mask.query_ids, -1, i0, rows), take(ids, -1, j0, keys))
        case Dense():
            return Dense(block.array(mask.array, ".HLS"))
        case Rule():
            return Rule(block.moved(mask.function))
        case GlobalTokens() if isinstance(j0, int):
            return GlobalTokens(tuple([token - j0 for token in mask.positions]))
    return Rule(block.moved(lambda *at: mask.seen(block.points(*at))))


def _from(lengths: Any, start: Any) -> Any:
    """Return lengths counted from a start."""
    if lengths is None or (isinstance(start, int) and start == 0):
        return lengths
    if is_array(lengths):
        # A difference may be negative, and too large for a narrow dtype.
        xp = library_of(lengths).xp
        wide = str(lengths.dtype).rpartition(".")[-1] in ("int32", "int64")
        lengths = lengths if wide else cast(xp, lengths, xp.int32)
    return lengths - start


def cut_score(score: Score, block: Block) -> Score:
    """Return a score expression for a block."""
    first, heads = block.heads
    match score:
        case Chain():
            return Chain(tuple([cut_score(part, block) for part in score.parts]))
        case Alibi() if is_array(score.slopes):
            return Alibi(take(score.slopes, 0, first, heads))
        case Alibi() if heads != score.slopes:
            rule = block.moved(lambda s, *at: score.apply(s, block.points(*at)))
            return Function(rule, lambda s, *at: library_of(s).xp.ones_like(s))
        case RelativeBias():
            table = take(score.table, 1, first, heads)
            return RelativeBias(table, score.bidirectional, score.max_distance)
        case Function():
            derivative = score.derivative and block.moved(score.derivative)
            return Function(block.moved(score.rule), derivative)
    return score


def place_score(gradient: Array, whole: Array, block: Block) -> Array:
    """Return the gradient of an array of a score expression from that for a block."""
    axis = len(whole.shape) - 1  # slopes (H,) and tables (buckets, H)
    return place(gradient, axis, block.heads[0], whole.shape[axis])
