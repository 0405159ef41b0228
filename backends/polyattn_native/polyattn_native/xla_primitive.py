"""The compiled library as a primitive of JAX, with its batching and its derivatives.

``attend`` gives output and logsumexp, ``push_forward`` tangents, ``differentiate`` gradients::

    attend  ── jvp ──→  attend, push_forward  ── transpose ──→  differentiate

The first and the last become custom calls of the library. `push_forward`, of which reverse mode
needs the transpose only, is a program of the kernel that XLA compiles. So are the others where the
program is for other devices, for several of them or to be exported, under `vmap` over what the
library has once a call, and in derivatives of derivatives.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad as untyped_ad
from jax.interpreters import batching, mlir, xla

from polyattn.plugin import Array, Backend, Cotangents, Kernel, Problem, Residuals, with_rank
from polyattn_native.call import shape_of_bias_gradient
from polyattn_native.xla_arguments import gathered, operands
from polyattn_native.xla_call import (
    ADDRESSES,
    POOLS,
    PRODUCTS,
    Arrays,
    Results,
    Shape,
    call_library,
)

#: Arguments with a derivative.
DIFFERENTIABLE = ("query", "key", "value", "bias", "by_distance", "sinks")

# These functions of JAX have no types.
ad: Any = untyped_ad

primitive: Any = Primitive("polyattn_native")
primitive.multiple_results = True
primitive.def_impl(functools.partial(xla.apply_primitive, primitive))


def by_xla(backend: Backend, problem: Problem) -> Kernel:
    """Return the kernel that XLA compiles, which computes what the library is not called for."""
    if problem.same_bits:
        raise ValueError(
            "in same_bits() the kernel native does not support dropout under vmap, vmap over masks"
            " and tables only, forward and second derivatives, and programs for several devices or"
            " export: make the call outside of the block"
        )
    return next(kernel for kernel in backend.kernels if kernel.name == "xla")


class LibraryCall(NamedTuple):
    """A function, and the names of its arrays."""

    function: str
    problem: Problem
    backend: Backend
    arguments: tuple[str, ...]
    results: Results

    def by_library(self, *arrays: Array) -> Any:
        """Return the results by a custom call."""
        named = dict(zip(self.arguments, arrays, strict=True))
        return call_library(self.function, self.problem, named, self.results)

    def by_program(self, *arrays: Array) -> list[Any]:
        """Return the results by the program of another kernel."""
        named = dict(zip(self.arguments, arrays, strict=True))
        if self.function == "differentiate":
            return self._gradients(named)
        if self.function == "attend":
            return self._attention(self.problem, named)
        exact = self.problem._replace(dtype=self.problem.accumulator)
        tangents = {n: named[f"{n}_tangent"] for n in named if f"{n}_tangent" in named}
        wide = {n: named[n].astype(exact.dtype) for n in {*tangents, "query", "key", "value"}}
        primals = {name: wide[name] for name in tangents}
        attention = lambda primals: self._attention(exact, named | wide | primals)  # noqa: E731
        return jax.jvp(attention, (primals,), (tangents,))[1]  # type: ignore[no-any-return]

    def _attention(self, problem: Problem, arrays: Arrays) -> list[Any]:
        kernel = by_xla(self.backend, problem)
        output, logsumexp = kernel(*operands(problem, arrays), self.backend)
        return [output, logsumexp[..., None]]  # type: ignore[index]

    def _gradients(self, arrays: Arrays) -> list[Any]:
        shapes = {name.removesuffix("_gradient"): shape for name, shape, _ in self.results}
        whole = {n: jnp.broadcast_to(arrays[n], shapes[n]) for n in arrays if n in shapes}
        output, along = arrays["output"], arrays["output_gradient"]
        delta = jnp.sum(output * along, axis=-1, keepdims=True)
        of_logsumexp = arrays.get("logsumexp_gradient")
        if of_logsumexp is not None:
            delta, of_logsumexp = delta - of_logsumexp, of_logsumexp[..., 0]
        residuals = Residuals(output=output, logsumexp=arrays["logsumexp"][..., 0])
        cotangents = Cotangents(output=along, logsumexp=of_logsumexp)
        call = operands(self.problem, arrays | whole)
        found = by_xla(self.backend, self.problem).backward(
            *call, residuals, cotangents, self.backend
        )
        by_name: dict[str, Any] = found._asdict() | {"delta": delta}
        by_name["by_distance"] = next(iter(found.score_mod or []), None)
        if found.softcap is not None:  # of the rows only their sum is used
            by_name["softcap"] = jnp.full(delta.shape, found.softcap / math.prod(delta.shape))
        return [by_name[name] for name in shapes]


def attend(problem: Problem, backend: Backend, arrays: Arrays, suffix: str = "") -> list[Array]:
    """Return output and logsumexp (..., H, L, 1), or with a suffix their tangents."""
    dtype = problem.accumulator if suffix else problem.dtype
    results = (
        (f"output{suffix}", (*problem.scores[:-1], problem.value_size), dtype),
        (f"logsumexp{suffix}", (*problem.scores[:-1], 1), problem.accumulator),
    )
    return _run("push_forward" if suffix else "attend", problem, backend, arrays, results)


def gradients(problem: Problem, backend: Backend, arrays: Arrays, of: Iterable[str]) -> Arrays:
    """Return the gradients of these arguments, in their shapes, and that of the softcap."""
    rows = (*problem.scores[:-1], 1)
    names = ("query", "key", "value", *(["by_distance"] if "by_distance" in of else []))
    shapes = {f"{n}_gradient": (*problem.batch, *arrays[n].shape[-3:]) for n in names}
    shapes |= {"delta": rows} | ({} if problem.softcap is None else {"softcap_gradient": rows})
    if "bias" in of:
        shapes["bias_gradient"] = shape_of_bias_gradient(problem, arrays["bias"].shape)
    results = tuple([(name, shape, problem.accumulator) for name, shape in shapes.items()])
    found = _run("differentiate", problem, backend, arrays, results)
    whole = {n.removesuffix("_gradient"): x for n, x in zip(shapes, found, strict=True)}
    given = {name: _summed(whole[name], arrays[name].shape) for name in of if name != "sinks"}
    if "sinks" in of:
        logsumexp, sinks = arrays["logsumexp"], with_rank(arrays["sinks"][:, None, None], len(rows))
        weights = jnp.exp(sinks - jnp.where(logsumexp == -jnp.inf, 0, logsumexp))
        axes = (*range(len(problem.batch)), -2, -1)
        given["sinks"] = -jnp.sum(weights * whole["delta"], axis=axes)
    if "softcap" in whole:
        given["softcap"] = jnp.sum(whole["softcap"])
    return given


def _summed(gradient: Array, shape: Shape) -> Array:
    """Return the sum over the axes along which an argument of this shape was broadcast."""
    pairs = enumerate(zip(gradient.shape, shape, strict=True))
    axes = [axis for axis, (whole, part) in pairs if part == 1 and whole != 1]
    return jnp.sum(gradient, axis=axes, keepdims=True) if axes else gradient


def _run(
    function: str, problem: Problem, backend: Backend, arrays: Arrays, results: Results
) -> list[Array]:
    call = LibraryCall(function, problem, backend, tuple(arrays), results)
    found: list[Array] = primitive.bind(*_varying_alike([*arrays.values()]), call=call)
    return found


def _varying_alike(arrays: list[Array]) -> list[Any]:
    """Return arrays that vary along the same manual axes of a mesh, inside of ``jax.shard_map``."""
    kinds: list[Any] = [jax.typeof(array) for array in arrays]
    axes = [frozenset(getattr(kind, "vma", ())) for kind in kinds]  # until JAX 0.9
    if hasattr(kinds[0], "manual_axis_type"):
        axes = [kind.manual_axis_type.varying for kind in kinds]
    missing = [tuple(sorted(frozenset().union(*axes) - own)) for own in axes]
    lax: Any = jax.lax
    vary = functools.partial(lax.pcast, to="varying") if hasattr(lax, "pcast") else lax.pvary
    return [vary(x, more) if more else x for x, more in zip(arrays, missing, strict=True)]


# ---- compilation ----


@primitive.def_abstract_eval  # type: ignore[untyped-decorator]
def _shapes(query: Any, *arrays: Any, call: LibraryCall) -> list[Any]:
    facts = [{"shape": shape, "dtype": jnp.dtype(dtype)} for _, shape, dtype in call.results]
    return [query.update(**one, weak_type=False) for one in facts]


_lower_call: Any = mlir.lower_fun(lambda *x, call: call.by_library(*x))
_lower_program: Any = mlir.lower_fun(lambda *x, call: call.by_program(*x))


def _lower(context: Any, *values: Any, call: LibraryCall) -> Any:
    """Return a custom call, or the program: of tangents, and for XLA to partition or export."""
    module = context.module_context
    devices = module.axis_context
    if hasattr(devices, "num_devices"):
        is_whole = (devices.num_devices or jax.device_count()) == 1
    else:  # in shard_map each device computes its part
        is_whole = set(devices.mesh.axis_names) <= set(getattr(devices, "manual_axes", ()))
    is_called = is_whole and call.function in PRODUCTS
    is_called = is_called and not module.lowering_parameters.for_export
    return (_lower_call if is_called else _lower_program)(context, *values, call=call)


# Ask JAX to pass the devices to the lowering. There is no public API; without this the lowering
# knows less, and leaves more calls to XLA.
with contextlib.suppress(ImportError, AttributeError):
    dispatch: Any = importlib.import_module("jax._src.dispatch")
    dispatch.prim_requires_devices_during_lowering.add(primitive)
# And JAX caches by other facts; older versions cache nothing.
_has_cache = "cacheable" in inspect.signature(mlir.register_lowering).parameters
_options: dict[str, Any] = {"cacheable": False} if _has_cache else {}
mlir.register_lowering(primitive, _lower_program, **_options)
mlir.register_lowering(primitive, _lower, platform="cpu", **_options)


# ---- batching ----


def _batch(arrays: Any, axes: Any, call: LibraryCall) -> tuple[Any, Any]:
    """Add a batch axis, or map the program if an array without batch axes is mapped."""
    size = next(x.shape[axis] for x, axis in zip(arrays, axes, strict=True) if axis is not None)
    whole = [
        name in ADDRESSES or (name in POOLS and "table" in call.arguments)
        for name in call.arguments
    ]
    is_split = any(axis is not None for axis, one in zip(axes, whole, strict=True) if one)
    # Dropout counts the items of a call.
    if call.function not in PRODUCTS or call.problem.dropout or is_split or size == 0:
        results = jax.vmap(call.by_program, axes)(*arrays)
        return results, [0] * len(results)
    given = [
        x if one else x[None] if axis is None else jnp.moveaxis(x, axis, 0)
        for x, axis, one in zip(arrays, axes, whole, strict=True)
    ]
    problem = call.problem._replace(batch=(size, *call.problem.batch))
    shapes = [(name, (size, *shape), dtype) for name, shape, dtype in call.results]
    mapped = call._replace(problem=problem, results=tuple(shapes))
    found = primitive.bind(*given, call=mapped)
    return found, [0] * len(found)


batching.primitive_batchers[primitive] = _batch


# ---- derivatives ----


def _jvp(primals: Any, tangents: Any, call: LibraryCall) -> tuple[Any, Any]:
    """Return results and their tangents; of derivatives those of the program."""
    if call.function != "attend":
        whole = tuple([ad.instantiate_zeros(tangent) for tangent in tangents])
        return jax.jvp(call.by_program, tuple(primals), whole)
    problem, pairs = call.problem, zip(call.arguments, tangents, strict=True)
    arrays = dict(zip(call.arguments, primals, strict=True))
    given = {n: t for n, t in pairs if n in DIFFERENTIABLE and not isinstance(t, ad.Zero)}
    given, arrays = gathered(given, arrays), gathered(arrays, arrays)
    # The derivatives need the output before it is rounded.
    exact = problem._replace(dtype=problem.accumulator)
    wide = arrays | {n: arrays[n].astype(exact.dtype) for n in ("query", "key", "value")}
    output, logsumexp = attend(exact, call.backend, wide)
    given = {f"{name}_tangent": tangent.astype(exact.dtype) for name, tangent in given.items()}
    given |= arrays | {"output": output, "logsumexp": logsumexp}
    of_output, of_logsumexp = attend(problem, call.backend, given, "_tangent")
    output, of_output = output.astype(problem.dtype), of_output.astype(problem.dtype)
    return [output, logsumexp], [of_output, of_logsumexp]


ad.primitive_jvps[primitive] = _jvp


def _transpose(cotangents: Any, *arrays: Any, call: LibraryCall) -> list[Any]:
    """Return the gradients of the tangents that `push_forward` takes."""
    linear = [n for n, x in zip(call.arguments, arrays, strict=True) if ad.is_undefined_primal(x)]
    named = dict(zip(call.arguments, arrays, strict=True))
    if call.function == "push_forward":
        given = {name: x for name, x in named.items() if not name.endswith("_tangent")}
        given["output_gradient"] = ad.instantiate_zeros(cotangents[0])
        if not isinstance(cotangents[1], ad.Zero):
            given["logsumexp_gradient"] = cotangents[1]
        names = [name.removesuffix("_tangent") for name in linear]
        found = gradients(call.problem, call.backend, given, names)
        by_name = {name: found[one] for name, one in zip(linear, names, strict=True)}
    else:  # the transpose of a transpose

        def program(arrays: Arrays) -> list[Any]:
            return call.by_program(*(named | arrays).values())

        like = {name: jnp.zeros(named[name].aval.shape, named[name].aval.dtype) for name in linear}
        whole = [ad.instantiate_zeros(cotangent) for cotangent in cotangents]
        by_name = jax.linear_transpose(program, like)(whole)[0]
    return [by_name.get(name) for name in call.arguments]


ad.primitive_transposes[primitive] = _transpose
