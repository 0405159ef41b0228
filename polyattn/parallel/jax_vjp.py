"""Gradients of attention over many ranks in JAX: a rule of its own.

JAX's transpose of a ring would keep the keys of all turns, which is what a ring avoids.
"""

from __future__ import annotations

from typing import Any

import jax
from jax import lax as untyped_lax

from polyattn._api.partial import Partial
from polyattn._core.expressions.expression import split
from polyattn.parallel.rank_task import RankTask

lax: Any = untyped_lax


def attend(task: RankTask, arrays: list[jax.Array]) -> jax.Array:
    """Return the output of this device's rows."""
    # The rule may close over no array, because the backward pass is traced by itself.
    own, static = task.arrays(), task.without_arrays()

    @jax.custom_vjp
    def attention(arrays: Any, others: Any) -> jax.Array:
        task = static.with_arrays(others)
        output: jax.Array = task.forward(*arrays, for_gradient=False)[0]
        return output

    def forward(arrays: Any, others: Any) -> Any:
        output, saved = static.with_arrays(others).forward(*arrays)
        return output, (arrays, others, tuple(saved))

    def backward(kept: Any, gradient: jax.Array) -> Any:
        arrays, others, saved = kept
        axis = static.ranks.axis  # type: ignore[attr-defined]
        # JAX would add up over the devices what it derives for an array that is equal on them.
        task = static.with_arrays([_along(x, {axis}) for x in others])
        # Without check_vma, JAX gives each device a share of the gradient of an equal output, and
        # adds up what they return for an equal array.
        is_shared = not task.strategy.shares_rows and axis not in _axes(arrays[1])
        over = axis if is_shared else ()
        gradients = task.backward(arrays, Partial(*saved), lax.psum(gradient, over))
        of_query, *of_keys = gradients[:3]
        shared = [
            None if of is None else of / lax.psum(1, over)
            for of in (of_query, *task.of_arrays(gradients))
        ]
        of_arrays = [_like(x, of) for x, of in zip(arrays, (shared[0], *of_keys), strict=True)]
        of_others = [_like(x, of) for x, of in zip(others, shared[1:], strict=True)]
        return of_arrays, of_others

    attention.defvjp(forward, backward)
    try:
        result: jax.Array = attention(*_varying(task, arrays, own))
    except Exception as error:  # JAX has several for it, none of which names the function
        _refuse_captured(task, error)
        raise
    return result


def _refuse_captured(task: RankTask, error: Exception) -> None:
    """Raise if a function of an option uses a variable that JAX traces."""
    for name, option in task.call.options.items():
        for function in split(option, lambda x: hasattr(x, "__code__"))[1]:
            cells = [cell.cell_contents for cell in function.__closure__ or ()]
            for variable, value in zip(function.__code__.co_freevars, cells, strict=True):
                if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(value)):
                    raise TypeError(
                        f"the function in {name}= uses {variable}, which JAX traces: for gradients"
                        " over many devices pass an expression that holds it, such as"
                        f" scores.alibi({variable}) or masks.dense({variable})"
                    ) from error


def _varying(task: RankTask, arrays: list[jax.Array], others: list[jax.Array]) -> Any:
    """Return the arrays as ones that differ along the same mesh axes."""
    # So that the gradient of an array which is the same on all devices is summed over them.
    axes: set[str] = set().union(*[_axes(array) for array in (*arrays, *others)])
    if not task.strategy.shares_rows:
        axes -= {task.ranks.axis}  # type: ignore[attr-defined]
    return [_along(x, axes) for x in arrays], [_along(x, axes) for x in others]


def _like(array: jax.Array, gradient: jax.Array | None) -> jax.Array | None:
    """Return a gradient as one that differs along the mesh axes of its array."""
    if gradient is None:
        return None
    # JAX adds up the gradients of an array that differs between devices: each returns its share.
    axes = set(_axes(array) - _axes(gradient))
    return _along(gradient / lax.axis_size(tuple(axes)), axes) if axes else gradient


def _axes(array: jax.Array) -> frozenset[str]:
    kind: Any = jax.typeof(array)
    if hasattr(kind, "manual_axis_type"):
        varying: frozenset[str] = kind.manual_axis_type.varying
        return varying
    return getattr(kind, "vma", frozenset())  # until JAX 0.9


def _along(array: jax.Array, axes: set[str]) -> Any:
    missing = tuple(sorted(axes - _axes(array)))
    if not missing:
        return array
    if hasattr(lax, "pcast"):
        return lax.pcast(array, missing, to="varying")
    return lax.pvary(array, missing)
