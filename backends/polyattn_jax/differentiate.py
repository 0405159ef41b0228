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

from polyattn.plugin import Array, Cotangents, Gradients, Operands, Problem, Residuals, Tangents
from polyattn_jax.array_operands import Skeletons, with_expressions
from polyattn_jax.explicit import Explicit
from polyattn_jax.forward import attend
from polyattn_jax.mesh import varying_like
from polyattn_jax.tangent import OperandTangents, attend_tangents

#: The features of the calls that the rule differentiates.
DIFFERENTIATED = frozenset({
    "batch_broadcast", "bias", "causal", "dropout", "grouped_heads", "mask", "mask_expression",
    "mask_mod", "query_offset", "query_offset_array", "scale", "score_expression", "score_mod",
    "similarity", "sinks", "softcap", "value_size", "window",
})  # fmt: skip
Results = tuple[Array, Array]


def attend_differentiably(
    problem: Problem, tile: int, x: Operands, skeletons: Skeletons
) -> Results:
    """Return output and logsumexp of operands without expressions but their skeletons."""

    @jax.custom_jvp
    def run(x: Operands) -> Results:
        return attend(problem, tile, with_expressions(skeletons, x))

    @functools.partial(run.defjvp, symbolic_zeros=True)
    def rule(primals: tuple[Operands], tangents: tuple[Operands]) -> tuple[Results, Results]:
        (x,), (of_x,) = primals, tangents
        # The tangent needs the output before it is rounded.
        exact = problem._replace(dtype=problem.accumulator)
        output, logsumexp = attend_differentiably(exact, tile, x, skeletons)
        residuals = Residuals(output=output, logsumexp=logsumexp)
        of_output, of_logsumexp = attend_tangents(
            problem, tile, with_expressions(skeletons, x), residuals, _tangents(problem, of_x)
        )
        dtype = problem.dtype
        return (output.astype(dtype), logsumexp), (of_output.astype(dtype), of_logsumexp)

    return run(x)


def attend_jvp(
    problem: Problem, tile: int, x: Operands, skeletons: Skeletons, residuals: Residuals,
    tangents: Tangents,
) -> Results:  # fmt: skip
    """Return the tangents of operands without expressions but their skeletons."""
    given = _tangents(problem, Operands(**tangents._asdict()))
    operands = with_expressions(skeletons, x)
    return attend_tangents(problem, tile, operands, residuals, given, is_linear=False)


def _each(change: Callable[[Any], Any], x: Operands) -> OperandTangents:
    """Apply a change to each array of operands without expressions, or to each of their tangents.

    An operand is an array, or a list of the arrays and functions of an expression.
    """

    def changed(operand: Any) -> Any:
        if isinstance(operand, list):
            return [change(one) for one in operand]
        return None if operand is None else change(operand)

    names = ("query", "key", "value", "bias", "sinks", "score_mod", "similarity")
    return OperandTangents(**{name: changed(getattr(x, name)) for name in names})


def _tangents(problem: Problem, tangents: Operands) -> OperandTangents:
    """Return the tangents that JAX gives, those of arrays in the accumulator's dtype."""

    def or_none(tangent: Any) -> Array | None:
        if isinstance(tangent, SymbolicZero) or tangent.dtype == jax.dtypes.float0:
            return None
        return tangent

    def exact(tangent: Any) -> Any:
        if isinstance(tangent, Explicit):  # a function fixes the dtype of what it uses
            return jax.tree.map(or_none, tangent)
        tangent = or_none(tangent)
        return None if tangent is None else tangent.astype(_exact(problem, tangent))

    given = _each(exact, tangents)
    if given.query is not None and problem.similarity_spec is None:
        given = given._replace(query=given.query * problem.scale)
    return given


def attend_backward(
    problem: Problem, tile: int, x: Operands, skeletons: Skeletons, residuals: Residuals,
    cotangents: Cotangents,
) -> Gradients:  # fmt: skip
    """Return the gradients of operands without expressions but their skeletons."""
    # So that each device has its share, of what is the same on all too.
    given = varying_like((x, residuals, cotangents), (x, residuals, cotangents))
    x, residuals, cotangents = given
    operands = with_expressions(skeletons, x)

    def run(tangents: OperandTangents) -> tuple[Array, Array]:
        return attend_tangents(problem, tile, operands, residuals, tangents)

    def zero(array: Any) -> Any:
        if isinstance(array, Explicit):  # what a function uses has no gradient here
            return jax.tree.map(lambda _: None, array)
        if not jnp.issubdtype(array.dtype, jnp.floating):
            return None
        return varying_like(jnp.zeros(array.shape, _exact(problem, array)), given)

    number = jnp.zeros((), problem.accumulator)
    zeros = _each(zero, x)._replace(
        scale=None if problem.similarity_spec is None else number,
        softcap=None if problem.softcap is None else number,
    )
    of_logsumexp = cotangents.logsumexp
    if of_logsumexp is None:
        of_logsumexp = jnp.zeros_like(residuals.logsumexp)
    along = tuple(one.astype(problem.accumulator) for one in (cotangents.output, of_logsumexp))
    (gradients,) = jax.linear_transpose(run, zeros)(varying_like(along, given))
    return _gradients(problem, x, gradients)


def _gradients(problem: Problem, x: Operands, of_operands: OperandTangents) -> Gradients:
    """Return the gradients by what the transposed tangent gives."""

    def listed(arrays: Any, gradients: Any) -> list[Array]:
        return [
            jnp.zeros(array.shape, problem.accumulator) if gradient is None else gradient
            for array, gradient in zip(arrays or [], gradients or [], strict=True)
            if not isinstance(array, Explicit)
        ]

    gradients = Gradients(**of_operands._asdict())._replace(
        score_mod=listed(x.score_mod, of_operands.score_mod),
        similarity=listed(x.similarity, of_operands.similarity),
    )
    if problem.similarity_spec is not None:
        return gradients
    # The tangent is that of scale · query. A row that sees no key may hold NaN.
    query: Any = of_operands.query
    products = jnp.where(query == 0, 0, query * x.query.astype(query.dtype))
    return gradients._replace(query=query * problem.scale, scale=jnp.sum(products))


def _exact(problem: Problem, array: Array) -> Any:
    # Not by JAX, which can be told to refuse promotions.
    return np.promote_types(array.dtype, problem.accumulator)
