"""Attention to the keys that a mask names, gathered some rows at a time.

A block of rows and the keys that are named for it are an attention of their own. So blocks become
a batch axis, and the formula and its derivatives run on these::

    masks.selected(indices), 4096 rows, 512 of 32768 keys     64 rows at a time
    query (8, 4096, 64)                                       (64, 8, 1, 64)
    key   (8, 32768, 64)                                      (64, 8, 512, 64)

What else a call has, such as a bias, is evaluated at the named keys only.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple

from polyattn._base.arrays import Array, with_rank, zeros
from polyattn._base.scatter import add_lists, scatter_add
from polyattn._base.slices import Slice, take
from polyattn._base.span import Span
from polyattn._base.tracing import is_compiling
from polyattn._core.call.gradients import Gradients
from polyattn._core.call.operands import Cotangents, Operands, Residuals, Tangents
from polyattn._core.call.problem import Problem
from polyattn._core.expressions.masks import RuleMask
from polyattn._core.expressions.selections import Selection, selection_of
from polyattn._core.tiles.named import NamedIndices, swapped
from polyattn._core.tiles.online_softmax import initial_state, normalize
from polyattn._kernels import backward, dense, jvp
from polyattn._kernels.tiled import widened
from polyattn.plugin import Backend, Kernel

#: So many rows multiply the same keys as fast as a dense product does. There must be so many times
#: more keys than are named for so many rows, and for fewer.
MANY_ROWS, TIMES, TIMES_OF_FEW = 16, 3, 24
#: The features that the mask of a selection rules out.
_OTHERS = frozenset({"mask"})


class Gathered(Kernel):
    """The formula over the keys that `masks.selected` and `masks.blocks` name."""

    name = "gathered"
    features = dense.COMPUTED - _OTHERS
    differentiates: ClassVar = {
        "backward": backward.DIFFERENTIATED - _OTHERS,
        "jvp": jvp.DIFFERENTIATED - _OTHERS,
    }
    promises = Kernel.promises | {"reads_selections"}
    #: Numbers of keys, values and scores that are held at a time, 32 MiB of float32.
    tile = 2**23

    def reasons_against(self, problem: Problem) -> list[str]:
        """Return why the keys cannot be gathered."""
        if selection_of(problem.mask_spec)[0] is None:
            return ["its mask names no keys, as masks.selected and masks.blocks do"]
        if problem.is_symbolic:
            return ["it gathers keys for lengths that are known"]
        if problem.library == "dask":
            return ["it gathers the keys of whole arrays, and those of dask are cut into chunks"]
        return []

    def only_on_request(self, problem: Problem) -> str | None:
        """Return why another kernel takes less time."""
        return why_many(problem)

    def remark(self, problem: Problem) -> str | None:
        """Return how many keys are gathered, and how much memory they take."""
        selection, _ = selection_of(problem.mask_spec)
        rows, _, numbers = _sizes(problem, selection, self.tile)
        whose = "each row" if rows == 1 else f"{rows:,} rows at once"
        size = _bytes(numbers * (8 if problem.accumulator == "float64" else 4))
        keys = f"{selection.most_keys:,} of {problem.key_length:,} keys"
        return f"it gathers {keys} for {whose}, {size} at a time"

    def __call__(
        self, problem: Problem, operands: Operands, backend: Backend
    ) -> tuple[Array, Array | None]:
        """Return the output, and the logsumexp if the problem asks for it."""
        xp, query = backend.xp, operands.query
        if 0 in problem.scores:
            empty = initial_state(problem, operands, xp, Span(0, problem.query_length))
            return normalize(problem, empty, query.dtype, xp)
        operands = widened(problem, operands, xp)

        def of_rows(rows: int, blocks: int, start: Any) -> tuple[Array, Array | None]:
            part = _RowBlocks.of(problem, operands, xp, Slice(start, rows * blocks), blocks)
            return part.joined_results(*dense.attention(part.problem, part.operands, backend))

        spans = list(_spans(problem, operands, self.tile))
        groups: Any = [(span[1:], [span]) for span in spans]
        if not is_compiling():  # torch.compile groups by constants only
            groups = itertools.groupby(spans, key=lambda span: span[1:])
        results = (
            result
            for sizes, alike in groups
            for result in backend.in_turn(
                functools.partial(of_rows, *sizes), [start for start, *_ in alike], *operands[:3]
            )
        )
        return backend.stack_rows(problem, query, results)

    def backward(
        self, problem: Problem, operands: Operands, residuals: Residuals, cotangents: Cotangents,
        backend: Backend,
    ) -> Gradients:  # fmt: skip
        """Return the gradients, with memory for some gathered keys beside them."""
        if 0 in problem.scores:
            return backward.gradients(problem, operands, residuals, cotangents, backend, 1, 1)
        total = _GatheredSums(problem, operands, backend.xp)
        for rows, part in _parts(problem, operands, backend.xp, self.tile):
            known = Residuals(*part.of_results(residuals, rows))
            given = Cotangents(*part.of_results(cotangents, rows))
            whole = part.problem, part.operands, known, given, backend, *part.sizes
            total.add(part, backward.gradients(*whole))
        return total.total()

    def jvp(
        self, problem: Problem, operands: Operands, residuals: Residuals, tangents: Tangents,
        backend: Backend,
    ) -> tuple[Array, Array]:  # fmt: skip
        """Return the tangents of output and logsumexp."""
        if 0 in problem.scores:
            return jvp.pushforward(problem, operands, residuals, tangents, backend, 1, 1)
        found = []
        for rows, part in _parts(problem, operands, backend.xp, self.tile):
            known = Residuals(*part.of_results(residuals, rows))
            named = tangents._asdict().items()
            given = Tangents(*[part.of_operand(name, x, rows) for name, x in named])
            whole = part.problem, part.operands, known, given, backend, *part.sizes
            found.append(part.joined_results(*jvp.pushforward(*whole)))
        outputs, logsumexps = zip(*found, strict=True)
        return backend.xp.concat(outputs, axis=-2), backend.xp.concat(logsumexps, axis=-1)


# ---- sizes, from static facts ----


def why_many(problem: Problem) -> str | None:
    """Return why the keys that are named are too many to be gathered, None if they are few."""
    selection, _ = selection_of(problem.mask_spec)
    if selection is None:
        return None
    named, rows = selection.most_keys, selection.sizes[0] or problem.query_length or 1
    is_many = min(rows, problem.query_length or 1) * problem.group_size >= MANY_ROWS
    if named * (TIMES if is_many else TIMES_OF_FEW) <= problem.key_length:
        return None
    if is_compiling():  # numbers of a program are symbols where lists of other lengths came before
        return "many keys are named for a row: a mask takes less time"
    return f"{named:,} of {problem.key_length:,} keys are named for a row: a mask takes less time"


def dense_note(problem: Problem) -> str | None:
    """Return what a selection costs a kernel that does not read it."""
    if selection_of(problem.mask_spec)[0] is None:
        return None
    count = math.prod(problem.scores[-2:])
    return f"the mask becomes one of {count:,} scores, {_bytes(count)} of bools for a head"


def _bytes(count: int) -> str:
    power = 20 if count < 2**30 else 30
    return f"{count / 2**power:,.3g} {'MiB' if power == 20 else 'GiB'}"


def _sizes(problem: Problem, selection: Selection, tile: int) -> tuple[int, int, int]:
    """Return the rows of a block, the blocks of a part, and the numbers that it holds."""
    of_rows, _ = selection.sizes
    rows = min(problem.query_length, of_rows or problem.query_length)
    if not isinstance(selection.first_row, int):
        rows = 1  # a part whose first row is traced may begin anywhere in a block
    heads = problem.key_heads if _is_of_all_heads(selection) else problem.heads
    items, named = math.prod(problem.batch), max(1, selection.most_keys)
    gathered = items * heads * named * (problem.head_size + problem.value_size)
    scores = items * problem.heads * named
    if rows > 1:
        rows = max(1, min(rows, (tile - gathered) // scores))
    blocks = max(1, tile // max(1, gathered + rows * scores))
    blocks = min(blocks, -(-problem.query_length // max(1, rows)))
    return rows, blocks, blocks * (gathered + rows * scores)


def _is_of_all_heads(selection: Selection) -> bool:
    return len(selection.lists.shape) < 3 or bool(selection.lists.shape[-3] == 1)


# ---- parts ----


class _RowBlocks(NamedTuple):
    """Some blocks of rows and their keys, as a problem with an axis of blocks after the batch."""

    whole: Problem
    problem: Problem
    at: NamedIndices
    operands: Operands

    @classmethod
    def of(cls, whole: Problem, x: Operands, xp: Any, rows: Slice, blocks: int) -> _RowBlocks:
        """Return the part of some rows."""
        selection, rest = selection_of(x.mask)
        at = NamedIndices(whole, xp, x._replace(mask=rest), rows, blocks, selection)
        problem = whole._replace(
            batch=(*whole.batch, blocks), query_length=rows.length // blocks,
            key_length=at.keys.shape[-1], is_causal=False, window=(None, None),
            key_heads=whole.key_heads if _is_of_all_heads(selection) else whole.heads,
        )  # fmt: skip
        part = cls(whole, problem, at, x._replace(mask=RuleMask(_at_points), indices=at))
        fields = {
            n: part.of_operand(n, getattr(x, n), rows) for n in ("query", "key", "value", "bias")
        }
        return part._replace(operands=part.operands._replace(**fields))

    @property
    def sizes(self) -> tuple[int, int]:
        """The rows and keys of a tile that holds all."""
        return max(1, self.problem.query_length), max(1, self.problem.key_length)

    def of_operand(self, name: str, array: Array | None, rows: Slice) -> Any:
        """Return the part of query, key, value or bias, or of its tangent."""
        if array is None or name == "sinks":
            return array
        if name == "query":
            return self.of_rows(array, rows)
        if name == "bias":
            return self.at.of_scores(array)
        return self.at.taken(array, self.problem.key_heads)

    def of_rows(self, array: Array, rows: Slice) -> Array:
        """Turn rows of (..., H, L, size) into (..., blocks, H, rows, size)."""
        xp, (*_, blocks) = self.at.xp, self.problem.batch
        array = with_rank(array, len(self.whole.batch) + 3)
        array = take(array, -2, *rows)
        *lead, heads, length, size = array.shape
        parts = xp.reshape(array, (*lead, heads, blocks, length // blocks, size))
        return swapped(xp, parts, -4)

    def of_results(self, results: tuple[Any, Any], rows: Slice) -> tuple[Any, Any]:
        """Return the part of an output and of a number for each row, which may be None."""
        output, numbers = results
        if numbers is not None:
            numbers = self.of_rows(numbers[..., None], rows)[..., 0]
        return self.of_rows(output, rows), numbers

    def joined(self, array: Array) -> Array:
        """Turn (..., blocks, H, rows, size) into (..., H, L, size)."""
        array = swapped(self.at.xp, array, -4)
        *lead, heads, blocks, rows, size = array.shape
        return self.at.xp.reshape(array, (*lead, heads, blocks * rows, size))

    def joined_results(self, output: Array, logsumexp: Array | None) -> tuple[Array, Array | None]:
        """Return output and logsumexp of the rows."""
        if logsumexp is None:
            return self.joined(output), None
        return self.joined(output), self.joined(logsumexp[..., None])[..., 0]


def _spans(problem: Problem, x: Operands, tile: int) -> Iterator[tuple[int, int, int]]:
    """Yield the first row of each part of a call, the rows of a block, and the blocks."""
    selection, _ = selection_of(x.mask)
    if is_compiling():  # each part is compiled by itself
        tile = max(tile, _sizes(problem, selection, 2**62)[2] // 16)
    size, many, _ = _sizes(problem, selection, tile)
    of_rows, start = selection.sizes[0], 0
    while start < problem.query_length:
        rows = min(size, problem.query_length - start)
        if size > 1 and of_rows is not None:  # to the end of a block
            rows = min(rows, of_rows - (start + selection.first_row) % of_rows)
        is_whole = size == 1 or rows == of_rows
        blocks = min(many, (problem.query_length - start) // rows) if is_whole else 1
        yield start, rows, blocks
        start += rows * blocks


def _parts(problem: Problem, x: Operands, xp: Any, tile: int) -> Iterator[tuple[Slice, _RowBlocks]]:
    """Yield the rows of each part of a call, in order, and the part."""
    for start, size, blocks in _spans(problem, x, tile):
        rows = Slice(start, size * blocks)
        yield rows, _RowBlocks.of(problem, x, xp, rows, blocks)


def _at_points(*_: Any) -> Any:
    raise AssertionError("the indices of a part evaluate its mask")


class _GatheredSums:
    """The gradients of a call, as the sums of those of its parts."""

    def __init__(self, problem: Problem, x: Operands, xp: Any) -> None:
        self._problem, self._x, self._xp = problem, x, xp
        self._queries: list[Array] = []
        self._sums: dict[str, Any] = {}

    def add(self, part: _RowBlocks, of_part: Gradients) -> None:
        """Add the gradients of a part."""
        for name, gradient in of_part._asdict().items():
            if gradient is None or name in self._problem.constants:
                continue
            if name == "query":
                self._queries.append(part.joined(gradient))
            elif name in ("key", "value", "bias"):
                self._scatter(name, part, gradient)
            elif name not in self._sums:
                self._sums[name] = gradient
            elif isinstance(gradient, list):
                pairs = zip(self._sums[name], gradient, strict=True)
                self._sums[name] = [before + more for before, more in pairs]
            else:
                self._sums[name] = self._sums[name] + gradient

    def _scatter(self, name: str, part: _RowBlocks, gradient: Array) -> None:
        """Add the gradient of gathered keys, values or bias where they were gathered."""
        xp, array, at = self._xp, getattr(self._x, name), part.at
        *lead, size = (*array.shape, 1) if name == "bias" else array.shape
        count, sums = math.prod(lead), self._sums.get(name)
        if sums is None:  # and one more for what is hidden
            shape = (count + 1,) if name == "bias" else (count + 1, size)
            sums = zeros(xp, shape, gradient.dtype, array)
        if name == "bias":
            numbers = xp.broadcast_to(at.places(array), gradient.shape)
            flat = xp.reshape(numbers, (-1,)), xp.reshape(gradient, (-1,))
            self._sums[name] = scatter_add(sums, *flat)
            return
        numbers = xp.broadcast_to(at.numbers(array, part.problem.key_heads), gradient.shape[:-1])
        numbers = xp.where(at.hidden[..., 0, :], xp.full_like(numbers, count), numbers)
        shape = (math.prod(numbers.shape[:-1]), numbers.shape[-1])
        lists = xp.reshape(numbers, shape), xp.reshape(gradient, (*shape, size))
        self._sums[name] = add_lists(sums, *lists)

    def total(self) -> Gradients:
        """Return all of them, in the accumulator's dtype."""
        for name in ("key", "value", "bias"):
            if name in self._sums:
                whole = self._sums[name][:-1, ...]
                self._sums[name] = self._xp.reshape(whole, getattr(self._x, name).shape)
        if self._queries:
            query = self._xp.concat(self._queries, axis=-2)
            self._sums["query"] = self._xp.reshape(query, self._x.query.shape)
        return Gradients(**self._sums)
