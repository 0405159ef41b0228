"""The compiled kernel of the JAX backend, which XLA calls in its programs for the CPU."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from polyattn.plugin import (
    Array,
    Backend,
    Cotangents,
    Gradients,
    Kernel,
    Operands,
    Problem,
    Residuals,
    Tangents,
    with_rank,
)
from polyattn_native.visible import Ranges, parts_of
from polyattn_native.xla_program import (
    DIFFERENTIABLE,
    Arrays,
    Fallback,
    gradients,
    run,
    summed,
)

# Masks that leave each row a first and a last key, whatever their arrays hold.
RANGES = frozenset(("Band", "Prefix", "Padding", "Filled", "CachePadding"))
# Larger positions could overflow int32 when a window is added to them.
FAR = 2**29


class NativeOnJax(Kernel):
    """The kernel of NumPy's arrays as a custom call of XLA."""

    name = "native"
    features = frozenset({
        "backward", "batch_broadcast", "bias", "causal", "dropout", "grouped_heads", "jvp",
        "logsumexp", "mask", "mask_expression", "query_offset", "query_offset_array", "scale",
        "sinks", "softcap", "value_size", "window",
    })  # fmt: skip
    batch_invariant = True
    takes_empty = False
    devices = frozenset({"cpu"})

    def reasons_against(self, problem: Problem) -> list[str]:
        """Return why a call is left to XLA."""
        reasons = []
        if not all(isinstance(length, int) for length in problem.scores):
            reasons.append("it is compiled for lengths, and these are symbolic")
        if not problem.device and jax.default_backend() != "cpu":
            reasons.append(
                f"it runs on cpu only, and JAX would put this on {jax.default_backend()}"
            )
        parts = [] if problem.mask_spec is None else parts_of(problem.mask_spec)
        names = [type(part).__name__ for part in parts]
        if names.count("Dense") > 1 or not RANGES.issuperset(set(names) - {"Dense"}):
            reasons.append("it takes an array and masks by position and lengths only")
        if "backward" in problem.features:
            if problem.bias is not None and "bias" not in problem.constants:
                reasons.append("it computes no gradient of a bias")
            if problem.scale == 0:
                reasons.append("it computes no gradient of a scale of 0")
        return reasons

    def __call__(
        self, problem: Problem, operands: Operands, backend: Backend
    ) -> tuple[Array, Array | None]:
        """Return the output, and the logsumexp if the problem asks for it."""
        fallback = _fallback(backend)
        if _is_manual(operands):
            return fallback.kernel(problem, operands, backend)
        problem, arrays = plain(problem, operands)
        output, logsumexp = _attend(problem, fallback, arrays)
        return output, logsumexp if "logsumexp" in problem.features else None

    def backward(
        self, problem: Problem, operands: Operands, residuals: Residuals, cotangents: Cotangents,
        backend: Backend,
    ) -> Gradients:  # fmt: skip
        """Return the gradients."""
        fallback = _fallback(backend)
        if _is_manual((operands, residuals, cotangents)):
            return fallback.kernel.backward(problem, operands, residuals, cotangents, backend)
        problem, arrays = plain(problem, operands)
        found: Gradients = _backward(problem, fallback, arrays, operands[:3], residuals, cotangents)
        return found

    def jvp(
        self, problem: Problem, operands: Operands, residuals: Residuals, tangents: Tangents,
        backend: Backend,
    ) -> tuple[Array, Array | None]:  # fmt: skip
        """Return the tangents of output and logsumexp."""
        fallback = _fallback(backend)
        if _is_manual((operands, residuals, tangents)):
            return fallback.kernel.jvp(problem, operands, residuals, tangents, backend)
        problem, arrays = plain(problem, operands)
        found: tuple[Array, Array] = _jvp(problem, fallback, arrays, residuals, tangents)
        return found


@functools.lru_cache
def _fallback(backend: Backend) -> Fallback:
    return Fallback(next(k for k in backend.kernels if k.name == "xla"), backend)


def _is_manual(arrays: Any) -> bool:
    """Return whether arrays are one device's parts, inside of ``jax.shard_map``."""
    leaves = [leaf for leaf in jax.tree.leaves(arrays) if isinstance(leaf, jax.Array)]
    return any(not leaf.aval.sharding.mesh.empty for leaf in leaves) if leaves else False


def plain(problem: Problem, x: Operands) -> tuple[Problem, Arrays]:
    """Return a call in what the library takes, its arrays by name, each with all axes."""
    rank, exact = len(problem.batch) + 3, problem.accumulator
    given: dict[str, Any] = {"query": x.query, "key": x.key, "value": x.value}
    ranges = Ranges(problem, x, jnp, str(jnp.asarray(0).dtype), FAR)
    if isinstance(x.mask, jax.Array):
        given["mask"] = x.mask
    elif x.mask is not None:
        for part in parts_of(x.mask):
            if type(part).__name__ == "Dense":
                given["mask"] = part.array
            else:
                ranges.add(part)
    if problem.query_offset is None and problem.band is not None:
        ranges.add(problem.band)
        problem = problem._replace(is_causal=False, window=(None, None), query_offset=0)
    for name, rows in (("first", ranges.first), ("stop", ranges.stop)):
        if rows is not None:
            lead = problem.batch if rows.shape[0] != 1 else (1,) * len(problem.batch)
            given[name] = rows.reshape(*lead, 1, rows.shape[1], 1)
    if x.bias is not None:
        given["bias"] = x.bias.astype(exact)
    arrays = {name: with_rank(array, rank) for name, array in given.items()}
    if x.sinks is not None:
        arrays["sinks"] = x.sinks.astype(exact)
    if problem.dropout:
        arrays["seed_low"], arrays["seed_high"] = _words_of(x.seed)
        start: Any = problem.dropout_start
        start = x.dropout_start if start is None else np.asarray(start) % 2**32
        arrays["start"] = jnp.asarray(start).astype("uint32")
    return _without_arrays(problem), arrays


def _without_arrays(problem: Problem) -> Problem:
    """Return a problem that is the same for calls that are compiled to the same program."""
    features = problem.features - {"mask_expression", "query_offset_array"}
    if problem.band is None:
        features -= {"causal", "window"}
    return problem._replace(
        device="",
        traced=True,
        mask=None,
        bias=None,
        bias_dtype=None if problem.bias is None else problem.accumulator,
        mask_spec=None,
        features=features,
        constants=frozenset(),
    )


def _words_of(seed: Any) -> tuple[Array, Array]:
    """Return the low and high word of a seed."""
    if isinstance(seed, int):
        return jnp.asarray(np.uint32(seed & 0xFFFFFFFF)), jnp.asarray(np.uint32(seed >> 32))
    if jnp.iinfo(seed.dtype).bits > 32:
        return seed.astype("uint32"), (seed >> 32).astype("uint32")
    return seed.astype("uint32"), jnp.zeros((), "uint32")


@functools.partial(jax.jit, static_argnums=(0, 1))
def _attend(problem: Problem, fallback: Fallback, arrays: Arrays) -> tuple[Array, Array]:
    output, logsumexp = run("attend", problem, fallback, arrays)
    return output, logsumexp[..., 0]


@functools.partial(jax.jit, static_argnums=(0, 1))
def _backward(
    problem: Problem, fallback: Fallback, arrays: Arrays, qkv: tuple[Array, ...],
    residuals: Residuals, cotangents: Cotangents,
) -> Gradients:  # fmt: skip
    exact = problem.accumulator
    given = arrays | _residuals(problem, residuals)
    given["output_gradient"] = cotangents.output.astype(exact)
    if cotangents.logsumexp is not None:
        given["logsumexp_gradient"] = cotangents.logsumexp.astype(exact)[..., None]
    found = gradients(problem, fallback, given)
    seen = given["logsumexp"] != -jnp.inf
    products = jnp.where(seen, found["query"] * arrays["query"].astype(exact), 0)
    named = zip(("query", "key", "value"), qkv, strict=True)
    shaped = {n: summed(found[n], arrays[n].shape).reshape(x.shape) for n, x in named}
    return Gradients(
        **shaped,
        sinks=found.get("sinks"),
        score_mod=[],
        similarity=[],
        scale=jnp.sum(products) / problem.scale,
        softcap=found.get("softcap"),
    )


@functools.partial(jax.jit, static_argnums=(0, 1))
def _jvp(
    problem: Problem, fallback: Fallback, arrays: Arrays, residuals: Residuals, tangents: Tangents
) -> tuple[Array, Array]:
    given = arrays | _residuals(problem, residuals)
    for name in DIFFERENTIABLE:
        tangent = getattr(tangents, name)
        if tangent is not None:
            tangent = tangent.astype(problem.accumulator)
            given[f"{name}_tangent"] = (
                tangent if name == "sinks" else tangent.reshape(arrays[name].shape)
            )
    output, logsumexp = run("push_forward", problem, fallback, given)
    return output, logsumexp[..., 0]


def _residuals(problem: Problem, residuals: Residuals) -> Arrays:
    exact = problem.accumulator
    return {
        "output": residuals.output.astype(exact),
        "logsumexp": residuals.logsumexp.astype(exact)[..., None],
    }
