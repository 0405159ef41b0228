"""Gradients of attention without automatic differentiation."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Unpack

from polyattn._api.attention import AttentionOptions, attention
from polyattn._api.names import with_our_names
from polyattn._api.partial import Partial, attention_partial
from polyattn._api.run import plan_of, planned_call
from polyattn._base.arrays import Array, cast, facts_of, is_array, library_of, quiet
from polyattn._base.autocast import autocast
from polyattn._base.host import destination_of
from polyattn._core.call import layout
from polyattn._core.call.describe import describe, placed
from polyattn._core.call.gradients import Gradients
from polyattn._core.call.operands import Cotangents, Residuals, Tangents, mapped
from polyattn._core.call.options import AUTOCAST
from polyattn._core.expressions.expression import Expression, joined, split
from polyattn._core.expressions.replacements import ScaleRule
from polyattn._dispatch.request import is_open, parse_kernel
from polyattn.plugin.backend import unrounded


@with_our_names()
def attention_backward(
    query: Array,
    key: Array,
    value: Array,
    partial: Partial,
    output_gradient: Array,
    *,
    logsumexp_gradient: Array | None = None,
    into: Gradients | None = None,
    **options: Unpack[AttentionOptions],
) -> Gradients:
    """Compute the gradients of attention from its result and the gradient of its output.

    The weights are computed again a tile at a time, so memory is for the gradients and one tile.

    Parameters
    ----------
    query, key, value : Array
        As for `attention`.
    partial : Partial
        The result of `attention_partial` for the same call. The result of `merge` over more keys is
        right too: then the gradients of key and value are those of these keys, and those of the
        query are the share of these keys, to be added to the shares of the others. With a
        `normalizer` there is no logsumexp: ``Partial(output, None)``. For 16-bit inputs, give the
        partial of ``attention_partial(dtype="float32")``: an output that was rounded to 16 bits
        costs the gradients digits, and most of them where the keys have a large mean.
    output_gradient : Array
        The gradient of a loss with respect to the output, shape (..., H, L, E) in the layout of the
        call.
    logsumexp_gradient : Array, optional
        The gradient with respect to the logsumexp, shape (..., H, L); none by default.
    into : Gradients, optional
        Sums to add to, in float32, or float64 for float64 inputs. All gradients are then returned
        in that dtype. ``Gradients()`` starts from zero. By default gradients have the dtypes of
        their arguments.
    **options
        As for `attention`.

    Returns
    -------
    Gradients
        The gradients of query, key, value, bias and sinks; of arrays in `score_mod` and
        `similarity`; and of the numbers `scale` and `softcap`. A row that sees no key adds 0.

    Raises
    ------
    TypeError, ValueError, UnsupportedError
        As for `attention`.

    See Also
    --------
    attention_vjp : Compute the output, and a function that returns the gradients.

    References
    ----------
    .. [1] Dao, "FlashAttention-2", 2023, arXiv:2307.08691, algorithm 2.

    Examples
    --------
    >>> import numpy as np
    >>> from polyattn import attention_backward, attention_partial
    >>> x = np.ones((8, 5, 64), dtype=np.float32)
    >>> partial = attention_partial(x, x, x, is_causal=True)
    >>> gradients = attention_backward(x, x, x, partial, np.ones_like(x), is_causal=True)
    >>> gradients.value[0, :, 0].round(3)
    array([2.283, 1.283, 0.783, 0.45 , 0.2  ], dtype=float32)
    """
    if not isinstance(partial, tuple) or len(partial) != 2:
        raise TypeError(
            "partial must be the Partial that attention_partial returned for this call; got a"
            f" {type(partial).__name__}"
        )
    if into is not None and not isinstance(into, Gradients):
        raise TypeError(f"into must be Gradients; got a {type(into).__name__}")
    given: dict[str, Any] = {"query": query, "key": key, "value": value, **options}
    cotangents = Cotangents(output=output_gradient, logsumexp=logsumexp_gradient)
    return _backward(given, autocast(given, AUTOCAST), partial, cotangents, into)


def _backward(
    given: dict[str, Any],
    arguments: dict[str, Any],
    partial: Partial,
    cotangents: Cotangents,
    into: Gradients | None,
) -> Gradients:
    """Return the gradients of the given arguments; `arguments` are those after autocast."""
    if cotangents.output is None:
        raise TypeError("output_gradient must be an array of the shape of the output; got None")
    arguments = dict(arguments)
    backend, kernel = arguments.pop("backend", None), arguments.pop("kernel", None)
    call, operands = describe(**arguments)
    output, logsumexp = partial
    residuals = Residuals(output=output, logsumexp=logsumexp)
    call = call._replace(residuals=mapped(residuals, _facts), cotangents=mapped(cotangents, _facts))
    turn = functools.partial(layout.result_heads_first, call)
    plan = plan_of(call, operands.query, backend, kernel)
    records = mapped(residuals, turn), mapped(cotangents, turn)
    gradients = plan.backward(layout.heads_first(call, operands), *records)
    gradients = layout.gradients_as_called(call, operands, gradients)
    if isinstance(call.scale, ScaleRule):
        gradients = gradients._replace(scale=None)
    return as_given(gradients, given, into)


def _facts(name: str, array: Any) -> Any:
    return facts_of(array, name)


@with_our_names()
def attention_vjp(
    query: Array, key: Array, value: Array, **options: Unpack[AttentionOptions]
) -> tuple[Array, Callable[..., Gradients]]:
    """Compute attention, and return a function that computes its gradients.

    Parameters
    ----------
    query, key, value : Array
        As for `attention`.
    **options
        As for `attention`.

    Returns
    -------
    output : Array
        As from `attention`.
    pullback : callable
        Takes the gradient of the output, and optionally that of the logsumexp, and returns
        `Gradients`, as `attention_backward`.

    Raises
    ------
    TypeError, ValueError, UnsupportedError
        As for `attention`.

    See Also
    --------
    attention_backward : The same from the result of an earlier call.

    Examples
    --------
    >>> import numpy as np
    >>> from polyattn import attention_vjp
    >>> x = np.ones((8, 5, 64), dtype=np.float32)
    >>> output, pullback = attention_vjp(x, x, x, softcap=5.0)
    >>> pullback(output).query.shape
    (8, 5, 64)
    """
    given: dict[str, Any] = {"query": query, "key": key, "value": value, **options}
    arguments = autocast(given, AUTOCAST)
    output, partial = _with_residuals(**arguments)

    def pullback(output_gradient: Array, logsumexp_gradient: Array | None = None) -> Gradients:
        """Return the gradients from that of the output, and of the logsumexp if it has one."""
        cotangents = Cotangents(output=output_gradient, logsumexp=logsumexp_gradient)
        return _backward(given, arguments, partial, cotangents, None)

    return output, pullback


def unrounded_partial(
    query: Array, key: Array, value: Array, **options: Unpack[AttentionOptions]
) -> Partial:
    """Return `attention_partial` for a gradient, which needs the output in the dtype of sums.

    The gradient of a score is p · (output gradient · value − d), where d is the sum of output ·
    output gradient. An output that was rounded to 16 bits gives all keys of a row the same error,
    and the gradient of the query that error times the mean of the keys.
    """
    arguments: dict[str, Any] = dict(options)
    backend, kernel = arguments.pop("backend", None), arguments.pop("kernel", None)
    call, operands = describe(query, key, value, logsumexp=True, **arguments)
    if call.query.dtype in ("float16", "bfloat16"):
        plan = plan_of(call, query, backend, kernel)
        if is_open(parse_kernel(kernel)):  # the gradient may be another kernel's
            plan = plan.with_feature("backward") or plan
        problem = plan.placement.problem
        if unrounded(problem, plan.kernel) is not problem:
            return attention_partial(query, key, value, dtype="float32", **options)
    return Partial(*planned_call(call, operands, backend, kernel).run())


def _with_residuals(
    query: Array, key: Array, value: Array, **options: Unpack[AttentionOptions]
) -> tuple[Array, Partial]:
    """Return the output, and the partial that derivatives need; with a normalizer, no logsumexp."""
    if options.get("normalizer") is not None:
        output = attention(query, key, value, **options)
        return output, Partial(output, None)
    partial = unrounded_partial(query, key, value, **options)
    return _rounded(partial.output, query.dtype), partial


def _rounded(array: Array, dtype: Any) -> Array:
    """Return a result in the dtype of an argument, without NumPy's warnings about its range."""
    if array.dtype == dtype:
        return array
    library = library_of(array)
    with quiet(library.name):
        return cast(library.xp, array, dtype)


def as_given(
    gradients: Gradients, arguments: dict[str, Any], into: Gradients | None = None
) -> Gradients:
    """Return the gradients in the dtypes of the arguments, or added, and those of expressions."""
    changed: dict[str, Any] = {}
    for name, gradient in zip(gradients._fields, gradients, strict=True):
        given, before = arguments.get(name), None if into is None else getattr(into, name)
        if isinstance(gradient, list):
            changed[name] = _in_expression(name, given, gradient, before, into is not None)
        elif gradient is not None:
            changed[name] = _in_dtype(name, gradient, given, before, into is not None)
    return Gradients(**changed)


def _in_dtype(name: str, gradient: Array, given: Any, before: Any, accumulates: bool) -> Array:
    if accumulates and before is None:
        return gradient
    if accumulates:
        shapes = [tuple(getattr(x, "shape", ())) for x in (before, gradient)]
        if shapes[0] != shapes[1]:
            raise ValueError(
                f"into.{name} must have the shape of the argument, {shapes[1]}; got {shapes[0]}."
                " Gradients() starts from zero"
            )
        return before + gradient
    # Numbers of the host have none of the library's dtypes.
    if not is_array(given) or library_of(given).xp is not library_of(gradient).xp:
        return gradient
    return _rounded(gradient, given.dtype)


def _in_expression(
    name: str, given: Any, gradients: list[Array], before: Any, accumulates: bool
) -> Any:
    """Return an expression with a gradient in place of each array; None without arrays."""
    if not gradients or not isinstance(given, Expression):
        return None
    skeleton, arrays = split(given, is_array)
    sums = [None] * len(arrays) if before is None else split(before, is_array)[1]
    return joined(
        skeleton,
        [
            _in_dtype(name, gradient, array, total, accumulates)
            for gradient, array, total in zip(gradients, arrays, sums, strict=True)
        ],
    )


@with_our_names()
def attention_jvp(
    primals: Sequence[Array],
    tangents: Sequence[Array | None] | Mapping[str, Array | None],
    **options: Unpack[AttentionOptions],
) -> tuple[Array, Array]:
    """Compute attention and its directional derivative: forward mode.

    Parameters
    ----------
    primals : sequence of Array
        Query, key and value, as for `attention`.
    tangents : sequence of (Array or None), or mapping of str to (Array or None)
        The direction: the tangents of query, key and value, in their shapes and dtypes; None for 0.
        Or the tangents of arguments by name, those of `bias` and `sinks` too, as in
        ``{"query": query_tangent, "bias": bias_tangent}``; 0 for each that is not named.
    **options
        As for `attention`.

    Returns
    -------
    output : Array
        As from `attention`.
    output_tangent : Array
        The derivative of the output in that direction, in its shape and dtype.

    Raises
    ------
    TypeError, ValueError, UnsupportedError
        As for `attention`.

    See Also
    --------
    attention_vjp : Reverse mode.

    Examples
    --------
    >>> import numpy as np
    >>> from polyattn import attention_jvp
    >>> x = np.ones((8, 5, 64), dtype=np.float32)
    >>> output, tangent = attention_jvp((x, x, x), (None, None, x))
    >>> bool(np.allclose(tangent, output))  # linear in the values
    True
    """
    given = _of_operands("primals", primals)
    moved = {
        f"{name}_tangent": tangent
        for name, tangent in _tangents_by_name(tangents).items()
        if tangent is not None
    }
    arguments = autocast(given | moved | dict(options), AUTOCAST)
    moved = {name: arguments.pop(name) for name in moved}
    output, partial = _with_residuals(**arguments)
    if not moved:
        return output, library_of(output).xp.zeros_like(output)
    backend, kernel = arguments.pop("backend", None), arguments.pop("kernel", None)
    call, operands = describe(**arguments)
    residuals, destination = Residuals(**partial._asdict()), destination_of(operands.query)
    fields = {name.removesuffix("_tangent"): array for name, array in moved.items()}
    tangents = mapped(Tangents(**fields), lambda name, array: placed(name, array, destination))
    call = call._replace(residuals=mapped(residuals, _facts), tangents=mapped(tangents, _facts))
    records = (
        mapped(residuals, functools.partial(layout.result_heads_first, call)),
        mapped(tangents, functools.partial(layout.tangent_heads_first, call, operands)),
    )
    plan = plan_of(call, operands.query, backend, kernel)
    result = plan.jvp(layout.heads_first(call, operands), *records)
    tangent, _ = layout.as_called(call, *result)
    return output, _rounded(tangent, output.dtype)


def _of_operands(name: str, given: Any) -> dict[str, Any]:
    """Return a sequence of three as those of query, key and value, or raise."""
    if not isinstance(given, (tuple, list)) or len(given) != 3:
        is_listed = isinstance(given, (tuple, list))
        got = f"{len(given)} of them" if is_listed else f"a {type(given).__name__}"
        raise TypeError(f"{name} must be those of query, key and value; got {got}")
    return dict(zip(("query", "key", "value"), given, strict=True))


def _tangents_by_name(tangents: Any) -> Mapping[str, Any]:
    if not isinstance(tangents, Mapping):
        return _of_operands("tangents", tangents)
    for name in tangents:
        if name not in Tangents._fields:
            known = ", ".join(Tangents._fields)
            raise TypeError(f"tangents may be those of {known}; got one of {name!r}")
    return tangents
