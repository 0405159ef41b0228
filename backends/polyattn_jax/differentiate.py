"""Attention by tiles as a function that JAX differentiates by its tangent.

The rule is for forward mode, from which JAX derives reverse mode by transposing, and higher orders
by differentiating again. So all of its transforms compose.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from polyattn.plugin import Array, Gradients, Operands, Problem
from polyattn_jax.forward import attend
from polyattn_jax.mesh import varying_like
from polyattn_jax.operands import with_expressions
from polyattn_jax.tangent import Tangents, attend_tangents

__all__ = ["attend_backward", "attend_differentiably", "attend_jvp"]


Results = tuple[Array, Array]


def attend_differentiably(problem: Problem, tile: int, x: Operands, like: Operands) -> Results:
    """Return output and logsumexp of operands without expressions, which `like` has."""
    return _rounded_to(problem.dtype, problem, tile, like)(x)


def _rounded_to(
    dtype: str, problem: Problem, tile: int, like: Operands
) -> Callable[[Operands], Results]:
    """Return a function with a tangent, of output, rounded to this dtype, and logsumexp."""

    @jax.custom_jvp
    def run(x: Operands) -> Results:
        return attend(problem, tile, with_expressions(like, x), dtype)

    @functools.partial(run.defjvp, symbolic_zeros=True)
    def rule(primals: tuple[Operands], tangents: tuple[Operands]) -> tuple[Results, Results]:
        (x,), (moved,) = primals, tangents
        # The tangent needs the output before it is rounded.
        output, logsumexp = _rounded_to(problem.accumulator, problem, tile, like)(x)
        of_output, of_logsumexp = attend_tangents(
            problem, tile, with_expressions(like, x), output, logsumexp, _tangents(problem, moved)
        )
        return (output.astype(dtype), logsumexp), (of_output.astype(dtype), of_logsumexp)

    return run


def attend_jvp(problem: Problem, tile: int, x: Operands, like: Operands) -> Results:
    """Return the tangents of operands without expressions, which `like` has."""
    assert x.output is not None
    assert x.known_logsumexp is not None
    moved = Operands(*[None] * 8)._replace(
        query=x.query_tangent,
        key=x.key_tangent,
        value=x.value_tangent,
        bias=x.bias_tangent,
        sinks=x.sinks_tangent,
    )
    operands, tangents = with_expressions(like, x), _tangents(problem, moved)
    return attend_tangents(problem, tile, operands, x.output, x.known_logsumexp, tangents)


def _tangents(problem: Problem, moved: Operands) -> Tangents:
    """Return the tangents that JAX gives, those of arrays in the accumulator's dtype."""

    def or_none(tangent: Any) -> Array | None:
        if tangent is None or isinstance(tangent, SymbolicZero):
            return None
        return None if tangent.dtype == jax.dtypes.float0 else tangent

    def exact(tangent: Any) -> Any:
        if isinstance(tangent, dict):  # of what a function uses, which fixes its dtype
            return jax.tree.map(or_none, tangent)
        tangent = or_none(tangent)
        return None if tangent is None else tangent.astype(_exact(problem, tangent))

    def listed(tangents: Any) -> list[Any] | None:
        return None if tangents is None else [exact(one) for one in tangents]

    query = exact(moved.query)
    if query is not None and problem.similarity_spec is None:
        query *= problem.scale
    return Tangents(
        query,
        exact(moved.key),
        exact(moved.value),
        exact(moved.bias),
        exact(moved.sinks),
        listed(moved.score_mod),
        listed(moved.similarity),
    )


def attend_backward(problem: Problem, tile: int, x: Operands, like: Operands) -> Gradients:
    """Return the gradients of operands without expressions, which `like` has."""
    x = varying_like(x, x)  # so that each device has its share, of what is the same on all too
    operands = with_expressions(like, x)
    output, logsumexp, output_gradient = x.output, x.known_logsumexp, x.output_gradient
    assert output is not None
    assert logsumexp is not None
    assert output_gradient is not None

    def tangents(moved: Tangents) -> tuple[Array, Array]:
        return attend_tangents(problem, tile, operands, output, logsumexp, moved)

    def shape(array: Any) -> Any:
        if array is None:
            return None
        if isinstance(array, dict):  # of what a function uses, which has no gradient here
            return jax.tree.map(lambda _: None, array)
        if not jnp.issubdtype(array.dtype, jnp.floating):
            return None
        return varying_like(jnp.zeros(array.shape, _exact(problem, array)), x)

    def listed(arrays: Any) -> list[Any] | None:
        return None if arrays is None else [shape(array) for array in arrays]

    number = jnp.zeros((), problem.accumulator)
    like_moved = Tangents(
        shape(x.query),
        shape(x.key),
        shape(x.value),
        shape(x.bias),
        shape(x.sinks),
        listed(x.score_mod),
        listed(x.similarity),
        scale=None if problem.similarity_spec is None else number,
        softcap=None if problem.softcap is None else number,
    )
    direct = x.logsumexp_gradient
    along = (
        output_gradient.astype(problem.accumulator),
        jnp.zeros_like(logsumexp) if direct is None else direct.astype(problem.accumulator),
    )
    (found,) = jax.linear_transpose(tangents, like_moved)(varying_like(along, x))
    return _gradients(problem, x, found)


def _gradients(problem: Problem, x: Operands, found: Tangents) -> Gradients:
    """Return the gradients by what the transposed tangent gives."""
    query, scale = found.query, found.scale
    assert query is not None
    if problem.similarity_spec is None:
        # A row that sees no key may hold NaN.
        products = jnp.where(query == 0, 0, query * x.query.astype(query.dtype))
        query, scale = query * problem.scale, jnp.sum(products)

    def listed(arrays: Any, gradients: Any) -> list[Array]:
        return [
            jnp.zeros(array.shape, problem.accumulator) if gradient is None else gradient
            for array, gradient in zip(arrays or [], gradients or [], strict=True)
            if not isinstance(array, dict)
        ]

    return Gradients(
        query,
        found.key,
        found.value,
        found.bias,
        found.sinks,
        listed(x.score_mod, found.score_mod),
        listed(x.similarity, found.similarity),
        scale,
        found.softcap,
    )


def _exact(problem: Problem, array: Array) -> Any:
    # Not by JAX, which can be told to refuse promotions.
    return np.promote_types(array.dtype, problem.accumulator)
