"""What a call would do, from shapes and chunks only: for `explain`."""

from __future__ import annotations

from typing import Any

from dask.utils import format_bytes

from polyattn.plugin import Operands, Problem
from polyattn_dask.grid import Grid, axes_of, chunks_like, grid_of
from polyattn_dask.sizes import Extra, grouped, key_bytes, partial_bytes, query_bytes, widths
from polyattn_dask.visibility import Visibility

__all__ = ["estimate"]

#: The arguments whose arrays are worth a word if they are cut otherwise.
CUT = ("query", "key", "value", "mask", "bias", "score_mod")


def estimate(problem: Problem) -> str | None:
    """Return pairs of chunks, tasks, the bytes of the largest one, and what is rechunked."""
    chunks = dict(problem.chunks)
    if not {"query", "key", "value"} <= chunks.keys():
        return None
    grid = grid_of(problem, chunks)
    x: Any = Operands(None, None, None, problem.mask_spec, None, None, None, None)
    seen, extras = Visibility(problem, x, grid), _extras(problem)
    whole_rows = problem.normalizer is not None or problem.score_norm is not None
    pairs = tasks = largest = blocks = 0
    for at in grid.row_blocks():
        sizes = key_bytes(problem, grid, at, extras)
        groups = grouped(seen.of(at), sizes, whole_rows)
        partial = partial_bytes(problem, grid, at)
        held = max((sum([sizes[n] for n in group]) for group in groups), default=0)
        largest = max(largest, held + query_bytes(problem, grid, at) + 2 * partial)
        joins = sum(widths(len(groups), partial)[1]) + 1 if len(groups) > 1 else 0
        pairs, blocks = pairs + sum(map(len, groups)), blocks + 1
        tasks += max(1, len(groups)) + joins
    if "logsumexp" in problem.features:
        tasks += 2 * blocks
    most = "at most " if _may_read(problem) else ""
    return (
        f"{most}{pairs:,} of {blocks * len(grid.columns):,} pairs of chunks, {tasks:,} tasks of up"
        f" to {format_bytes(largest)}, {_rechunked(problem, grid)}"
    )


def _may_read(problem: Problem) -> bool:
    """Return whether an array may hide keys that the graph leaves out: all but those of dask."""
    hiding = {"mask"} if problem.mask is not None else set()
    if problem.mask_spec is not None:
        hiding |= {f"mask.{name}" for name, _ in problem.mask_spec.carried()}
    if problem.query_offset is None:
        hiding.add("query_offset")
    return not hiding <= dict(problem.chunks).keys()


def _extras(problem: Problem) -> list[Extra]:
    """Return the arrays among the options that follow the keys."""
    given = [("mask", problem.mask, "bool"), ("bias", problem.bias, problem.bias_dtype or "")]
    for name, value in (("mask", problem.mask_spec), ("score_mod", problem.score_spec)):
        carried = [] if value is None else value.carried()
        given += [(f"{name}.{f}", x.shape, x.dtype) for f, x in carried if hasattr(x, "shape")]
    return [
        Extra(axes_of(name, shape, problem), shape, dtype)
        for name, shape, dtype in given
        if shape is not None
    ]


def _rechunked(problem: Problem, grid: Grid) -> str:
    """Return a clause that names the arrays that are cut otherwise than the grid."""
    names = []
    for name, chunks in problem.chunks:
        if name.partition(".")[0] not in CUT:
            continue
        shape = tuple(map(sum, chunks))
        if chunks_like(grid, axes_of(name, shape, problem), shape) != chunks:
            names.append(name)
    return f"after a rechunk of {', '.join(names)}" if names else "no rechunk"
