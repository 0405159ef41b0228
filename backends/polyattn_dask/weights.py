"""The weights on dask arrays: those of each visible pair of chunks, by the rows' logsumexp."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from array_api_compat import array_namespace

from polyattn.plugin import Array, Operands, Problem, Span
from polyattn_dask.cut import Cut, cut
from polyattn_dask.forward import block_of_rows
from polyattn_dask.grid import Grid, Index, grid_of, lengths_of
from polyattn_dask.layer import Key, Layer
from polyattn_dask.sizes import BYTES, items_in
from polyattn_dask.tasks import Blocks, Pieces, front, zeros


@dataclass(frozen=True)
class Weigh:
    """The weights of a block of query rows over some chunks of keys."""

    pieces: Pieces
    look: dict[str, Any]  # ``top`` or ``per_key``, as of `polyattn.attention_weights`

    def __call__(
        self, query: Array, keys: Blocks, leaves: Sequence[Blocks], logsumexp: Array | None
    ) -> Any:
        """Return the weights, their sums, or the largest ones with their keys."""
        known = {} if logsumexp is None else {"logsumexp": logsumexp}
        top, found = self.look.get("top"), None
        with front().use_threads(1):
            for key, _, part, options in self.pieces.of(keys, [], leaves):
                look = self.look | ({"top": min(top, key.shape[-2])} if top else {})
                here = front().attention_weights(query, key, **options, **known, **look)
                if top is None:
                    return here
                here = here.weights, here.keys + part.columns.start
                found = here if found is None else Top(top)([found, here])
        return found


@dataclass(frozen=True)
class Top:
    """The largest weights of each row, of those that are the largest over parts of the keys."""

    top: int

    def __call__(self, found: Sequence[tuple[Array, Array]]) -> tuple[Array, Array]:
        """Return weights and keys."""
        xp = array_namespace(found[0][0])
        weights, keys = (xp.concat(list(x), axis=-1) for x in zip(*found, strict=True))
        order = xp.argsort(weights, axis=-1, descending=True)[..., : self.top]
        return tuple(xp.take_along_axis(x, order, axis=-1) for x in (weights, keys))


@dataclass(frozen=True)
class Unseen:
    """The weights of keys that no row of a block sees."""

    dtype: str
    shape: tuple[int, ...]

    def __call__(self, query: Array) -> Array:
        """Return zeros."""
        return zeros(self.shape, self.dtype, query)


def add(sums: Sequence[Array]) -> Array:
    """Return the sums over blocks of rows."""
    return functools.reduce(operator.add, sums)


def weights(
    problem: Problem, x: Operands, logsumexp: Array | None, kernel: Any
) -> tuple[Array, Array | None]:
    """Return what the kernel of the weights would: weights, and the keys of the largest."""
    whole = grid_of(problem, {"query": x.query.chunks, "key": x.key.chunks})
    grid = _selected(problem, whole, kernel.rows, kernel.heads)
    call = cut(problem, x, grid, logsumexp=logsumexp)
    facts = (kernel.rows, kernel.heads, kernel.top, kernel.per_key)
    layer = Layer("attention-weights", call.inputs, problem, call.template, facts)
    if kernel.top is not None:
        return _largest(call, layer, kernel.top)
    return (_sums(call, layer) if kernel.per_key else _all(call, layer)), None


def _selected(problem: Problem, grid: Grid, rows: Any, heads: Any) -> Grid:
    """Return the grid of some rows, within the caller's chunks, and of some heads one by one."""
    if rows is not None:
        cuts = [
            Span(max(span.start, chunk.start), min(span.stop, chunk.stop))
            for span in rows
            for chunk in grid.rows
        ]
        grid = grid._replace(rows=tuple([s for s in cuts if s.length > 0] or [Span(0, 0)]))
    if heads is not None:
        size = problem.group_size
        numbers = [head for span in heads for head in range(*span)]
        read = list(dict.fromkeys(number // size for number in numbers))
        grid = grid._replace(
            heads=tuple([Span(n, n + 1) for n in numbers]),
            groups=tuple([Span(n, n + 1) for n in read]),
            group_of=tuple([read.index(number // size) for number in numbers]),
        )
    return grid


def _logsumexp(call: Cut, layer: Layer, at: Index) -> Key | None:
    """Return the key of the rows' logsumexp, after the tasks that compute it if it is not known."""
    if call.template.whole_rows:
        return None
    if "logsumexp" in call.arrays:
        return call.block("logsumexp", at)
    where = (*at.items, at.head, at.row)
    both = layer.add(("both", *where), *block_of_rows(call, layer, at, "both"))
    return layer.add(("logsumexp", *where), operator.itemgetter(1), both)


def _weigh(call: Cut, at: Index, columns: list[int], known: Key | None, **look: Any) -> Any:
    """Return the task of the weights of some chunks of keys."""
    keys, _, leaves = call.blocks(at, columns)
    step = Weigh(call.pieces(at, columns, call.template.whole_rows), look)
    return (step, call.block("query", at), keys, leaves, known)


def _column_chunks(call: Cut) -> list[list[int]]:
    """Return the chunks of keys that a task weighs at once: one, or all."""
    every = list(range(len(call.grid.columns)))
    return [every] if call.template.whole_rows else [[n] for n in every]


def _lengths(call: Cut) -> tuple[int, ...]:
    spans = call.grid.columns
    return (sum(lengths_of(spans)),) if call.template.whole_rows else lengths_of(spans)


def _all(call: Cut, layer: Layer) -> Array:
    """Return all weights, (..., H, L, S)."""
    tasks: dict[tuple[int, ...], Any] = {}
    chunks = (*call.row_chunks, _lengths(call))
    for at in call.grid.row_blocks():
        known, seen = _logsumexp(call, layer, at), call.seen.of(at)
        for n, columns in enumerate(_column_chunks(call)):
            place = (*at.items, at.head, at.row, n)
            tasks[place] = _weigh(call, at, columns, known)
            if not set(columns) & set(seen):
                shape = tuple([cuts[m] for cuts, m in zip(chunks, place, strict=True)])
                tasks[place] = (Unseen(call.problem.accumulator, shape), call.block("query", at))
    query = call.arrays["query"][1]
    return layer.array("weights", chunks, call.problem.accumulator, query, tasks)


def _sums(call: Cut, layer: Layer) -> Array:
    """Return the sums over the rows, (..., H, S)."""
    parts: dict[tuple[int, ...], list[Key]] = {}
    accumulator = call.problem.accumulator
    chunks = (*call.row_chunks[:-1], _lengths(call))
    for at in call.grid.row_blocks():
        known, seen = _logsumexp(call, layer, at), call.seen.of(at)
        for n, columns in enumerate(_column_chunks(call)):
            place = (*at.items, at.head, n)
            task = _weigh(call, at, columns, known, per_key=True)
            if not set(columns) & set(seen):
                if at.row:
                    continue
                shape = tuple([cuts[m] for cuts, m in zip(chunks, place, strict=True)])
                task = (Unseen(accumulator, shape), call.block("query", at))
            key = layer.add(("sums", *place, at.row), *task)
            parts.setdefault(place, []).append(key)
    tasks = {}
    for place, keys in parts.items():
        size = call.problem.key_length * BYTES[accumulator]
        tasks[place] = (add, layer.tree(("sum", *place), keys, size, add))
    query = call.arrays["query"][1]
    return layer.array("weights", chunks, accumulator, query, tasks)


def _largest(call: Cut, layer: Layer, top: int) -> tuple[Array, Array]:
    """Return the largest weights of each row and their keys, (..., H, L, top)."""
    found: dict[tuple[int, ...], Key] = {}
    lengths = lengths_of(call.grid.columns)
    for at in call.grid.row_blocks():
        where, known = (*at.items, at.head, at.row), _logsumexp(call, layer, at)
        groups = call.groups(at)
        seen = [n for group in groups for n in group]
        if call.template.whole_rows:
            groups = [list(range(len(lengths)))]
        else:  # a row needs `top` keys, whatever it sees
            rest = [n for n in range(len(lengths)) if n not in set(seen)]
            while sum(lengths[n] for n in seen) < top:
                seen.append(rest.pop(0))
                groups.append([seen[-1]])
        keys = [
            layer.add(("top", *where, n), *_weigh(call, at, group, known, top=top))
            for n, group in enumerate(groups)
        ]
        rows = items_in(call.grid, at) * call.grid.heads[at.head].length
        size = rows * call.grid.rows[at.row].length * top * 16
        keys = layer.tree(("top", "join", *where), keys, size, Top(top))
        found[where] = layer.add(("largest", *where), Top(top), keys)
    chunks, query = (*call.row_chunks, (top,)), call.arrays["query"][1]
    weights, numbers = (
        {(*where, 0): (operator.itemgetter(n), key) for where, key in found.items()}
        for n in range(2)
    )
    return (
        layer.array("weights", chunks, call.problem.accumulator, query, weights),
        layer.array("keys", chunks, "int64", query, numbers),
    )
