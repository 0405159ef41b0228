"""JAX's devices and primitives.

Arrays may be traced, so only `fetch` and `synchronize` read values or wait for them.

The kernels are in modules of their own; docs/recipes.md says where each step of the formula is.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import operator
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from polyattn._core.tiles.online_softmax import or_zero
from polyattn.plugin import Array, Backend, native
from polyattn_jax.cudnn import JaxCudnn
from polyattn_jax.devices import all_devices, device_of
from polyattn_jax.forward import visible_product
from polyattn_jax.tile import PRIMITIVES, product
from polyattn_jax.xla import Xla

# Without jax_enable_x64 JAX narrows these to 32 bits.
NARROWED = {"float64", "int64", "uint64", "uint32"}
ENGINES = {
    "cudnn": ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12"),
    "cuda plugin": ("jax-cuda13-plugin", "jax-cuda12-plugin"),
}


class JaxBackend(Backend):
    """JAX arrays, traced ones too, on any of JAX's devices."""

    kernels = (JaxCudnn(), Xla())

    def __init__(self) -> None:
        super().__init__(jnp)

    def devices(self) -> list[str]:
        """Return the available devices, JAX's default first."""
        return list(all_devices())

    def hardware(self, device: str) -> dict[str, str | int]:
        """Return the facts that JAX knows about a device."""
        handle: Any = device_of(device)
        known: dict[str, str | int] = {}
        if handle.platform != "cpu":  # the kind of a CPU is only "cpu"
            known["name"] = handle.device_kind
        memory = (handle.memory_stats() or {}).get("bytes_limit")
        if memory is not None:
            known["memory"] = memory
        capability = getattr(handle, "compute_capability", None)
        if capability is not None:
            known["compute_capability"] = str(capability)
        return known

    def engines(self) -> dict[str, str]:
        """Return the versions of cuDNN and of JAX's CUDA plugin, if they are installed."""
        versions: dict[str, str] = {}
        for engine, packages in ENGINES.items():
            for package in packages:
                with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                    versions.setdefault(engine, importlib.metadata.version(package))
        return versions

    def lacks(self, dtype: str) -> str | None:
        """Refuse float64 unless it is enabled: JAX would silently make it float32."""
        if dtype != "float64" or _has_float64():
            return None
        return "JAX has float64 only after jax.config.update('jax_enable_x64', True)"

    def place(self, array: Array, device: str | None) -> jax.Array:
        """Return `array` as a JAX array, without a copy where possible."""
        result: jax.Array = array if isinstance(array, jax.Array) else _import(array)
        return result if device is None else jax.device_put(result, device_of(device))

    def fetch(self, array: Array) -> Any:
        """Return a copy as a NumPy array: JAX's own memory must not be written to."""
        return np.array(array)

    def synchronize(self, device: str | None = None) -> None:
        """Wait until all work on the device is done."""
        # A device works in order, so a new computation ends after all earlier ones.
        handle = jax.devices()[0] if device is None else device_of(device)
        with jax.ensure_compile_time_eval():  # also where a program is traced around the call
            (_scalar_on(handle) + 0).block_until_ready()

    def compile(self, function: Callable[..., Array]) -> Callable[..., Array]:
        """Return the function under jax.jit."""
        compiled: Callable[..., Array] = jax.jit(function)
        return compiled

    def matmul(self, a: Array, b: Array) -> jax.Array:
        """Return the matrix product of two stacks of matrices."""
        return _matmul(a, b)

    def compared(self, compare: Callable[[Array, Array], Array], query: Array, key: Array) -> Array:
        """Return `compare(query, key)`, whose derivative takes 0 for NaN and ±inf."""
        # A function with a derivative of its own may close over no array that is differentiated.
        compare, arrays = jax.closure_convert(compare, query, key)

        @jax.custom_jvp
        def run(*x: Array) -> Array:
            return compare(*x)

        @run.defjvp
        def rule(primals: Sequence[Array], tangents: Sequence[Array]) -> tuple[Any, Any]:
            cleaned = tuple([jnp.where(jnp.isfinite(x), x, 0) for x in primals])
            return run(*primals), jax.jvp(compare, cleaned, tuple(tangents))[1]

        return run(query, key, *arrays)

    def over_size(
        self, term: Callable[[Any, Array, Array], Array], query: Array, key: Array
    ) -> Array:
        """Sum a function of one entry of queries and keys over D."""
        # Outside of `jit` a loop is compiled anew for each call.
        if isinstance(query, jax.core.Tracer) or isinstance(key, jax.core.Tracer):
            return PRIMITIVES.over_size(term, query, key)
        return super().over_size(term, query, key)

    def in_turn(
        self, function: Callable[[Any], Any], starts: Sequence[int], *arrays: Array
    ) -> Iterable[Any]:
        """Return what a function of some arrays returns for each start, by a loop of a program.

        A gradient computes it again, so that nothing is kept from one start to the next.
        """
        if len(starts) == 1 or not any(isinstance(x, jax.core.Tracer) for x in arrays):
            return map(function, starts)
        stacked = jax.lax.map(jax.checkpoint(function), jnp.asarray(starts))
        return [jax.tree.map(operator.itemgetter(n), stacked) for n in range(len(starts))]

    def visible_product(self, weights: Array, seen: Array, x: Array) -> jax.Array:
        """Return weights · x, to which x adds nothing where it is not seen."""
        result: jax.Array = _visible_product(weights, seen, x)
        return result

    def softmax(self, scores: Array) -> tuple[Array, Array, Array]:
        """Return the softmax before its division, the maximum a constant to a gradient."""
        # The result does not depend on it, and the gradient of a maximum looks for the score that
        # equals it, which XLA may have computed again with another rounding.
        # NaN is in the weights only: what a row is multiplied by reaches the values' gradient.
        usual = jnp.where(scores < jnp.inf, scores, -jnp.inf)
        maximum = jax.lax.stop_gradient(jnp.max(usual, axis=-1, keepdims=True))
        weights = jnp.exp(scores - or_zero(jnp, maximum))
        return weights, maximum, jnp.sum(weights, axis=-1, keepdims=True)

    def largest(self, numbers: Array, count: int) -> Array:
        """Return the places of the largest numbers of each row, without sorting them all."""
        # Which takes 0 for larger than −0.
        return jnp.sort(jax.lax.top_k(jnp.where(numbers == 0, 0, numbers), count)[1], axis=-1)

    def pullback(self, function: Callable[[Array], Array], array: Array, gradient: Array) -> Array:
        """Return the gradient of an array from that of a function of it."""
        _, back = jax.vjp(function, array)
        (result,) = back(gradient)
        # An absent key has a gradient of 0, whatever the function's slope is there.
        return jnp.where((gradient == 0) & ~jnp.isfinite(result), 0, result)


@jax.custom_jvp
def _product(a: Array, b: Array) -> Array:
    return product(a, b)


_matmul: Callable[[Array, Array], jax.Array] = jax.jit(_product)


@functools.partial(_product.defjvp, symbolic_zeros=True)
def _matmul_tangent(primals: tuple[Array, Array], tangents: tuple[Any, Any]) -> tuple[Any, Any]:
    """Return product and tangent; that by `a` leaves out what is not finite in `b`."""
    # It is in a key. Where that is seen, the weights and their gradients are NaN too. Where it is
    # hidden, the gradient of its score is 0, and 0 · NaN would spoil that of the query.
    (a, b), (a_tangent, b_tangent) = primals, tangents
    whole = _matmul(a, b)
    parts = []
    if not isinstance(a_tangent, SymbolicZero):
        parts.append(_matmul(a_tangent, jnp.where(jnp.isfinite(b), b, 0)))
    if not isinstance(b_tangent, SymbolicZero):
        parts.append(_matmul(jnp.where(jnp.isfinite(a), a, 0), b_tangent))
    return whole, sum(parts[1:], parts[0]) if parts else jnp.zeros_like(whole)


@lru_cache
def _scalar_on(device: Any) -> jax.Array:
    scalar: jax.Array = jax.device_put(0.0, device)
    return scalar


def _has_float64() -> bool:
    return bool(jax.dtypes.canonicalize_dtype(np.float64) == np.float64)


def _import(array: Array) -> jax.Array:
    """Import an array of another library; without float64, bias and sinks become float32."""
    if not isinstance(array, (np.ndarray, np.generic)):
        if _has_float64() or str(array.dtype).rpartition(".")[2] not in NARROWED:
            try:
                return jnp.from_dlpack(array)
            except Exception:  # a layout, dtype or device that JAX does not take by DLPack
                pass
        array = np.from_dlpack(array)
    array = native(array)
    if array.dtype.kind in "iu" and not _has_float64():
        narrow = array.astype(np.int32)
        if not np.array_equal(narrow, array):
            raise ValueError(
                "JAX has integers beyond 32 bits, for lengths or ids of a mask, only after"
                " jax.config.update('jax_enable_x64', True)"
            )
        array = narrow
    with np.errstate(over="ignore"):  # float64's finfo.min in a bias becomes −inf
        return jnp.asarray(array)


@jax.jit
def _visible_product(weights: Array, seen: Array, x: Array) -> Array:
    return visible_product(_matmul, weights, lambda: seen, weights, x)
