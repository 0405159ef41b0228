"""Layout of the loops: which tiles of the scores each loop over blocks of rows visits.

Static facts about the masks decide which tiles are listed. Masks given as arrays are a
table in the graph, by which a listed tile can still be skipped at run time. Where the offset is one
number in an array, the tiles of a window follow the position of the rows.
"""

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from polyattn._base.arrays import numpy_namespace
from polyattn.plugin import Array, Operands, Problem, Span, TileGrid, column_span, combined_mask
from polyattn_jax.devices import default_kind

# The most scores of a tile on a CPU: larger tiles do not stay in its cache, and in smaller ones XLA
# uses one thread.
ON_CPU = 2**21
# The smallest area of a tile for each head, however many heads there are.
MIN_AREA = 2**12
# From this area on, XLA computes the product of one head on several threads; those of many heads
# are computed one after the other. It is taken for as many heads as this size of a tile allows.
THREADED_AREA, LARGEST_TILE = 2**17, 2**23
# All blocks of a loop take as many steps as the one with most tiles, and skip what is not theirs.
# A loop has gradients of all keys and values, so there is one, unless its blocks would visit less
# than this part of its steps: then about as many loops as this.
FEWEST_VISITED, LOOPS = 0.5, 8
# The most rows and keys of a tile on a CPU where masks may leave tiles empty: smaller tiles skip
# more. An accelerator takes as long for a tile of so few scores as for a larger one.
MAX_MASKED_SIDE = 512
# The fewest keys of such a tile in a narrow window: a table has an entry for each tile.
MIN_MASKED_SIDE = 128


class Loop(NamedTuple):
    """Blocks of equally many rows, in order, and as many tiles of keys for each to visit."""

    rows: int  # of a tile
    columns: int
    first_rows: tuple[int, ...]  # of each block
    first_keys: tuple[tuple[int, ...], ...]  # of each tile of each block; S stands for no tile
    follows: bool = False  # whether keys are counted from the position of the block's first row

    @property
    def steps(self) -> int:
        """Number of tiles that each block of rows visits."""
        return len(self.first_keys[0])

    @property
    def width(self) -> int:
        """Number of keys that each block of rows visits."""
        return self.steps * self.columns


def masks_tiles(problem: Problem) -> bool:
    """Return whether masks may leave tiles empty that causal and window do not."""
    return problem.mask_spec is not None


def has_one_offset(problem: Problem, x: Operands) -> bool:
    """Return whether an array gives the position of the first row, the same for all items."""
    offset: Any = x.query_offset
    return problem.query_offset is None and math.prod(offset.shape) == 1


def loops(problem: Problem, tile: int, one_offset: bool = False) -> list[Loop]:
    """Cut the rows into blocks, and group consecutive blocks that visit about as many tiles."""
    size = rows, columns = block_sizes(problem, tile, one_offset)
    blocks = list(Span(0, problem.query_length).split(rows))
    window = _two_sided_window(problem) if one_offset else None
    whole = -(-_most_keys(problem, rows, one_offset) // columns) * columns
    follows = window is not None and whole < problem.key_length
    if window is not None and follows:
        keys = [tuple(range(-window[0], whole - window[0], columns))] * len(blocks)
    else:
        find = _by_tiles if masks_tiles(problem) else _by_spans
        keys = find(problem, blocks, size)
    result = []
    for group in _grouped(blocks, [len(firsts) for firsts in keys]):
        steps = max(len(keys[n]) for n in group)
        padded = tuple(keys[n] + (problem.key_length,) * (steps - len(keys[n])) for n in group)
        first_rows = tuple(blocks[n].start for n in group)
        result.append(Loop(blocks[group[0]].length, columns, first_rows, padded, follows))
    return result


def _two_sided_window(problem: Problem) -> tuple[int, int] | None:
    """Return how far a row sees to either side of its position, if it is bounded on both."""
    band = problem.band
    if band is None or band.left is None or band.right is None:
        return None
    return band.left, band.right


def _most_keys(problem: Problem, rows: int, one_offset: bool) -> int:
    """Return the most keys from the first to the last that some block of rows may see."""
    window = _two_sided_window(problem) if one_offset else None
    if window is not None:
        return min(sum(window) + rows, problem.key_length)
    blocks = Span(0, problem.query_length).split(rows)
    return max(1, *(column_span(problem, block).length for block in blocks))


def _by_spans(problem: Problem, blocks: list[Span], size: tuple[int, int]) -> list[tuple[int, ...]]:
    """Return the tiles from the first key that each block of rows sees to the last."""
    spans = (column_span(problem, block) for block in blocks)
    return [tuple(range(span.start, span.start + span.length, size[1])) for span in spans]


def _by_tiles(problem: Problem, blocks: list[Span], size: tuple[int, int]) -> list[tuple[int, ...]]:
    """Return the tiles that may hold a key that a block of rows sees."""
    table = _possibly_visible(problem, size)
    return [tuple(np.flatnonzero(line) * size[1]) for line in table]


def _grouped(blocks: list[Span], work: list[int]) -> list[list[int]]:
    """Group the numbers of consecutive blocks of equal length, if need be by equal work too."""

    def groups(work: list[int]) -> list[list[int]]:
        alike = [(block.length, share) for block, share in zip(blocks, work, strict=True)]
        return [
            list(group) for _, group in itertools.groupby(range(len(blocks)), alike.__getitem__)
        ]

    by_length, most = groups([0] * len(blocks)), max(work)
    if sum(work) >= FEWEST_VISITED * most * len(blocks):
        return by_length
    coarse = -(-most // LOOPS)
    by_work = groups([-(-share // coarse) for share in work])
    # Neighbours with different work would each be compiled separately.
    return by_work if len(by_work) <= 2 * LOOPS else by_length


def _possibly_visible(problem: Problem, size: tuple[int, int]) -> Array:
    """Return which tiles may hold a visible key by static facts, shape (down, across)."""
    specs = Operands.of_options(mask=problem.mask_spec)
    mask: Any = combined_mask(problem, specs)
    grid = TileGrid(problem, specs, numpy_namespace(), size, np.empty(0), reads=False)
    table = grid.of(mask).any_visible
    return np.any(table, axis=tuple(range(table.ndim - 2)))


def visible_tiles(problem: Problem, x: Operands, size: tuple[int, int]) -> Array | None:
    """Return which tiles arrays may leave visible, (down, across); None if no array masks."""
    spec = problem.mask_spec
    if spec is None or not (problem.query_offset is None or spec.carried()):
        return None
    mask: Any = combined_mask(problem, x)

    # XLA would evaluate a constant array when it compiles, which takes minutes for a large one.
    def not_constant(name: str, thing: Any) -> Any:
        return thing if callable(thing) else lax.optimization_barrier(thing)  # type: ignore[no-untyped-call]

    table = TileGrid(problem, x, jnp, size, x.query).of(mask.map(not_constant)).any_visible
    return any_under_vmap(jnp.any(table, axis=range(table.ndim - 2)))


def tiles_to_compute(problem: Problem, loop: Loop, visible: Array | None) -> Array | None:
    """Return which tiles of a loop must be computed, (blocks, steps); None if all must."""
    # As integers even if no tile is listed: an empty array would be of floats.
    first_rows, first_keys = np.asarray(loop.first_rows), np.asarray(loop.first_keys, int)
    listed = first_keys < problem.key_length
    if visible is None:
        return None if listed.all() else listed
    down = first_rows // -(-problem.query_length // visible.shape[0])
    across = np.minimum(first_keys // loop.columns, visible.shape[1] - 1)
    return visible[down[:, None], across] & listed


@jax.custom_batching.custom_vmap
def any_under_vmap(table: Array) -> Array:
    """Return a table unchanged; under vmap, the union of all that are mapped over."""
    # vmap turns a condition that differs between items into the computation of both branches.
    return table


@any_under_vmap.def_vmap
def _any_under_vmap(size: int, batched: list[bool], table: Array) -> tuple[Array, bool]:
    return any_under_vmap(jnp.any(table, axis=0)), False


def is_on_cpu(problem: Problem) -> bool:
    """Return whether a call is computed on a CPU, also where JAX has not chosen its device."""
    return (problem.device_kind or default_kind()) == "cpu"


def most_scores(problem: Problem, tile: int) -> int:
    """Return the most scores of a tile, which are fewer on a CPU."""
    return min(tile, ON_CPU) if is_on_cpu(problem) else tile


def block_sizes(problem: Problem, tile: int, one_offset: bool = False) -> tuple[int, int]:
    """Return how many rows and how many keys make a tile: wider where there are few rows."""
    heads = math.prod(problem.batch) * problem.heads
    if problem.similarity_spec is not None and problem.similarity_spec.entrywise:
        tile = max(1, tile // max(1, problem.head_size))
    area = max(tile // heads, min(tile, MIN_AREA), min(tile, THREADED_AREA, LARGEST_TILE // heads))
    if masks_tiles(problem) and is_on_cpu(problem):
        area = min(area, MAX_MASKED_SIDE**2)
    rows = even_size(problem.query_length, math.isqrt(area))
    most = _most_keys(problem, rows, one_offset)
    if most < problem.key_length:
        most = max(most, MIN_MASKED_SIDE) if masks_tiles(problem) else most
        return rows, even_size(min(most, problem.key_length), area // rows)
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
