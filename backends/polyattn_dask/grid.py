"""The grid of the scores: the chunks of batch items, heads, rows and keys that a call runs by.

The caller's chunks of the query rows and of the keys stay. Where arrays are chunked differently,
the query decides, then the key; the others are rechunked.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import dask.array as da

from polyattn._base.slices import Slice
from polyattn._core.call.options import OPTIONS
from polyattn._core.expressions.parts import Part, axes_of_last
from polyattn.plugin import Problem, Span

Chunks = tuple[tuple[int, ...], ...]
#: The axis of the grid that each axis of an array follows: the number of a batch axis, H, L, S, G
#: for the key heads, or None for an axis that has one chunk.
Axes = tuple[int | str | None, ...]


class Index(NamedTuple):
    """The place of a block of query rows in the grid, and of a chunk of keys."""

    items: tuple[int, ...]
    head: int
    row: int
    column: int = 0

    @property
    def where(self) -> tuple[int, ...]:
        """The number of the block of query rows along each axis."""
        return (*self.items, self.head, self.row)


class Grid(NamedTuple):
    """The spans along each axis of the scores."""

    batch: tuple[tuple[Span, ...], ...]  # of each batch axis
    heads: tuple[Span, ...]
    groups: tuple[Span, ...]  # of the key heads
    rows: tuple[Span, ...]
    columns: tuple[Span, ...]
    group_of: tuple[int, ...]  # the place in `groups` for each of `heads`

    def spans(self, axis: int | str) -> tuple[Span, ...]:
        """Return the spans along an axis."""
        if isinstance(axis, int):
            return self.batch[axis]
        return {"H": self.heads, "G": self.groups, "L": self.rows, "S": self.columns}[axis]

    def place(self, axes: Axes, at: Index) -> tuple[int, ...]:
        """Return the number of the block, along each of its axes, that an array has at a place."""
        letters = {"H": at.head, "L": at.row, "S": at.column, "G": self.group_of[at.head]}
        return tuple(
            0 if axis is None else at.items[axis] if isinstance(axis, int) else letters[axis]
            for axis in axes
        )

    def part(self, problem: Problem, at: Index) -> Part:
        """Return the part of the scores of a block of query rows, with all keys."""
        items = [spans[n] for spans, n in zip(self.batch, at.items, strict=True)]
        rest = self.heads[at.head], self.rows[at.row], Span(0, problem.key_length)
        slices = [Slice(span.start, span.length) for span in (*items, *rest)]
        return Part(problem.batch, tuple(slices[:-3]), *slices[-3:])

    def row_blocks(self) -> Iterator[Index]:
        """Yield the places of the blocks of query rows."""
        for items in itertools.product(*(range(len(spans)) for spans in self.batch)):
            for head, row in itertools.product(range(len(self.heads)), range(len(self.rows))):
                yield Index(items, head, row)


def grid_of(problem: Problem, chunks: Mapping[str, Chunks]) -> Grid:
    """Return the grid of a call whose query, key and value are cut like this."""
    rank, names = len(problem.batch), ("query", "key", "value")
    batch = []
    for axis, length in enumerate(problem.batch):
        cuts = [
            chunks[n][axis - rank - 3] for n in names if len(chunks.get(n, ())) >= rank - axis + 3
        ]
        cut = next((cut for cut in cuts if sum(cut) == length), (length,))
        # In the hash of dropout, the flat items of a part count on from its first.
        batch.append(spans_of((length,) if problem.dropout and axis else cut))
    heads, groups = _heads(problem, chunks["query"][-3])
    rows, columns = spans_of(chunks["query"][-2]), spans_of(chunks["key"][-2])
    starts = [span.start for span in groups]
    size = problem.group_size
    group_of = tuple([starts.index(span.start // size) for span in heads])
    return Grid(tuple(batch), heads, groups, rows, columns, group_of)


def _heads(problem: Problem, cut: tuple[int, ...]) -> tuple[tuple[Span, ...], tuple[Span, ...]]:
    """Return the spans of query heads, whole groups or parts of one, and those of key heads."""
    size = problem.group_size
    spans = spans_of(cut)
    whole = [s.start % size == s.stop % size == 0 for s in spans]
    within = [s.length and s.start // size == (s.stop - 1) // size for s in spans]
    if not all(a or b for a, b in zip(whole, within, strict=True)):
        edges = dict.fromkeys(-(-span.stop // size) * size for span in spans)
        spans = _between([0, *edges])
    groups = _between([*dict.fromkeys(span.start // size for span in spans), problem.key_heads])
    return spans, groups


def _between(edges: list[int]) -> tuple[Span, ...]:
    return tuple([Span(first, stop) for first, stop in itertools.pairwise(edges)])


def spans_of(lengths: tuple[int, ...]) -> tuple[Span, ...]:
    """Return the spans of chunks of these lengths."""
    return _between(list(itertools.accumulate(lengths, initial=0)))


def lengths_of(spans: tuple[Span, ...]) -> tuple[int, ...]:
    """Return the lengths of spans."""
    return tuple([span.length for span in spans])


#: The axes of the other arguments, written as in the table of options.
_NAMED = {
    "query": ".HL-",
    "key": ".GS-",
    "value": ".GS-",
    "query_offset": ".---",
    "logsumexp": ".HL",
    "output": ".HL-",
    "output_gradient": ".HL-",
    "logsumexp_gradient": ".HL",
}


def axes_of(name: str, shape: tuple[int, ...], problem: Problem) -> Axes:
    """Return the axes that an argument follows; one along which it broadcasts is not cut."""
    last = _NAMED[name] if name in _NAMED else OPTIONS[name].axes
    if last is None and shape:
        raise TypeError(f"{name} cannot be chunked: the table of options lacks its axes")
    return axes_along(last or "", shape, problem)


def axes_along(last: str, shape: tuple[int, ...], problem: Problem) -> Axes:
    """Return the axes of the grid for an array whose last axes follow these of the scores."""
    axes = axes_of_last(last, len(shape), len(problem.batch))
    lengths: dict[Any, int] = dict(enumerate(problem.batch))
    lengths |= {"H": problem.heads, "G": problem.key_heads}
    lengths |= {"L": problem.query_length, "S": problem.key_length}
    cut = zip(axes, shape, strict=True)
    return tuple([None if n == 1 != lengths.get(axis) else axis for axis, n in cut])


def key_axis(axes: Axes) -> int | None:
    """Return the axis of the keys, counted from the last, if there is one."""
    return axes.index("S") - len(axes) if "S" in axes else None


def chunks_like(grid: Grid, axes: Axes, shape: tuple[int, ...]) -> Chunks:
    """Return the chunks of an array that is cut as the grid is."""
    cuts = zip(axes, shape, strict=True)
    return tuple([(n,) if axis is None else lengths_of(grid.spans(axis)) for axis, n in cuts])


def aligned(array: Any, axes: Axes, grid: Grid) -> Any:
    """Return an array as a dask array that is cut as the grid is."""
    if not isinstance(array, da.Array):
        array = da.from_array(array, chunks=-1, asarray=False)
    for place, axis in enumerate(axes):
        spans = () if axis is None else grid.spans(axis)
        if spans and (spans != spans_of(lengths_of(spans)) or spans[-1].stop != array.shape[place]):
            lead = (slice(None),) * place
            array = da.concatenate([array[(*lead, slice(*span))] for span in spans], axis=place)
    wanted = chunks_like(grid, axes, array.shape)
    if array.chunks == wanted:
        return array
    # dask leaves the chunks of an array whose axes are all empty as they are.
    return da.zeros_like(array, chunks=wanted) if 0 in array.shape else array.rechunk(wanted)
