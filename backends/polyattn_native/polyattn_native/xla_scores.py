"""Score expressions in programs of XLA: numbers by distance, which the program computes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from polyattn.plugin import Array, PointIndices, Problem, saturating_sum, with_rank
from polyattn_native.scores import LIMIT, scale_and_rest

#: With a number after it, the name of an array of the expression.
PREFIX = "score_mod_"


def shapes_of(problem: Problem) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the arrays of the score expression, by name."""
    spec = problem.score_spec
    carried = [] if spec is None else spec.carried()
    return {f"{PREFIX}{n}": facts.shape for n, (_, facts) in enumerate(carried)}


def trained(problem: Problem) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the arrays of the score expression whose gradients are asked for."""
    return {} if "score_mod" in problem.constants else shapes_of(problem)


def expression(problem: Problem, arrays: list[Array]) -> Any:
    """Return the score expression with its arrays."""
    rest = iter(arrays)
    return None if problem.score_spec is None else problem.score_spec.map(lambda *_: next(rest))


def by_distance(
    call: Callable[[Problem, dict[str, Array]], list[Array]],
    problem: Problem,
    given: dict[str, Array],
    *,
    differentiates: bool,
) -> list[Array]:
    """Return what a call gives with numbers by distance in place of the score expression."""
    arrays = [given.pop(name) for name in shapes_of(problem)]
    offset = given.pop("positions", problem.query_offset)
    scale, rest = scale_and_rest(problem, problem.score_spec)
    plain = problem._replace(score_spec=None, scale=scale, query_offset=problem.query_offset or 0)
    if not rest:
        return call(plain, given)
    numbers, pullback = jax.vjp(functools.partial(_numbers, problem, offset), arrays)
    given["by_distance"] = numbers
    if not (differentiates and trained(problem)):
        return call(plain, given)
    whole = (*problem.batch, *numbers.shape[-3:])
    given["by_distance_gradient"] = jnp.zeros(whole, numbers.dtype)
    *found, gradient = call(plain, given)
    return [*found, *pullback(summed(gradient, numbers.shape))[0]]


def _numbers(problem: Problem, offset: Any, arrays: list[Array]) -> Array:
    """Return the number of each distance, (..., H, 1, n), from last row and first key on."""
    rank, rows, keys = len(problem.batch) + 3, problem.query_length, problem.key_length
    offset = jnp.asarray(saturating_sum(offset, 0, jnp, jnp.dtype("int32"), LIMIT))
    away = with_rank(jnp.arange(1 - rows, keys, dtype="int32"), rank) - with_rank(offset, rank)
    head = with_rank(jnp.arange(problem.heads, dtype="int32").reshape(-1, 1, 1), rank)
    zero = jnp.zeros((1,) * rank, "int32")
    at = PointIndices(zero, head, zero, away)
    shape = (*away.shape[:-3], problem.heads, 1, away.shape[-1])
    numbers = jnp.zeros(shape, problem.accumulator)
    exact = [array.astype(problem.accumulator) for array in arrays]
    for part in scale_and_rest(problem, expression(problem, exact))[1]:
        numbers = part.apply(numbers, at)
    return numbers


def summed(gradient: Array, shape: tuple[int, ...]) -> Array:
    """Return the sum over the axes along which an argument of this shape was broadcast."""
    pairs = enumerate(zip(gradient.shape, shape, strict=True))
    axes = [axis for axis, (whole, part) in pairs if part == 1 and whole != 1]
    return jnp.sum(gradient, axis=axes, keepdims=True) if axes else gradient
