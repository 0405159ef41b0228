"""The operands of a call as arrays only, so that JAX may compile and differentiate by them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from polyattn.plugin import Array, Expression, Operands, Problem, Span, band, joined, split
from polyattn_jax.explicit import Explicit, split_explicit
from polyattn_jax.loop_layout import block_sizes, has_one_offset
from polyattn_jax.mesh import varying_like
from polyattn_jax.tile import TileIndices

#: The skeletons of the operands that are expressions, by name, hashable.
Skeletons = tuple[tuple[str, Any], ...]
# Larger query offsets could overflow int32 when a window is added to them.
OFFSET_LIMIT = 2**29


def prepared(problem: Problem, x: Operands, tile: int) -> tuple[Problem, Operands]:
    """Return a call with facts for its arrays to be compiled for, and its numbers as arrays."""
    if problem.mask_spec is not None:
        mask: Any = x.mask
        if not problem.traced:
            mask = mask.with_lengths(length_as_array)
        # The tables of a mask decide which tiles are visited.
        problem = problem._replace(mask_spec=mask.spec(tables=True))
        x = x._replace(mask=mask)
    problem, x = offset_as_array(without_idle_band(problem), x, tile)
    return problem, x._replace(seed=split_seed(x.seed))


def without_idle_band(problem: Problem) -> Problem:
    """Return a call without causal and window if they hide no key."""
    if problem.query_offset is None or band(problem) != (None, None):
        return problem
    features = problem.features - {"causal", "window"}
    return problem._replace(is_causal=False, window=(None, None), features=features)


def offset_as_array(problem: Problem, x: Operands, tile: int) -> tuple[Problem, Operands]:
    """Return a call compiled once for all offsets, if no tile is skipped because of them."""
    offset = problem.query_offset
    if offset is None:
        return problem, x
    expressions = problem.mask_spec is not None or problem.score_spec is not None
    if not (problem.masks_by_position or expressions):
        features = problem.features - {"query_offset"}
        return problem._replace(query_offset=0, features=features), x._replace(query_offset=None)
    tiles = math.prod(problem.scores) > tile or (expressions and problem.traced)
    if tiles or abs(offset) > OFFSET_LIMIT:
        return problem, x._replace(query_offset=None)
    array = jax.device_put(np.full((1, 1, 1), offset, np.int32))
    return problem._replace(query_offset=None), x._replace(query_offset=array)


def length_as_array(length: int) -> Array:
    """Return a length of a mask as an array, so that a new length compiles nothing."""
    return on_device(min(length, 2**30), "int32")


def without_numbers(problem: Problem) -> tuple[Problem, dict[str, Array]]:
    """Return a call without scale and softcap, and these as arrays, outside of a traced program."""
    if problem.traced:
        return problem, {}
    numbers = {"scale": on_device(problem.scale, problem.accumulator)}
    if problem.softcap is not None:
        numbers["softcap"] = on_device(problem.softcap, problem.accumulator)
        problem = problem._replace(softcap=1.0)
    return problem._replace(scale=1.0, features=problem.features - {"scale"}), numbers


@functools.lru_cache
def on_device(number: float, dtype: str) -> Array:
    """Return a number as an array, also where a program is traced that it is a constant of."""
    with jax.ensure_compile_time_eval():
        return jax.device_put(np.asarray(number, dtype))


def split_seed(seed: int | Array | None) -> Any:
    """Return a seed of 64 bits as two arrays, so that a new seed compiles nothing."""
    if not isinstance(seed, int):
        return seed
    return jax.device_put((np.uint32(seed & 0xFFFFFFFF), np.uint32(seed >> 32)))


def without_expressions(x: Operands) -> tuple[Skeletons, Operands]:
    """Return the skeletons of expressions, and operands with lists of their arrays in place."""
    apart = {
        name: split_explicit(operand)
        for name, operand in x._asdict().items()
        if isinstance(operand, (Expression, Explicit))
    }
    skeletons = tuple([(name, skeleton) for name, (skeleton, _) in apart.items()])
    arrays: dict[str, Any] = {name: taken for name, (_, taken) in apart.items()}
    return skeletons, x._replace(**arrays)


def with_expressions(skeletons: Skeletons, x: Operands) -> Operands:
    """Return operands with the expressions that have these skeletons."""
    return x._replace(**{name: joined(each, getattr(x, name)) for name, each in skeletons})


def explicit(problem: Problem, x: Operands, tile: int) -> Operands:
    """Return operands with explicit functions in place of functions, for the tiles of a call."""
    sizes = []
    if 0 not in problem.scores:
        rows, columns = block_sizes(problem, tile, has_one_offset(problem, x))
        heights = {span.length for span in Span(0, problem.query_length).split(rows)}
        sizes = [(height, columns) for height in sorted(heights)]

    def changed(operand: Any, takes_scores: bool) -> Any:
        skeleton, rules = split(operand, callable)
        traced = [
            Explicit.of({size: _on_tile(problem, x, rule, takes_scores, size) for size in sizes})
            for rule in rules
        ]
        return joined(skeleton, traced)

    return x._replace(mask=changed(x.mask, False), score_mod=changed(x.score_mod, True))


def _on_tile(
    problem: Problem, x: Operands, rule: Any, takes_scores: bool, size: tuple[int, int]
) -> tuple[Callable[..., Array], tuple[Any, ...]]:
    """Return a mask or score function as a function of a tile, and arguments like its own."""
    rows, columns = size

    def on_tile(row: Array, column: Array, *scores: Array) -> Array:
        at = TileIndices(problem, x, row, rows, column, columns)
        call = at.by_score_mod if takes_scores else at.by_rule
        return call(rule, *scores)

    first = jax.ShapeDtypeStruct((), "int32")  # type: ignore[no-untyped-call]
    if not takes_scores:
        return on_tile, (first, first)
    shape = (*problem.batch, problem.heads, *size)
    scores: Any = jax.ShapeDtypeStruct(shape, problem.accumulator)  # type: ignore[no-untyped-call]
    if isinstance(x.query, jax.core.Tracer):
        # Inside of jax.shard_map a function takes scores that vary along the axes that it saw.
        like = (x.query, x.key, x.score_mod, x.similarity)
        scores = varying_like(jnp.zeros(shape, problem.accumulator), like)
    return on_tile, (first, first, scores)
