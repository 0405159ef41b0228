"""The weights on dask arrays: those of each visible pair of chunks, by the rows' logsumexp."""

from __future__ import annotations

import operator
from typing import Any

from polyattn.plugin import Array, Operands, Problem, Span
from polyattn_dask.cut import Cut, cut
from polyattn_dask.forward import block_of_rows
from polyattn_dask.grid import Grid, Index, grid_of, lengths_of
from polyattn_dask.layer import Key, Layer, Place, Task
from polyattn_dask.sizes import rows_in
from polyattn_dask.worker_steps import TopStep, WeighStep


def weights(
    problem: Problem, x: Operands, logsumexp: Array | None, kernel: Any
) -> tuple[Array, Array | None]:
    """Return what the kernel of the weights would: weights, and the keys of the largest."""
    whole = grid_of(problem, {"query": x.query.chunks, "key": x.key.chunks})
    grid = _selected(problem, whole, kernel.rows, kernel.heads)
    call = cut(problem, x, grid, logsumexp=logsumexp)
    layer = call.layer("attention-weights", (kernel.rows, kernel.heads, kernel.top, kernel.per_key))
    if kernel.top is not None:
        return _largest(call, layer, kernel.top)
    return _all(call, layer, per_key=kernel.per_key), None


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
    if call.whole_rows:
        return None
    if "logsumexp" in call.arrays:
        return call.block("logsumexp", at)
    both = layer.add(("both", *at.where), *block_of_rows(call, layer, at, "both"))
    return layer.add(("logsumexp", *at.where), operator.itemgetter(1), both)


def _weigh(call: Cut, at: Index, columns: list[int], known: Key | None, **look: Any) -> Task:
    """Return the task of the weights of some chunks of keys."""
    step = WeighStep(call.calls(at, columns, call.whole_rows), look)
    return call.task(at, columns, step, known)


def _all(call: Cut, layer: Layer, *, per_key: bool) -> Array:
    """Return all weights, (..., H, L, S), or their sums over the rows, (..., H, S)."""
    shares: dict[Place, list[Task]] = {}
    look = {"per_key": True} if per_key else {}
    every = list(range(len(call.grid.columns)))
    groups = [every] if call.whole_rows else [[n] for n in every]
    for at in call.grid.row_blocks():
        known, seen = _logsumexp(call, layer, at), call.seen.of(at)
        lead = at.where[:-1] if per_key else at.where
        for n, columns in enumerate(groups):
            if not set(columns).isdisjoint(seen):
                task = _weigh(call, at, columns, known, **look)
                shares.setdefault((*lead, n), []).append(task)
    lengths = lengths_of(call.grid.columns)
    lengths = (sum(lengths),) if call.whole_rows else lengths
    chunks = (*(call.row_chunks[:-1] if per_key else call.row_chunks), lengths)
    dtype = call.problem.accumulator
    return layer.array("weights", chunks, dtype, layer.sums("weights", chunks, dtype, shares))


def _largest(call: Cut, layer: Layer, top: int) -> tuple[Array, Array]:
    """Return the largest weights of each row and their keys, (..., H, L, top)."""
    largest: dict[Place, Key] = {}
    lengths = lengths_of(call.grid.columns)
    for at in call.grid.row_blocks():
        known, groups = _logsumexp(call, layer, at), call.groups(at)
        seen = [n for group in groups for n in group]
        if call.whole_rows:
            groups = [list(range(len(lengths)))]
        else:  # a row needs `top` keys, whatever it sees
            rest = [n for n, length in enumerate(lengths) if length and n not in set(seen)]
            while sum(lengths[n] for n in seen) < top:
                seen.append(rest.pop(0))
                groups.append([seen[-1]])
        keys = [
            layer.add(("top", *at.where, n), *_weigh(call, at, group, known, top=top))
            for n, group in enumerate(groups)
        ]
        size = rows_in(call.grid, at) * top * 16
        keys = layer.tree(("top", "join", *at.where), keys, size, TopStep(top))
        largest[at.where] = layer.add(("largest", *at.where), TopStep(top), keys)
    chunks = (*call.row_chunks, (top,))
    weights, numbers = (
        {(*where, 0): (operator.itemgetter(n), key) for where, key in largest.items()}
        for n in range(2)
    )
    return (
        layer.array("weights", chunks, call.problem.accumulator, weights),
        layer.array("keys", chunks, "int64", numbers),
    )
