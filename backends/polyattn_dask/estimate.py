"""Estimate a call from shapes and chunks only, for `explain`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from dask.utils import format_bytes

from polyattn.plugin import Operands, Problem
from polyattn_dask.chunk_visibility import ChunkVisibility
from polyattn_dask.grid import Grid, axes_along, axes_of, chunks_like, grid_of
from polyattn_dask.sizes import (
    OptionArray,
    bytes_of_a_key,
    count_groups,
    grouped,
    needs_whole_rows,
    partial_bytes,
    query_bytes,
    widths,
)

#: With more pairs of chunks to look at, masks are not asked: about a second.
MOST_LOOKS = 100_000
#: Tokens of which one chunk is worth a hint: nothing is skipped or computed in parts.
LONG = 1024
#: The arguments whose rechunk is reported.
CUT = ("query", "key", "value", "mask", "bias", "score_mod")


class _Facts(NamedTuple):
    shape: tuple[int, ...]
    dtype: str


def estimate(problem: Problem) -> str | None:
    """Return a clause: pairs of chunks, tasks, bytes of the largest task, rechunked arrays."""
    chunks = dict(problem.chunks)
    if not {"query", "key", "value"} <= chunks.keys():
        return None
    grid = grid_of(problem, chunks)
    x = Operands.of_options(mask=problem.mask_spec)
    visible, arrays = ChunkVisibility(problem, x, grid, MOST_LOOKS), _option_arrays(problem)
    pairs = tasks = largest = blocks = 0
    for at in grid.row_blocks():
        each = bytes_of_a_key(problem, grid, at, arrays)
        seen, count, keys = _groups(problem, grid, visible.of(at), each)
        partial = partial_bytes(problem, grid, at)
        largest = max(largest, keys * each + query_bytes(problem, grid, at) + 2 * partial)
        joins = sum(widths(count, partial)[1]) + 1 if count > 1 else 0
        pairs, blocks = pairs + seen, blocks + 1
        tasks += max(1, count) + joins
    if "logsumexp" in problem.features:
        tasks += 2 * blocks
    whole = blocks == len(grid.columns) == 1 and grid.columns[0].length >= LONG
    hint = "; the tokens are one chunk: cut them, as in x.rechunk({-2: 512})" if whole else ""
    most = "at most " if _may_read(problem) or not visible.is_exact else ""
    return (
        f"{most}{pairs:,} of {blocks * len(grid.columns):,} pairs of chunks, {tasks:,} tasks of up"
        f" to {format_bytes(largest)}, {_rechunked(problem, grid)}{hint}"
    )


def _groups(problem: Problem, grid: Grid, seen: Sequence[int], each: int) -> tuple[int, int, int]:
    """Return how many chunks and groups a block has, and the keys of its largest group."""
    whole_rows = needs_whole_rows(problem)
    if isinstance(seen, range):
        return len(seen), *count_groups(grid.columns, seen, each, whole_rows)
    groups = grouped(grid.columns, seen, each, whole_rows)
    keys = max((sum([grid.columns[n].length for n in group]) for group in groups), default=0)
    return sum(map(len, groups)), len(groups), keys


def _may_read(problem: Problem) -> bool:
    """Return whether an array may hide keys that the graph leaves out: all but those of dask."""
    hiding = {"mask"} if problem.mask is not None else set()
    if problem.mask_spec is not None:
        hiding |= {f"mask.{name}" for name, _ in problem.mask_spec.carried()}
    if problem.query_offset is None:
        hiding.add("query_offset")
    return not hiding <= dict(problem.chunks).keys()


def _carried(problem: Problem) -> list[OptionArray]:
    """Return the facts of each array in an expression, by the names of both."""
    arrays = []
    for option, value in (("mask", problem.mask_spec), ("score_mod", problem.score_spec)):
        if value is not None:
            names = [name for name, thing in value.carried() if hasattr(thing, "shape")]
            arrays += [
                OptionArray(f"{option}.{name}", axes_along(last, facts.shape, problem), facts)
                for name, (last, facts) in zip(names, value.arrays(), strict=True)
            ]
    return arrays


def _option_arrays(problem: Problem) -> list[OptionArray]:
    """Return the facts of the arrays among the options that follow the keys."""
    given = [("mask", problem.mask, "bool"), ("bias", problem.bias, problem.bias_dtype or "")]
    return _carried(problem) + [
        OptionArray(name, axes_of(name, shape, problem), _Facts(shape, dtype))
        for name, shape, dtype in given
        if shape is not None
    ]


def _rechunked(problem: Problem, grid: Grid) -> str:
    """Return a clause that names the arrays that are rechunked to the grid."""
    names, carried = [], {x.option: x.axes for x in _carried(problem)}
    for name, chunks in problem.chunks:
        if name.partition(".")[0] not in CUT:
            continue
        shape = tuple(map(sum, chunks))
        axes = carried[name] if name in carried else axes_of(name, shape, problem)
        if chunks_like(grid, axes, shape) != chunks:
            names.append(name)
    return f"after a rechunk of {', '.join(names)}" if names else "no rechunk"
