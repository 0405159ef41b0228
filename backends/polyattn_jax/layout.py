"""Layout of the loops: which tiles of the scores each loop over blocks of rows visits.

Static facts about the masks decide which tiles are listed. Masks given as arrays are a
table in the graph, by which a listed tile can still be skipped at run time.
"""

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple

import array_api_compat.numpy as xp
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from polyattn.plugin import Array, Operands, Problem, Span, TileGrid, column_span, combined_mask

__all__ = ["Loop", "block_sizes", "loops", "tiles_to_compute", "visible_tiles"]

# The smallest area of a tile for each head, however many heads there are.
MIN_AREA = 2**12
# All blocks of a loop take as many steps as the one with most work. So the rows are split into
# about this many loops, and few steps visit keys that their rows do not see.
LOOPS = 8
# The most rows and keys of a tile where masks may leave tiles empty: smaller tiles skip more.
MAX_MASKED_SIDE = 512


class Loop(NamedTuple):
    """Blocks of equally many rows, in order, and as many tiles of keys for each to visit."""

    rows: int  # of a tile
    columns: int
    first_rows: tuple[int, ...]  # of each block
    first_keys: tuple[tuple[int, ...], ...]  # of each tile of each block; S stands for no tile

    @property
    def steps(self) -> int:
        """Number of tiles that each block of rows visits."""
        return len(self.first_keys[0])


def masks_tiles(problem: Problem) -> bool:
    """Return whether masks may leave tiles empty that causal and window do not."""
    return problem.mask_spec is not None


def loops(problem: Problem, tile: int) -> list[Loop]:
    """Cut the rows into blocks, and group consecutive blocks that visit about as many tiles."""
    rows, columns = block_sizes(problem, tile)
    blocks = list(Span(0, problem.query_length).split(rows))
    lay_out = _loops_over_tiles if masks_tiles(problem) else _loops_over_spans
    return lay_out(problem, blocks, (rows, columns))


def _loops_over_spans(problem: Problem, blocks: list[Span], size: tuple[int, int]) -> list[Loop]:
    """Visit the keys from the first that a block of rows sees to the last."""
    columns = size[1]
    spans = [column_span(problem, block) for block in blocks]
    result = []
    for group in _grouped(blocks, [span.length for span in spans]):
        steps = max(-(-spans[n].length // columns) for n in group)
        keys = [tuple(spans[n].start + step * columns for step in range(steps)) for n in group]
        result.append(_loop([blocks[n] for n in group], columns, keys))
    return result


def _loops_over_tiles(problem: Problem, blocks: list[Span], size: tuple[int, int]) -> list[Loop]:
    """Visit the tiles that may hold a visible key."""
    columns = size[1]
    keys: list[tuple[int, ...]] = [
        tuple(np.flatnonzero(line) * columns) for line in _possibly_visible(problem, size)
    ]
    groups = _grouped(blocks, [len(firsts) for firsts in keys])
    if len(groups) > 2 * LOOPS:  # neighbours with unlike work would each be compiled separately
        groups = _grouped(blocks, [0] * len(blocks))
    result = []
    for group in groups:
        steps = max(len(keys[n]) for n in group)
        padded = [keys[n] + (problem.key_length,) * (steps - len(keys[n])) for n in group]
        result.append(_loop([blocks[n] for n in group], columns, padded))
    return result


def _loop(blocks: list[Span], columns: int, keys: list[tuple[int, ...]]) -> Loop:
    first_rows = tuple(block.start for block in blocks)
    return Loop(blocks[0].length, columns, first_rows, tuple(keys))


def _grouped(blocks: list[Span], work: list[int]) -> list[list[int]]:
    """Group the numbers of consecutive blocks of equal length and about equal work."""
    coarse = max(1, -(-max(work) // LOOPS))

    def length_and_work(number: int) -> tuple[int, int]:
        return blocks[number].length, -(-work[number] // coarse)

    return [list(group) for _, group in itertools.groupby(range(len(blocks)), length_and_work)]


def _possibly_visible(problem: Problem, size: tuple[int, int]) -> Array:
    """Return which tiles may hold a visible key by static facts, shape (down, across)."""
    specs = Operands(*[None] * 8)._replace(mask=problem.mask_spec)
    mask = combined_mask(problem, specs)
    assert mask is not None
    table = TileGrid(problem, specs, xp, size, np.empty(0), reads=False).of(mask).any_visible
    return np.any(table, axis=tuple(range(table.ndim - 2)))


def visible_tiles(problem: Problem, x: Operands, size: tuple[int, int]) -> Array | None:
    """Return which tiles arrays may leave visible, (down, across); None if no array masks."""
    spec = problem.mask_spec
    if spec is None or not (problem.query_offset is None or spec.carried()):
        return None
    mask = combined_mask(problem, x)
    assert mask is not None

    # XLA would evaluate a constant array when it compiles, which takes minutes for a large one.
    def not_constant(name: str, thing: Any) -> Any:
        return thing if callable(thing) else lax.optimization_barrier(thing)  # type: ignore[no-untyped-call]

    table = TileGrid(problem, x, jnp, size, x.query).of(mask.map(not_constant)).any_visible
    return any_under_vmap(jnp.any(table, axis=range(table.ndim - 2)))


def tiles_to_compute(problem: Problem, loop: Loop, visible: Array | None) -> Array | None:
    """Return which tiles of a loop must be computed, (blocks, steps); None if all must."""
    if not masks_tiles(problem):
        return None
    first_rows, first_keys = np.asarray(loop.first_rows), np.asarray(loop.first_keys)
    listed = first_keys < problem.key_length
    if visible is None:
        return None if listed.all() else listed
    down = first_rows // -(-problem.query_length // visible.shape[0])
    across = np.minimum(first_keys // loop.columns, visible.shape[1] - 1)
    return visible[down[:, None], across] & listed


@jax.custom_batching.custom_vmap
def any_under_vmap(table: Array) -> Array:
    """Return a table unchanged; under vmap, the union of all that are mapped over.

    vmap turns a condition that differs between items into the computation of both branches.
    """
    return table


@any_under_vmap.def_vmap
def _any_under_vmap(size: int, batched: list[bool], table: Array) -> tuple[Array, bool]:
    return any_under_vmap(jnp.any(table, axis=0)), False


def block_sizes(problem: Problem, tile: int) -> tuple[int, int]:
    """Return how many rows and how many keys make a tile: wider where there are few rows."""
    heads = math.prod(problem.batch) * problem.heads
    if problem.similarity_spec is not None and problem.similarity_spec.entrywise:
        tile = max(1, tile // max(1, problem.head_size))
    area = max(tile // heads, min(tile, MIN_AREA))
    if masks_tiles(problem):
        area = min(area, MAX_MASKED_SIDE**2)
    rows = even_size(problem.query_length, math.isqrt(area))
    columns = even_size(problem.key_length, area // rows)
    return even_size(problem.query_length, area // columns), columns


def even_size(length: int, most: int) -> int:
    """Return a size of at most `most` that cuts `length` into few blocks of about equal size."""
    fewest = -(-length // max(1, most))
    # Blocks of exactly one size are one loop to compile, and leave no keys over.
    for blocks in range(fewest, 2 * fewest + 1):
        if blocks and length % blocks == 0:
            return length // blocks
    return -(-length // fewest)
