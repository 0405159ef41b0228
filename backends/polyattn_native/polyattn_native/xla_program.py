"""The compiled library as a primitive of JAX, with its batching and its derivatives.

First derivatives are the library's. The rest is that of the kernel that XLA compiles, a plain
program of JAX: derivatives of derivatives, dropout under `vmap`, whose hash counts the items of a
call, and programs for other devices, for several of them, or to be exported.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import math
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad as untyped_ad
from jax.interpreters import batching, mlir, xla

from polyattn.plugin import (
    Array,
    Backend,
    Cotangents,
    Kernel,
    Operands,
    Problem,
    Residuals,
    Tangents,
    with_rank,
)
from polyattn_native.call import shape_of_bias_gradient
from polyattn_native.library import library
from polyattn_native.xla_operands import POOLS, Arrays, operands, without_pages
from polyattn_native.xla_scores import PREFIX, by_distance, summed, trained
from polyattn_native.xla_words import ADDRESSES, NUMBERS, PRODUCTS, order_of, result_shapes, words

#: Arguments with a derivative.
DIFFERENTIABLE = ("query", "key", "value", "bias", "sinks")
WITHOUT_BATCH = (*ADDRESSES, *NUMBERS)

# These functions of JAX have no types.
ad: Any = untyped_ad
ffi: Any = jax.ffi

primitive: Any = Primitive("polyattn_native")
primitive.multiple_results = True
primitive.def_impl(functools.partial(xla.apply_primitive, primitive))


class Fallback:
    """The kernel that XLA compiles, on the backend of a call."""

    def __init__(self, kernel: Kernel, backend: Backend) -> None:
        self.kernel, self.backend = kernel, backend

    def __call__(self, function: str, problem: Problem, arrays: Arrays) -> list[Array]:
        """Return what a function of the library does."""
        if function == "push_forward" and _moves_scores(arrays):
            return self._moved(problem, arrays)
        of_bias = problem.bias
        problem, x = operands(problem, arrays)
        if function == "attend":
            return _in_columns(self.kernel(problem, x, self.backend))
        residuals = Residuals(output=arrays["output"], logsumexp=arrays["logsumexp"][..., 0])
        if function == "push_forward":
            given = {n: arrays.get(f"{n}_tangent") for n in DIFFERENTIABLE}
            return _in_columns(
                self.kernel.jvp(problem, x, residuals, Tangents(**given), self.backend)
            )
        return self._gradients(problem, x, residuals, arrays, of_bias)

    def _moved(self, problem: Problem, arrays: Arrays) -> list[Array]:
        """Return the tangents of output and logsumexp by those of all arguments."""
        exact = problem._replace(dtype=problem.accumulator)
        tangents = {n: arrays[f"{n}_tangent"] for n in arrays if f"{n}_tangent" in arrays}
        wide = arrays | {n: arrays[n].astype(exact.dtype) for n in {*tangents, *DIFFERENTIABLE[:3]}}

        def attend(moved: Arrays) -> list[Array]:
            return self("attend", exact, wide | moved)

        results: list[Array] = jax.jvp(attend, ({n: wide[n] for n in tangents},), (tangents,))[1]
        return results

    def _gradients(
        self, problem: Problem, x: Operands, residuals: Residuals, arrays: Arrays, of_bias: Any
    ) -> list[Array]:
        output, logsumexp = arrays["output_gradient"], arrays.get("logsumexp_gradient")
        of_logsumexp = None if logsumexp is None else logsumexp[..., 0]
        cotangents = Cotangents(output=output, logsumexp=of_logsumexp)
        whole: dict[str, Any] = {
            name: jnp.broadcast_to(array, (*problem.batch, *array.shape[-3:]))
            for name, array in (("query", x.query), ("key", x.key), ("value", x.value))
        }
        if of_bias is not None:
            whole["bias"] = jnp.broadcast_to(arrays["bias"], of_bias)
            problem = problem._replace(bias=of_bias)
        x = x._replace(**whole)
        found: Any = self.kernel.backward(problem, x, residuals, cotangents, self.backend)
        delta = jnp.sum(residuals.output.astype(output.dtype) * output, axis=-1, keepdims=True)
        delta = delta if logsumexp is None else delta - logsumexp
        results: list[Any] = [found.query, found.key, found.value, delta]
        if problem.softcap is not None:  # of the rows only their sum is used
            results.append(jnp.full(delta.shape, found.softcap / math.prod(delta.shape)))
        if of_bias is not None:
            results.append(found.bias)
        return results + (found.score_mod if trained(problem) else [])


def _in_columns(results: Any) -> list[Array]:
    """Return the output, and the logsumexp with the axis that the library gives it."""
    output, logsumexp = results
    return [output, logsumexp[..., None]]


def _moves_scores(names: Iterable[str]) -> bool:
    """Return whether an array of the score expression has a tangent."""
    return any(name.startswith(PREFIX) and name.endswith("_tangent") for name in names)


def run(function: str, problem: Problem, fallback: Fallback, arrays: Arrays) -> list[Array]:
    """Run a function of the library on arrays by name."""
    found: list[Array] = primitive.bind(
        *_varying_alike(arrays.values()),
        function=function,
        problem=problem,
        fallback=fallback,
        names=tuple(arrays),
    )
    return found


def _varying_alike(arrays: Iterable[Array]) -> list[Array]:
    """Return arrays that vary along the same manual axes of a mesh, inside of ``jax.shard_map``."""
    given = list(arrays)
    axes = frozenset[str]().union(*map(_varying, given))
    return [_vary(array, tuple(sorted(axes - _varying(array)))) for array in given]


def _varying(array: Array) -> frozenset[str]:
    kind: Any = jax.typeof(array)
    manual: Any = getattr(kind, "manual_axis_type", None)
    return frozenset(getattr(kind, "vma", ()) if manual is None else manual.varying)  # until 0.9


def _vary(array: Array, axes: tuple[str, ...]) -> Array:
    if not axes:
        return array
    lax: Any = jax.lax
    varied: Array = (
        lax.pcast(array, axes, to="varying") if hasattr(lax, "pcast") else lax.pvary(array, axes)
    )
    return varied


# ---- compilation ----


@primitive.def_abstract_eval  # type: ignore[untyped-decorator]
def _shapes(
    query: Any, *arrays: Any, function: str, problem: Problem, names: tuple[str, ...], **about: Any
) -> list[Any]:
    found = result_shapes(function, problem, names).values()
    return [
        query.update(shape=shape, dtype=jnp.dtype(dtype), weak_type=False) for shape, dtype in found
    ]


@functools.cache
def _registered() -> None:
    """Tell XLA of the library."""
    for function in PRODUCTS:
        handler = ffi.pycapsule(getattr(library(), f"polyattn_xla_{function}"))
        ffi.register_ffi_target(f"polyattn_{function}", handler, platform="cpu")


def _as_program(
    *arrays: Any, function: str, problem: Problem, fallback: Fallback, names: tuple[str, ...]
) -> list[Array]:
    return fallback(function, problem, dict(zip(names, arrays, strict=True)))


def _of_copies(*arrays: Any, names: tuple[str, ...], **about: Any) -> list[Array]:
    given = dict(zip(names, arrays, strict=True))
    return run(arrays=without_pages(given, given), **about)


def _by_distance(
    *arrays: Any, function: str, problem: Problem, fallback: Fallback, names: tuple[str, ...]
) -> list[Array]:
    def call(problem: Problem, given: Arrays) -> list[Array]:
        return run(function, problem, fallback, given)

    given = dict(zip(names, arrays, strict=True))
    return by_distance(call, problem, given, differentiates=function == "differentiate")


_lower_by_distance: Any = mlir.lower_fun(_by_distance, multiple_results=True)
_lower_program: Any = mlir.lower_fun(_as_program, multiple_results=True)


def _lower(context: Any, *values: Any, **about: Any) -> Any:
    """Return a custom call, or the program of the kernel that XLA compiles."""
    module = context.module_context
    is_program = module.lowering_parameters.for_export or _moves_scores(about["names"])
    if is_program or not _is_of_one_device(module.axis_context):
        return _lower_program(context, *values, **about)
    function, problem, arguments = about["function"], about["problem"], about["names"]
    if problem.score_spec is not None:
        return _lower_by_distance(context, *values, **about)
    _registered()
    results = list(result_shapes(function, problem, arguments))
    names = (*arguments, *results)
    # The zeros to which gradients are added.
    aliases = {arguments.index(n): results.index(n) for n in results if n in arguments}
    shapes = [aval.shape for aval in (*context.avals_in, *context.avals_out)]
    attributes = words(function, problem, names, shapes)
    layouts = [
        order_of(problem, names, name, len(aval.shape))[::-1]
        for name, aval in zip(arguments, context.avals_in, strict=True)
    ]
    lower = ffi.ffi_lowering(
        f"polyattn_{function}", operand_output_aliases=aliases, operand_layouts=layouts
    )
    return lower(context, *values, **attributes)


def _is_of_one_device(context: Any) -> bool:
    """Return whether a program is for one device, or for the part of each, by shard_map."""
    if hasattr(context, "num_devices"):
        count = context.num_devices
        return bool((jax.device_count() if count is None else count) == 1)
    return set(context.mesh.axis_names) <= set(getattr(context, "manual_axes", ()))


# Ask JAX to pass the devices to the lowering. There is no public API; without this the lowering
# knows less, and leaves more calls to XLA.
with contextlib.suppress(ImportError, AttributeError):
    dispatch: Any = importlib.import_module("jax._src.dispatch")
    dispatch.prim_requires_devices_during_lowering.add(primitive)
# And JAX caches by other facts; older versions cache nothing.
_options: dict[str, Any] = {}
if "cacheable" in inspect.signature(mlir.register_lowering).parameters:
    _options["cacheable"] = False
mlir.register_lowering(primitive, _lower_program, **_options)
mlir.register_lowering(primitive, _lower, platform="cpu", **_options)


# ---- batching ----


def _batch(arrays: Any, axes: Any, **about: Any) -> tuple[Any, Any]:
    """Add a batch axis; leave calls without one, empty ones and sums over items to the other."""
    problem = about["problem"]
    named = list(zip(about["names"], arrays, axes, strict=True))
    sums_items = about["function"] == "differentiate" and bool(trained(problem))
    is_split = any(axis is not None for name, _, axis in named if _has_no_batch(name))
    size = next(array.shape[axis] for _, array, axis in named if axis is not None)
    if problem.dropout or sums_items or is_split or size == 0:
        found = jax.vmap(functools.partial(_as_program, **about), axes)(*arrays)
        return found, [0] * len(found)
    if "table" in about["names"] and any(a is not None for n, _, a in named if n in POOLS):
        found = jax.vmap(functools.partial(_of_copies, **about), axes)(*arrays)
        return found, [0] * len(found)

    def moved(name: str, array: Array, axis: int | None) -> Array:
        if name == "bias_gradient":
            return jnp.zeros((size, *problem.bias), array.dtype)
        if axis is not None:
            return jnp.moveaxis(array, axis, 0)
        return array if _has_no_batch(name) else array[None]

    of_bias = None if problem.bias is None else (size, *problem.bias)
    about["problem"] = problem._replace(batch=(size, *problem.batch), bias=of_bias)
    found = primitive.bind(*[moved(*one) for one in named], **about)
    return found, [0] * len(found)


def _has_no_batch(name: str) -> bool:
    return name in WITHOUT_BATCH or name.startswith(PREFIX)


batching.primitive_batchers[primitive] = _batch


# ---- derivatives ----


def _jvp(primals: Any, tangents: Any, **about: Any) -> tuple[Any, Any]:
    """Return results and their tangents; of derivatives those of the other kernel."""
    if about["function"] != "attend":
        tangents = [ad.instantiate_zeros(t) for t in tangents]
        program = functools.partial(_as_program, **about)
        return jax.jvp(program, tuple(primals), tuple(tangents))
    problem, fallback = about["problem"], about["fallback"]
    arrays = dict(zip(about["names"], primals, strict=True))
    moved = {
        name: tangent
        for name, tangent in zip(about["names"], tangents, strict=True)
        if (name in DIFFERENTIABLE or name.startswith(PREFIX)) and not isinstance(tangent, ad.Zero)
    }
    moved, arrays = without_pages(moved, arrays), without_pages(arrays, arrays)
    exact = problem._replace(dtype=problem.accumulator)
    wide = arrays | {n: arrays[n].astype(exact.dtype) for n in ("query", "key", "value")}
    output, logsumexp = run("attend", exact, fallback, wide)
    moved = {f"{name}_tangent": tangent.astype(exact.dtype) for name, tangent in moved.items()}
    given = arrays | {"output": output, "logsumexp": logsumexp} | moved
    of_output, of_logsumexp = run("push_forward", problem, fallback, given)
    output, of_output = output.astype(problem.dtype), of_output.astype(problem.dtype)
    return [output, logsumexp], [of_output, of_logsumexp]


ad.primitive_jvps[primitive] = _jvp


def _transpose(cotangents: Any, *arrays: Any, **about: Any) -> list[Any]:
    """Return the gradients of the tangents that `push_forward` takes."""
    names, problem, fallback = about["names"], about["problem"], about["fallback"]
    linear = {n: a.aval for n, a in zip(names, arrays, strict=True) if ad.is_undefined_primal(a)}
    given = {n: a for n, a in zip(names, arrays, strict=True) if n not in linear}
    if about["function"] != "push_forward":
        found = _transposed_program(cotangents, given, linear, about)
    else:
        of_output, of_logsumexp = cotangents
        given = {n: a for n, a in given.items() if not n.endswith("_tangent")}
        given["output_gradient"] = ad.instantiate_zeros(of_output)
        if not isinstance(of_logsumexp, ad.Zero):
            given["logsumexp_gradient"] = of_logsumexp
        if not _moves_scores(linear):
            problem = problem._replace(constants=problem.constants | {"score_mod"})
        found = gradients(problem, fallback, given, of_bias="bias_tangent" in linear)
        found = {name: found[name.removesuffix("_tangent")] for name in linear}
        found = {n: summed(gradient, linear[n].shape) for n, gradient in found.items()}
    return [found.get(name) for name in names]


ad.primitive_transposes[primitive] = _transpose


def _transposed_program(cotangents: Any, given: Arrays, linear: Any, about: Any) -> Arrays:
    def program(moved: Arrays) -> list[Array]:
        arrays = given | moved
        return _as_program(*[arrays[name] for name in about["names"]], **about)

    struct: Any = jax.ShapeDtypeStruct
    like = {n: struct(aval.shape, aval.dtype) for n, aval in linear.items()}
    whole = [ad.instantiate_zeros(cotangent) for cotangent in cotangents]
    found: tuple[Arrays] = jax.linear_transpose(program, like)(whole)
    return found[0]


def gradients(problem: Problem, fallback: Fallback, given: Arrays, *, of_bias: bool) -> Arrays:
    """Return gradients by argument: those of query, key and value in all batch items."""
    if of_bias:
        shape = shape_of_bias_gradient(problem, given["bias"].shape)
        problem = problem._replace(bias=shape)
        given = given | {"bias_gradient": jnp.zeros(shape, problem.accumulator)}
    results = run("differentiate", problem, fallback, given)
    names = [
        name.removesuffix("_gradient")
        for name in result_shapes("differentiate", problem, tuple(given))
    ]
    found = dict(zip(names, results, strict=True))
    delta = found.pop("delta")
    if "sinks" in given:
        logsumexp = given["logsumexp"][..., 0]
        shift = jnp.where(logsumexp == -jnp.inf, 0, logsumexp)
        by_head = with_rank(given["sinks"].astype(shift.dtype)[:, None], shift.ndim)
        weights = jnp.exp(by_head - shift) * delta[..., 0]
        found["sinks"] = -jnp.sum(weights, axis=(*range(weights.ndim - 2), -1))
    if "softcap" in found:
        found["softcap"] = jnp.sum(found["softcap"])
    return found
