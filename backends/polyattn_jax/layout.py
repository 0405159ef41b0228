"""Which tiles of the scores are gone over, in which loops.

What is known of the masks before any array is, decides which tiles are listed. What arrays hide is
a table in the graph, by which a listed tile may still be passed over when it is computed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import array_api_compat.numpy as xp
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from polyattn.plugin import Array, Operands, Problem, Span, TileGrid, column_span, combined_mask

__all__ = ["Loop", "block_sizes", "loops", "seen_tiles", "wanted"]

# No less than this for each head, however many heads there are.
SMALLEST = 2**12
# Rows of a loop take as many steps as the one among them that takes most; into so many loops the
# rows are split, so that few steps go over keys that a row does not see.
LOOPS = 8
# Most rows and keys of a tile where a mask may leave some empty: of finer tiles more are.
FINE = 512


class Loop(NamedTuple):
    """Blocks of as many rows, in order, and the blocks of keys that each goes over.

    Attributes
    ----------
    rows, columns : int
        Of a tile.
    first_rows : tuple of int
        Of each block of rows, its first row.
    first_keys : tuple of tuple of int
        And the first key of each of its tiles, as many for each; S stands for none.
    """

    rows: int
    columns: int
    first_rows: tuple[int, ...]
    first_keys: tuple[tuple[int, ...], ...]

    @property
    def steps(self) -> int:
        """How many tiles each block of rows goes over."""
        return len(self.first_keys[0])

    @property
    def first_columns(self) -> tuple[int, ...]:
        """The first key that each block of rows goes over."""
        return tuple(keys[0] for keys in self.first_keys)


def by_table(problem: Problem) -> bool:
    """Whether masks may leave tiles empty that position alone does not tell of."""
    return problem.mask_spec is not None


def loops(problem: Problem, tile: int) -> list[Loop]:
    """Cut the rows into blocks, and put those together that take about as many steps."""
    rows, columns = block_sizes(problem, tile)
    blocks = list(Span(0, problem.query_length).split(rows))
    lists = _listed if by_table(problem) else _spanned
    return lists(problem, blocks, (rows, columns))


def _spanned(problem: Problem, blocks: list[Span], size: tuple[int, int]) -> list[Loop]:
    """Go from the first key that a block of rows sees to the last."""
    columns = size[1]
    spans = [column_span(problem, block) for block in blocks]
    found = []
    for some in _alike(blocks, [span.length for span in spans]):
        steps = max(-(-spans[n].length // columns) for n in some)
        keys = [tuple(spans[n].start + step * columns for step in range(steps)) for n in some]
        found.append(_loop([blocks[n] for n in some], columns, keys))
    return found


def _listed(problem: Problem, blocks: list[Span], size: tuple[int, int]) -> list[Loop]:
    """Go over the tiles that may not be empty."""
    columns = size[1]
    keys: list[tuple[int, ...]] = [
        tuple(np.flatnonzero(line) * columns) for line in _may_be_seen(problem, size)
    ]
    groups = list(_alike(blocks, [len(some) for some in keys]))
    if len(groups) > 2 * LOOPS:  # where blocks take turns, each would be compiled by itself
        groups = list(_alike(blocks, [0] * len(blocks)))
    found = []
    for some in groups:
        steps = max(len(keys[n]) for n in some)
        padded = [keys[n] + (problem.key_length,) * (steps - len(keys[n])) for n in some]
        found.append(_loop([blocks[n] for n in some], columns, padded))
    return found


def _loop(blocks: list[Span], columns: int, keys: list[tuple[int, ...]]) -> Loop:
    firsts = tuple(block.start for block in blocks)
    return Loop(blocks[0].length, columns, firsts, tuple(keys))


def _alike(blocks: list[Span], work: list[int]) -> Iterator[list[int]]:
    """Yield the numbers of blocks that follow one another, as long, and with about as much work."""
    coarse = max(1, -(-max(work) // LOOPS))

    def alike(number: int) -> tuple[int, int]:
        return blocks[number].length, -(-work[number] // coarse)

    for _, some in itertools.groupby(range(len(blocks)), key=alike):
        yield list(some)


def _may_be_seen(problem: Problem, size: tuple[int, int]) -> Array:
    """Return which tiles are not surely empty, by static facts, shape (down, across)."""
    facts = Operands(*[None] * 8)._replace(mask=problem.mask_spec)
    mask = combined_mask(problem, facts)
    assert mask is not None
    some = TileGrid(problem, facts, xp, size, np.empty(0), reads=False).of(mask).any_visible
    return np.any(some, axis=tuple(range(some.ndim - 2)))


def seen_tiles(problem: Problem, x: Operands, size: tuple[int, int]) -> Array | None:
    """Return which tiles may hold a key that is seen, by what arrays say too: (down, across).

    None where arrays say nothing.
    """
    form = problem.mask_spec
    if form is None or not (problem.query_offset is None or form.carried()):
        return None
    mask = combined_mask(problem, x)
    assert mask is not None

    # XLA would look at an array that it knows when it compiles, for minutes if it is a large one.
    def unknown(name: str, thing: Any) -> Any:
        return thing if callable(thing) else lax.optimization_barrier(thing)  # type: ignore[no-untyped-call]

    mask = mask.map(unknown)
    some = TileGrid(problem, x, jnp, size, x.query).of(mask).any_visible
    return of_all(jnp.any(some, axis=range(some.ndim - 2)))


def wanted(problem: Problem, loop: Loop, seen: Array | None) -> Array | None:
    """Return which tiles of a loop are to be computed, (blocks, steps), or None where all are."""
    if not by_table(problem):
        return None
    first_rows, first_keys = np.asarray(loop.first_rows), np.asarray(loop.first_keys)
    listed = first_keys < problem.key_length
    if seen is None:
        return None if listed.all() else listed
    down = first_rows // -(-problem.query_length // seen.shape[0])
    across = np.minimum(first_keys // loop.columns, seen.shape[1] - 1)
    return seen[down[:, None], across] & listed


@jax.custom_batching.custom_vmap
def of_all(table: Array) -> Array:
    """Return a table as it is; under vmap, one for all that are mapped over.

    A condition that differed from one to the next would become a choice between two results.
    """
    return table


@of_all.def_vmap
def _of_all(size: int, batched: list[bool], table: Array) -> tuple[Array, bool]:
    return of_all(jnp.any(table, axis=0)), False


def block_sizes(problem: Problem, tile: int) -> tuple[int, int]:
    """Return how many rows and how many keys make a tile, wide where rows are few."""
    heads = math.prod(problem.batch) * problem.heads
    if problem.similarity_spec is not None and problem.similarity_spec.entrywise:
        tile = max(1, tile // max(1, problem.head_size))
    area = max(tile // heads, min(tile, SMALLEST))
    if by_table(problem):
        area = min(area, FINE**2)
    rows = even(problem.query_length, math.isqrt(area))
    columns = even(problem.key_length, area // rows)
    return even(problem.query_length, area // columns), columns


def even(length: int, most: int) -> int:
    """Return a size of at most `most` that cuts `length` into as few blocks, and about equal."""
    blocks = -(-length // max(1, most))
    return -(-length // blocks)
