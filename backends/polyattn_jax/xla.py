"""Kernel for XLA to compile: a loop over tiles of the scores, which needs memory for one of them.

The loops are `lax.map` over blocks of rows and, inside, `lax.scan` over tiles of keys. Both bodies
are checkpointed: a gradient keeps the state between tiles and computes scores again, so its memory
grows with L and S and not with L·S. All of it can be traced by `jit`, `vmap`, `grad` and the other
transforms; a call outside of them is compiled once for each problem.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from polyattn.plugin import (
    Array,
    Backend,
    Kernel,
    Operands,
    Problem,
    SoftmaxState,
    Span,
    initial_state,
    normalize,
)
from polyattn_jax.layout import Loop, block_sizes, loops, tiles_to_compute, visible_tiles
from polyattn_jax.mesh import varying_like
from polyattn_jax.tile import TileIndices, add_tile, scaled_query

__all__ = ["Xla"]

# Operands that may be expressions, and the field of the problem that holds the spec of each.
SPECS = {"mask": "mask_spec", "score_mod": "score_spec", "similarity": "similarity_spec"}
# Larger query offsets could overflow int32 when a window is added to them.
OFFSET_LIMIT = 2**29


class Xla(Kernel):
    """A loop over tiles of the scores, compiled by XLA."""

    name = "xla"
    # Without normalizers and norms of scores, which need a whole row at once.
    features = frozenset({
        "batch_broadcast", "bias", "causal", "dropout", "grouped_heads", "logsumexp", "mask",
        "mask_expression", "mask_mod", "query_offset", "query_offset_array", "scale",
        "score_expression", "score_mod", "similarity", "sinks", "softcap", "value_size", "window",
    })  # fmt: skip
    tile = 2**21

    def reasons_against(self, problem: Problem) -> list[str]:
        """Return why the loops of a problem cannot be laid out."""
        if not all(isinstance(length, int) for length in problem.scores):
            return ["it lays out tiles by lengths, and these are symbolic"]
        return []

    def only_on_request(self, problem: Problem) -> str | None:
        """Ask for jax.jit where a function masks or scores: it may change between calls."""
        rules = problem.features & {"mask_mod", "score_mod"}
        if rules and not problem.traced:
            return "outside of jax.jit it would compile each call with a function again"
        return None

    def __call__(
        self, problem: Problem, operands: Operands, backend: Backend
    ) -> tuple[Array, Array | None]:
        """Return the output, and the logsumexp if the problem asks for it."""
        if problem.mask_spec is not None:
            # The tables of a mask, which its spec lacks, decide which tiles are visited.
            mask: Any = operands.mask
            problem = problem._replace(mask_spec=problem.mask_spec.filled(mask))
        problem, operands = offset_as_array(problem, operands, self.tile)
        operands = operands._replace(seed=split_seed(operands.seed))
        if problem.features & {"mask_mod", "score_mod"}:
            return attend(problem, self.tile, operands)
        output, logsumexp = compiled(problem, self.tile, without_expressions(problem, operands))
        return output, logsumexp


def offset_as_array(problem: Problem, x: Operands, tile: int) -> tuple[Problem, Operands]:
    """Return a call compiled once for all offsets, if no tile is skipped because of them."""
    offset = problem.query_offset
    if offset is None:
        return problem, x
    tiles = math.prod(problem.scores) > tile
    expressions = problem.mask_spec is not None or problem.score_spec is not None
    if tiles or expressions or not problem.masks_by_position or abs(offset) > OFFSET_LIMIT:
        return problem, x._replace(query_offset=None)
    array = jax.device_put(np.full((1, 1, 1), offset, np.int32))
    return problem._replace(query_offset=None), x._replace(query_offset=array)


def split_seed(seed: int | Array | None) -> Any:
    """Return a seed of 64 bits as two arrays, so that a new seed compiles nothing."""
    if not isinstance(seed, int):
        return seed
    return jax.device_put((np.uint32(seed & 0xFFFFFFFF), np.uint32(seed >> 32)))


def without_expressions(problem: Problem, x: Operands) -> Operands:
    """Return the operands with the arrays that expressions carry in place of the expressions."""
    names = expressions(problem)
    arrays = {name: [array for _, array in getattr(x, name).carried()] for name in names}
    return x._replace(**arrays)  # type: ignore[arg-type]


def with_expressions(problem: Problem, x: Operands) -> Operands:
    """Return the operands with the expressions again."""

    def filled(name: str) -> Any:
        arrays = iter(getattr(x, name))
        return getattr(problem, SPECS[name]).map(lambda *_: next(arrays))

    return x._replace(**{name: filled(name) for name in expressions(problem)})


def expressions(problem: Problem) -> list[str]:
    """Return the names of the operands that are expressions."""
    return [name for name, spec in SPECS.items() if getattr(problem, spec) is not None]


def attend(problem: Problem, tile: int, x: Operands) -> tuple[Array, Array | None]:
    """Compute attention in tiles of about `tile` scores at most."""
    if 0 in problem.scores:
        state = initial_state(problem, x, jnp, Span(0, problem.query_length))
        return normalize(problem, state, x.query.dtype, jnp)
    visible = visible_tiles(problem, x, block_sizes(problem, tile))
    outputs, logsumexps = zip(
        *(
            attend_blocks(problem, x, loop, tiles_to_compute(problem, loop, visible))
            for loop in loops(problem, tile)
        ),
        strict=True,
    )
    logsumexp = None if logsumexps[0] is None else jnp.concatenate(logsumexps, axis=-1)
    return jnp.concatenate(outputs, axis=-2), logsumexp


@functools.partial(jax.jit, static_argnums=(0, 1))
def compiled(problem: Problem, tile: int, x: Operands) -> tuple[Array, Array | None]:
    """Compute attention from operands without expressions, compiled once for each problem."""
    return attend(problem, tile, with_expressions(problem, x))


def attend_blocks(
    problem: Problem, x: Operands, loop: Loop, is_needed: Array | None
) -> tuple[Array, Array | None]:
    """Return the rows of a loop's blocks, in order."""
    # Only the loop's own rows: the gradient of each loop is as large as its inputs.
    rows = Span(loop.first_rows[0], loop.first_rows[-1] + loop.rows)
    queries = lax.slice_in_dim(x.query, *rows, axis=-2)

    def attend_block(block: tuple[Any, Any, Any]) -> tuple[Array, Array | None]:
        first_row, *tiles = block
        query = lax.dynamic_slice_in_dim(queries, first_row - rows.start, loop.rows, axis=-2)
        step = functools.partial(visit, problem, x, loop, first_row, scaled_query(problem, query))
        state = varying_like(initial_state(problem, x, jnp, Span(0, loop.rows)), x)
        if loop.steps == 1:
            state, _ = step(state, jax.tree.map(lambda array: array[0], tuple(tiles)))
        elif loop.steps > 1:
            state, _ = lax.scan(jax.checkpoint(step, prevent_cse=False), state, tuple(tiles))
        return normalize(problem, state, x.query.dtype, jnp)

    blocks = np.asarray(loop.first_rows), np.asarray(loop.first_keys), is_needed
    if len(loop.first_rows) == 1:
        return attend_block(jax.tree.map(lambda array: array[0], blocks))
    output, logsumexp = lax.map(jax.checkpoint(attend_block, prevent_cse=False), blocks)
    output = jnp.moveaxis(output, 0, -3)
    output = output.reshape(*output.shape[:-3], -1, output.shape[-1])
    if logsumexp is not None:
        logsumexp = jnp.moveaxis(logsumexp, 0, -2)
        logsumexp = logsumexp.reshape(*logsumexp.shape[:-2], -1)
    return output, logsumexp


def visit(
    problem: Problem, x: Operands, loop: Loop, first_row: Any, query: Array,
    state: SoftmaxState, tile: tuple[Any, Any],
) -> tuple[SoftmaxState, None]:  # fmt: skip
    """Add one tile of keys to the state of a block of rows, if it is needed."""
    new, is_needed = tile
    # A tile that would end beyond the last key begins earlier; its keys before `new` are not new.
    last = problem.key_length - loop.columns
    overlaps = any(first > last for keys in loop.first_keys for first in keys)
    first = jnp.minimum(new, last) if overlaps else new
    new = new if overlaps else None
    indices = TileIndices(problem, x, first_row, loop.rows, first, loop.columns)
    key, value = (
        lax.dynamic_slice_in_dim(array, first, loop.columns, axis=-2) for array in (x.key, x.value)
    )
    if is_needed is None:
        return add_tile(state, indices, query, key, value, new), None
    # A gradient keeps the inputs of one branch for both branches. So a branch is given only
    # what it needs, and no whole array.
    indices = indices.with_cut_operands()

    def add(state: SoftmaxState) -> SoftmaxState:
        return add_tile(state, indices, query, key, value, new)

    add = jax.checkpoint(add, prevent_cse=False)
    return lax.cond(is_needed, add, lambda state: state, state), None
