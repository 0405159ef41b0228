"""Attention for XLA to compile: tiles of scores in a loop, so that memory is for one of them.

The loops are `lax.map` over blocks of rows and, inside, `lax.scan` over blocks of keys. Both bodies
are checkpointed: a gradient keeps the state between tiles and computes scores again, so that its
memory grows with L and S and never with L·S. All of it is traced, so `jit`, `vmap`, `grad` and
their like pass through, and a call outside of them is compiled once for each problem.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from polyattn.plugin import FEATURES, Array, Backend, Kernel, Operands, Problem, Span
from polyattn_jax.layout import Loop, block_sizes, loops, seen_tiles, wanted
from polyattn_jax.tile import At, Running, add_tile, finish, scaled, start

__all__ = ["Xla"]

# Operands that may be values, and where a problem has the form of each.
FORMS = {"mask": "mask_spec", "score_mod": "score_spec", "similarity": "similarity_spec"}
# Query offsets beyond this could leave int32 when a window is added to them.
FURTHEST = 2**29


class Xla(Kernel):
    """Tiles of the scores in a loop that XLA compiles."""

    name = "xla"
    # Of which a norm, and a normalizer, want a whole row at once.
    features = frozenset(FEATURES) - {"normalizer", "score_norm"}
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
        if problem.mask_spec is not None:
            # What tiles there are to visit is laid out by the tables, which forms do not hold.
            mask: Any = operands.mask
            problem = problem._replace(mask_spec=problem.mask_spec.filled(mask))
        problem, operands = one_form_of_offset(problem, operands, self.tile)
        operands = operands._replace(seed=words(operands.seed))
        if problem.features & {"mask_mod", "score_mod"}:
            return attend(problem, self.tile, operands)
        output, logsumexp = compiled(problem, self.tile, taken_apart(problem, operands))
        return output, logsumexp


def one_form_of_offset(problem: Problem, x: Operands, tile: int) -> tuple[Problem, Operands]:
    """Return a call that is compiled once for all offsets, where nothing is skipped by it."""
    offset = problem.query_offset
    if offset is None:
        return problem, x
    tiles = math.prod(problem.scores) > tile
    values = problem.mask_spec is not None or problem.score_spec is not None
    if tiles or values or not problem.masks_by_position or abs(offset) > FURTHEST:
        return problem, x._replace(query_offset=None)
    array = jax.device_put(np.full((1, 1, 1), offset, np.int32))
    return problem._replace(query_offset=None), x._replace(query_offset=array)


def words(seed: int | Array | None) -> Any:
    """Return a seed of 64 bits in two arrays: no call is compiled anew for it."""
    if not isinstance(seed, int):
        return seed
    return jax.device_put((np.uint32(seed & 0xFFFFFFFF), np.uint32(seed >> 32)))


def taken_apart(problem: Problem, x: Operands) -> Operands:
    """Return the operands with the arrays that values carry in place of the values."""
    arrays = {name: [array for _, array in getattr(x, name).carried()] for name in values(problem)}
    return x._replace(**arrays)  # type: ignore[arg-type]


def put_together(problem: Problem, x: Operands) -> Operands:
    """Return the operands with values again."""

    def filled(name: str) -> Any:
        arrays = iter(getattr(x, name))
        return getattr(problem, FORMS[name]).map(lambda *_: next(arrays))

    return x._replace(**{name: filled(name) for name in values(problem)})


def values(problem: Problem) -> list[str]:
    """Return which of the operands are values."""
    return [name for name, form in FORMS.items() if getattr(problem, form) is not None]


def attend(problem: Problem, tile: int, x: Operands) -> tuple[Array, Array | None]:
    """Compute attention in tiles of at most so many scores, or few more."""
    if 0 in problem.scores:
        return finish(problem, start(problem, x, problem.query_length), x.query.dtype)
    seen = seen_tiles(problem, x, block_sizes(problem, tile))
    outputs, logsumexps = zip(
        *(
            attend_blocks(problem, x, loop, wanted(problem, loop, seen))
            for loop in loops(problem, tile)
        ),
        strict=True,
    )
    logsumexp = None if logsumexps[0] is None else jnp.concatenate(logsumexps, axis=-1)
    return jnp.concatenate(outputs, axis=-2), logsumexp


@functools.partial(jax.jit, static_argnums=(0, 1))
def compiled(problem: Problem, tile: int, x: Operands) -> tuple[Array, Array | None]:
    """Compute attention from operands that were taken apart, compiled once for each problem."""
    return attend(problem, tile, put_together(problem, x))


def attend_blocks(
    problem: Problem, x: Operands, loop: Loop, wanted: Array | None
) -> tuple[Array, Array | None]:
    """Return the rows of a loop's blocks, one after the other."""
    # Of its own rows alone: the gradient of each loop is as large as what it is given.
    rows = Span(loop.first_rows[0], loop.first_rows[-1] + loop.rows)
    queries = lax.slice_in_dim(x.query, *rows, axis=-2)
    # Where the last block of keys would end beyond them it begins earlier, and says what is new.
    last = problem.key_length - loop.columns
    overlaps = any(first > last for keys in loop.first_keys for first in keys)

    def attend_block(block: tuple[Any, Any, Any]) -> tuple[Array, Array | None]:
        first_row, first_keys, wanted = block
        query = lax.dynamic_slice_in_dim(queries, first_row - rows.start, loop.rows, axis=-2)
        query = scaled(problem, query)

        def step(running: Running, visit: tuple[Any, Any]) -> tuple[Running, None]:
            new, is_wanted = visit
            first = jnp.minimum(new, last) if overlaps else new
            at = At(problem, x, first_row, loop.rows, first, loop.columns)
            key, value = (
                lax.dynamic_slice_in_dim(array, first, loop.columns, axis=-2)
                for array in (x.key, x.value)
            )
            tile = query, key, value
            new = new if overlaps else None
            if is_wanted is None:
                return add_tile(problem, running, tile, at, new), None
            # What a gradient keeps of one branch is made for the other too. So it must be what the
            # branch is given and no more, and of no array the whole.
            alone = at.alone()
            add = jax.checkpoint(
                lambda running: add_tile(problem, running, tile, alone, new), prevent_cse=False
            )
            return lax.cond(is_wanted, add, lambda running: running, running), None

        running = start(problem, x, loop.rows)
        visits = first_keys, wanted
        if loop.steps == 1:
            running, _ = step(running, jax.tree.map(lambda each: each[0], visits))
        elif loop.steps > 1:
            body = jax.checkpoint(step, prevent_cse=False)
            running, _ = lax.scan(body, running, visits)
        return finish(problem, running, x.query.dtype)

    blocks = np.asarray(loop.first_rows), np.asarray(loop.first_keys), wanted
    if len(loop.first_rows) == 1:
        return attend_block(jax.tree.map(lambda each: each[0], blocks))
    output, logsumexp = lax.map(jax.checkpoint(attend_block, prevent_cse=False), blocks)
    output = jnp.moveaxis(output, 0, -3)
    output = output.reshape(*output.shape[:-3], -1, output.shape[-1])
    if logsumexp is not None:
        logsumexp = jnp.moveaxis(logsumexp, 0, -2)
        logsumexp = logsumexp.reshape(*logsumexp.shape[:-2], -1)
    return output, logsumexp
