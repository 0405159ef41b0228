"""The loops over tiles of the scores, which attention and its tangent share.

A `LoopBody` computes; `over_tiles` decides which tiles it gets::

    for rows in blocks of rows:                                # lax.map
        block, state = body.start(rows, count)
        for tile in tiles of keys:                             # lax.scan
            if the tile is needed:                             # lax.cond
                state = body.add(state, block, tile)
        results = body.finish(state, block)

`loop_layout` lists the first key of each tile of a block. Blocks of a loop visit equally many, so
S stands for no tile. Two causal blocks and tiles of 8 keys, of S = 16::

    block of rows 0-7     # .     first_keys (0, 16)
    block of rows 8-15    # #     first_keys (0, 8)
"""

from __future__ import annotations

import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from polyattn.plugin import Array, Operands, Problem
from polyattn_jax.loop_layout import (
    Loop,
    block_sizes,
    has_one_offset,
    loops,
    tiles_to_compute,
    visible_tiles,
)
from polyattn_jax.mesh import varying_like
from polyattn_jax.tile import TileIndices

Rows = dict[str, Array]


class TileArrays(NamedTuple):
    """The arrays and indices that make a tile of scores."""

    indices: TileIndices
    key: Array
    value: Array
    new: Array | None  # its first key that no earlier tile holds; None if all are new
    slices: Any  # what `LoopBody.slices` gave for the tile


class LoopBody:
    """The computation for a block of rows; an array of rows has the shape (..., rows, n)."""

    #: Whether gradients are taken of it: then no tile keeps what it computes from its arrays.
    is_differentiated = False

    def start(self, rows: Rows, count: int) -> tuple[Any, Any]:
        """Return what all tiles of a block use, and its state before the first tile."""
        raise NotImplementedError

    def slices(self, rows: Rows, first: Array, columns: int) -> Any:
        """Return arrays whose entry n is for the tile of keys from ``first[n]`` on."""
        return ()

    def add(self, state: Any, block: Any, tile: TileArrays) -> Any:
        """Return the state with a tile added."""
        raise NotImplementedError

    def finish(self, state: Any, block: Any) -> tuple[Array, ...]:
        """Return the results of the rows."""
        raise NotImplementedError


def over_tiles(
    problem: Problem, tile: int, x: Operands, body: LoopBody, rows: Rows, differentiated: Rows
) -> tuple[Array, ...]:
    """Return the results for all rows, in tiles of about `tile` scores at most.

    The body gets blocks of the arrays in `rows` and `differentiated`, each (..., L, n); the linear
    transpose has gradients of the latter.
    """
    if 0 in problem.scores:
        block, state = body.start(rows | differentiated, problem.query_length)
        return body.finish(state, block)
    one_offset = has_one_offset(problem, x)
    laid_out = loops(problem, tile, one_offset)
    visible = None
    if not laid_out[0].follows:
        visible = visible_tiles(problem, x, block_sizes(problem, tile, one_offset))
    lengths = [len(loop.first_rows) * loop.rows for loop in laid_out]
    # In one operation: the gradient of one part by itself would be as large as the array.
    parts = {
        name: lax.split(array, lengths, axis=array.ndim - 2)
        for name, array in differentiated.items()
    }
    results = []
    for number, loop in enumerate(laid_out):
        own = {name: part[number] for name, part in parts.items()}
        is_needed = tiles_to_compute(problem, loop, visible)
        results.append(_over_blocks(problem, x, loop, body, rows, own, is_needed))
    if len(results) == 1:
        return results[0]
    return tuple(jnp.concatenate(arrays, axis=-2) for arrays in zip(*results, strict=True))


def _over_blocks(
    problem: Problem,
    x: Operands,
    loop: Loop,
    body: LoopBody,
    rows: Rows,
    differentiated: Rows,
    is_needed: Array | None,
) -> tuple[Array, ...]:
    """Return the results for the rows of a loop, in order; `differentiated` has only these rows."""
    last = problem.key_length - loop.columns
    firsts = () if loop.follows else itertools.chain(*loop.first_keys)
    overlaps = any(last < key < problem.key_length for key in firsts)

    def of_block(block: tuple[Any, Any, Any, Rows]) -> tuple[Array, ...]:
        first_row, new, is_needed, given = block
        for name, array in rows.items():
            given[name] = lax.dynamic_slice_in_dim(array, first_row, loop.rows, axis=-2)
        if loop.follows:
            # All tiles of the block are shifted together to where they are within the keys.
            at = TileIndices(problem, x, first_row, loop.rows, 0, loop.columns).position()
            start = jnp.clip(at.reshape(-1)[0] + new[0], 0, problem.key_length - loop.width)
            new = start + (new - new[0])
        # A tile that would end beyond the last key begins earlier; its keys before `new` are not
        # new.
        first = jnp.minimum(new, last)
        slices = body.slices(given, first, loop.columns)
        tiles = (first, new if overlaps else None, is_needed, slices)
        block, state = body.start(given, loop.rows)
        state = varying_like(state, (x, given))
        step = functools.partial(_visit, problem, x, loop, body, first_row, block)
        if loop.steps == 1:
            state, _ = step(state, jax.tree.map(lambda array: array[0], tiles))
        elif loop.steps > 1:
            state, _ = lax.scan(_rematerialised(body, step), state, tiles)
        return body.finish(state, block)

    count = len(loop.first_rows)
    in_blocks = {name: _in_blocks(array, count) for name, array in differentiated.items()}
    blocks = np.asarray(loop.first_rows), np.asarray(loop.first_keys, int), is_needed, in_blocks
    if count == 1:
        return of_block(jax.tree.map(lambda array: array[0], blocks))
    return tuple(map(_joined, lax.map(_rematerialised(body, of_block), blocks)))


def _visit(
    problem: Problem, x: Operands, loop: Loop, body: LoopBody, first_row: Any, block: Any,
    state: Any, tile: tuple[Any, Any, Any, Any],
) -> tuple[Any, None]:  # fmt: skip
    """Add one tile of keys to the state of a block of rows, if it is needed."""
    first, new, is_needed, slices = tile
    indices = TileIndices(problem, x, first_row, loop.rows, first, loop.columns)
    key, value = (
        lax.dynamic_slice_in_dim(array, first, loop.columns, axis=-2) for array in (x.key, x.value)
    )
    if is_needed is None:
        return body.add(state, block, TileArrays(indices, key, value, new, slices)), None
    # A gradient keeps the inputs of one branch for both branches. So a branch is given only
    # what it needs, and no whole array.
    indices = indices.with_cut_operands()

    def add(state: Any) -> Any:
        return body.add(state, block, TileArrays(indices, key, value, new, slices))

    return lax.cond(is_needed, _rematerialised(body, add), lambda state: state, state), None


def _rematerialised(body: LoopBody, function: Any) -> Any:
    """Return a function that a gradient rematerialises, so that memory is for one tile."""
    return jax.checkpoint(function, prevent_cse=False) if body.is_differentiated else function


def _in_blocks(array: Array, count: int) -> Array:
    """Turn (..., count · rows, n) into (count, ..., rows, n)."""
    shape = (*array.shape[:-2], count, array.shape[-2] // count, array.shape[-1])
    return jnp.moveaxis(array.reshape(shape), -3, 0)


def _joined(array: Array) -> Array:
    """Turn (count, ..., rows, n) into (..., count · rows, n)."""
    array = jnp.moveaxis(array, 0, -3)
    return array.reshape(*array.shape[:-3], -1, array.shape[-1])
