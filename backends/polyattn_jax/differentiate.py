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

from polyattn.plugin import (
    Array,
    Cotangents,
    Gradients,
    Operands,
    Problem,
    Residuals,
    Tangents,
)
from polyattn_jax.forward import attend
from polyattn_jax.mesh import varying_like
from polyattn_jax.operands import with_expressions
from polyattn_jax.tangent import OperandTangents, attend_tangents

#: The features of the calls that the rule differentiates.
DIFFERENTIATED = frozenset({
    "batch_broadcast", "bias", "causal", "dropout", "grouped_heads", "mask", "mask_expression",
    "mask_mod", "query_offset", "query_offset_array", "scale", "score_expression", "score_mod",
    "similarity", "sinks", "softcap", "value_size", "window",
})  # fmt: skip
Results = tuple[Array, Array]
#: The operands that may be expressions, or their specs, by name.
Expressions = dict[str, Any]


def attend_differentiably(problem: Problem, tile: int, x: Operands, like: Expressions) -> Results:
    """Return output and logsumexp of operands without expressions, which `like` has."""
    return _rounded_to(problem.dtype, problem, tile, like)(x)


def _rounded_to(
    dtype: str, problem: Problem, tile: int, like: Expressions
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
        residuals = Residuals(output=output, logsumexp=logsumexp)
        of_output, of_logsumexp = attend_tangents(
            problem, tile, with_expressions(like, x), residuals, _tangents(problem, moved)
        )
        return (output.astype(dtype), logsumexp), (of_output.astype(dtype), of_logsumexp)

    return run


def attend_jvp(
    problem: Problem, tile: int, x: Operands, like: Expressions, residuals: Residuals,
    tangents: Tangents,
) -> Results:  # fmt: skip
    """Return the tangents of operands without expressions, which `like` has."""
    moved = _tangents(problem, Operands(**tangents._asdict()))
    return attend_tangents(problem, tile, with_expressions(like, x), residuals, moved)


def _tangents(problem: Problem, moved: Operands) -> OperandTangents:
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
    return OperandTangents(
        query=query,
        key=exact(moved.key),
        value=exact(moved.value),
        bias=exact(moved.bias),
        sinks=exact(moved.sinks),
        score_mod=listed(moved.score_mod),
        similarity=listed(moved.similarity),
    )


def attend_backward(
    problem: Problem, tile: int, x: Operands, like: Expressions, residuals: Residuals,
    cotangents: Cotangents,
) -> Gradients:  # fmt: skip
    """Return the gradients of operands without expressions, which `like` has."""
    # So that each device has its share, of what is the same on all too.
    given = varying_like((x, residuals, cotangents), (x, residuals, cotangents))
    x, residuals, cotangents = given
    operands = with_expressions(like, x)

    def tangents(moved: OperandTangents) -> tuple[Array, Array]:
        return attend_tangents(problem, tile, operands, residuals, moved)

    def shape(array: Any) -> Any:
        if array is None:
            return None
        if isinstance(array, dict):  # of what a function uses, which has no gradient here
            return jax.tree.map(lambda _: None, array)
        if not jnp.issubdtype(array.dtype, jnp.floating):
            return None
        return varying_like(jnp.zeros(array.shape, _exact(problem, array)), given)

    def listed(arrays: Any) -> list[Any] | None:
        return None if arrays is None else [shape(array) for array in arrays]

    number = jnp.zeros((), problem.accumulator)
    like_moved = OperandTangents(
        query=shape(x.query),
        key=shape(x.key),
        value=shape(x.value),
        bias=shape(x.bias),
        sinks=shape(x.sinks),
        score_mod=listed(x.score_mod),
        similarity=listed(x.similarity),
        scale=None if problem.similarity_spec is None else number,
        softcap=None if problem.softcap is None else number,
    )
    direct, zeros = cotangents.logsumexp, jnp.zeros_like(residuals.logsumexp)
    along = (
        cotangents.output.astype(problem.accumulator),
        zeros if direct is None else direct.astype(problem.accumulator),
    )
    (found,) = jax.linear_transpose(tangents, like_moved)(varying_like(along, given))
    return _gradients(problem, x, found)


def _gradients(problem: Problem, x: Operands, found: OperandTangents) -> Gradients:
    """Return the gradients by what the transposed tangent gives."""
    query: Any = found.query
    scale = found.scale
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
        query=query,
        key=found.key,
        value=found.value,
        bias=found.bias,
        sinks=found.sinks,
        score_mod=listed(x.score_mod, found.score_mod),
        similarity=listed(x.similarity, found.similarity),
        scale=scale,
        softcap=found.softcap,
    )


def _exact(problem: Problem, array: Array) -> Any:
    # Not by JAX, which can be told to refuse promotions.
    return np.promote_types(array.dtype, problem.accumulator)
