"""Attention for XLA to compile: tiles of scores in a loop, so that memory is for one of them.

The loops are `lax.map` over blocks of rows and, inside, `lax.scan` over blocks of keys. Both bodies
are checkpointed: a gradient keeps the state between tiles and computes scores again, so that its
memory grows with L and S and never with L·S. All of it is traced, so `jit`, `vmap`, `grad` and
their like pass through, and a call outside of them is compiled once for each problem.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from polyattn.plugin import FEATURES, Array, Backend, Kernel, Operands, Problem, Span, column_span
from polyattn_jax.tile import At, Running, add_tile, finish, scaled, start

__all__ = ["FURTHEST", "Xla"]

# No less than this for each head, however many heads there are.
SMALLEST = 2**12
# Rows of a loop take as many steps as the one among them that takes most; into so many loops the
# rows are split, so that few steps go over keys that a row does not see.
LOOPS = 8
# Query offsets beyond this could leave int32 when a window is added to them.
FURTHEST = 2**29


class Xla(Kernel):
    """Tiles of the scores in a loop that XLA compiles."""

    name = "xla"
    features = frozenset(FEATURES) - {
        "dropout",
        "mask_value",
        "normalizer",
        "score_norm",
        "score_value",
        "similarity",
    }
    tile = 2**21

    def reasons_against(self, problem: Problem) -> list[str]:
        """Return why the tiles of a problem cannot be laid out."""
        if not all(isinstance(length, int) for length in problem.scores):
            return ["it lays out tiles by lengths, and these are symbols"]
        return []

    def only_on_request(self, problem: Problem) -> str | None:
        """What a function says is not kept, for it may mean something else at its next call."""
        rules = problem.features & {"mask_mod", "score_mod"}
        if rules and not problem.traced:
            return "outside of jax.jit it would be compiled anew at each call with a function"
        return None

    def __call__(
        self, problem: Problem, operands: Operands, backend: Backend
    ) -> tuple[Array, Array | None]:
        """Return the output, and the logsumexp if the problem asks for it."""
        problem, operands = one_form_of_offset(problem, operands, self.tile)
        if callable(operands.mask) or callable(operands.score_mod):
            return attend(problem, self.tile, operands)
        return compiled(problem, self.tile, operands)


class Loop(NamedTuple):
    """Blocks of as many rows, in order, and how many steps over blocks of keys they take.

    Attributes
    ----------
    rows, columns : int
        Of a tile.
    first_rows, first_columns : tuple of int
        Of each block of rows, its first row and the first key that it sees.
    steps : int
        How many blocks of keys.
    """

    rows: int
    columns: int
    first_rows: tuple[int, ...]
    first_columns: tuple[int, ...]
    steps: int


def loops(problem: Problem, tile: int) -> Iterator[Loop]:
    """Cut the rows into blocks, and yield those together that take about as many steps."""
    rows, columns = block_sizes(problem, tile)
    spans = [
        (block, column_span(problem, block)) for block in Span(0, problem.query_length).split(rows)
    ]
    coarse = max(1, -(-max(span.length for _, span in spans) // LOOPS))

    def alike(pair: tuple[Span, Span]) -> tuple[int, int]:
        return pair[0].length, -(-pair[1].length // coarse)

    for (length, _), some in itertools.groupby(spans, key=alike):
        blocks, seen = zip(*some, strict=True)
        yield Loop(
            length,
            columns,
            tuple(block.start for block in blocks),
            tuple(span.start for span in seen),
            max(-(-span.length // columns) for span in seen),
        )


def one_form_of_offset(problem: Problem, x: Operands, tile: int) -> tuple[Problem, Operands]:
    """Return a call that is compiled once for all offsets, where nothing is skipped by it."""
    offset = problem.query_offset
    if offset is None:
        return problem, x
    tiles = math.prod(problem.scores) > tile
    if tiles or not problem.masks_by_position or abs(offset) > FURTHEST:
        return problem, x._replace(query_offset=None)
    array = jax.device_put(np.full((1, 1, 1), offset, np.int32))
    return problem._replace(query_offset=None), x._replace(query_offset=array)


def block_sizes(problem: Problem, tile: int) -> tuple[int, int]:
    """Return how many rows and how many keys make a tile, wide where rows are few."""
    heads = math.prod(problem.batch) * problem.heads
    area = max(tile // heads, min(tile, SMALLEST))
    rows = even(problem.query_length, math.isqrt(area))
    columns = even(problem.key_length, area // rows)
    return even(problem.query_length, area // columns), columns


def even(length: int, most: int) -> int:
    """Return a size of at most `most` that cuts `length` into as few blocks, and about equal."""
    blocks = -(-length // max(1, most))
    return -(-length // blocks)


def attend(problem: Problem, tile: int, x: Operands) -> tuple[Array, Array | None]:
    """Compute attention in tiles of at most so many scores, or few more."""
    if 0 in problem.scores:
        return finish(problem, start(problem, x, problem.query_length), x.query.dtype)
    outputs, logsumexps = zip(
        *(attend_blocks(problem, x, loop) for loop in loops(problem, tile)), strict=True
    )
    logsumexp = None if logsumexps[0] is None else jnp.concatenate(logsumexps, axis=-1)
    return jnp.concatenate(outputs, axis=-2), logsumexp


compiled: Callable[..., tuple[Array, Array | None]] = jax.jit(attend, static_argnums=(0, 1))


def attend_blocks(problem: Problem, x: Operands, loop: Loop) -> tuple[Array, Array | None]:
    """Return the rows of a loop's blocks, one after the other."""
    # Of its own rows alone: the gradient of each loop is as large as what it is given.
    rows = Span(loop.first_rows[0], loop.first_rows[-1] + loop.rows)
    queries = lax.slice_in_dim(x.query, *rows, axis=-2)
    # Where the last block of keys would end beyond them it begins earlier, and says what is new.
    last = problem.key_length - loop.columns
    overlaps = max(loop.first_columns) + loop.columns * loop.steps > problem.key_length

    def attend_block(firsts: tuple[Array, Array]) -> tuple[Array, Array | None]:
        first_row, first_column = firsts
        query = lax.dynamic_slice_in_dim(queries, first_row - rows.start, loop.rows, axis=-2)
        query = scaled(problem, query)

        def step(running: Running, number: Array) -> tuple[Running, None]:
            new = first_column + number * loop.columns
            first = jnp.minimum(new, last) if overlaps else new
            at = At(problem, x, first_row, loop.rows, first, loop.columns)
            key, value = (
                lax.dynamic_slice_in_dim(array, first, loop.columns, axis=-2)
                for array in (x.key, x.value)
            )
            tile = (query, key, value)
            return add_tile(problem, x, running, tile, at, new if overlaps else None), None

        running = start(problem, x, loop.rows)
        if loop.steps == 1:
            running, _ = step(running, 0)
        elif loop.steps > 1:
            body = jax.checkpoint(step, prevent_cse=False)
            running, _ = lax.scan(body, running, jnp.arange(loop.steps))
        return finish(problem, running, x.query.dtype)

    if len(loop.first_rows) == 1:
        return attend_block((loop.first_rows[0], loop.first_columns[0]))
    firsts = jnp.asarray(loop.first_rows), jnp.asarray(loop.first_columns)
    output, logsumexp = lax.map(jax.checkpoint(attend_block, prevent_cse=False), firsts)
    output = jnp.moveaxis(output, 0, -3)
    output = output.reshape(*output.shape[:-3], -1, output.shape[-1])
    if logsumexp is not None:
        logsumexp = jnp.moveaxis(logsumexp, 0, -2)
        logsumexp = logsumexp.reshape(*logsumexp.shape[:-2], -1)
    return output, logsumexp
