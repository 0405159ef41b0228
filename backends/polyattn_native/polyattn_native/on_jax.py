"""The compiled kernel of the JAX backend, which XLA calls in its programs for the CPU."""

from __future__ import annotations

import functools
from typing import Any, ClassVar

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
    band,
    in_one_piece,
    undeclared,
    with_rank,
)
from polyattn_native.kernel import Native
from polyattn_native.visible import Ranges, kind_of
from polyattn_native.xla_operands import Arrays
from polyattn_native.xla_program import Fallback, gradients, run
from polyattn_native.xla_scores import shapes_of, summed

# Masks that leave each row a first and a last key, whatever their arrays hold.
RANGES = frozenset(("window", "prefix", "padding"))
# Features of a call that do not follow from its arrays.
KEPT = frozenset(("logsumexp", "sinks", "bias", "dropout", "mask", "softcap", "score_expression"))
# Offsets that JAX can hold in an array.
OFTEN_NEW = range(-(2**31), 2**31)


class NativeOnJax(Native):
    """The kernel for arrays of NumPy as a custom call of XLA."""

    # Its own lists: what the library computes, XLA's programs may not pass on.
    features = frozenset({
        "batch_broadcast", "bias", "block_table", "causal", "dropout", "grouped_heads", "logsumexp",
        "mask", "mask_expression", "query_offset", "query_offset_array", "scale",
        "score_expression", "sinks", "softcap", "value_size", "window",
    })  # fmt: skip
    differentiates: ClassVar = dict.fromkeys(("backward", "jvp"), frozenset({
        "batch_broadcast", "bias", "causal", "dropout", "grouped_heads", "mask", "mask_expression",
        "query_offset", "query_offset_array", "scale", "score_expression", "sinks", "softcap",
        "value_size", "window",
    }))  # fmt: skip
    devices = frozenset({"cpu"})
    counts_far = Kernel.counts_far
    reads_quantized = Kernel.reads_quantized

    def reasons_against(self, problem: Problem) -> list[str]:
        """Return why a call is left to XLA."""
        reasons = super().reasons_against(problem)
        if not all(isinstance(length, int) for length in problem.scores):
            reasons.append("it is compiled for lengths, and these are symbolic")
        if not problem.device and (kind := default_kind()) != "cpu":
            reasons.append(f"it runs on cpu only, and JAX would put this on {kind}")
        conditions = () if problem.mask_spec is None else problem.mask_spec.conditions
        kinds = list(map(kind_of, conditions))
        if kinds.count("dense") > 1 or not RANGES.issuperset(set(kinds) - {"dense"}):
            reasons.append("it takes an array and masks by position and lengths only")
        # What is traced may be differentiated, by the rules of this kernel.
        missing = undeclared(self, problem.features | {"jvp"}) if problem.traced else None
        if missing is not None:
            reasons.append(missing)
        return reasons

    def __call__(
        self, problem: Problem, operands: Operands, backend: Backend
    ) -> tuple[Array, Array | None]:
        """Return the output, and the logsumexp if the problem asks for it."""
        other = _fallback(backend)
        if _has_sharding(operands):
            return other.kernel(problem, in_one_piece(operands), backend)
        output, logsumexp = _attend(*prepared(problem, operands), other)
        return output, logsumexp if "logsumexp" in problem.features else None

    def backward(
        self, problem: Problem, operands: Operands, residuals: Residuals, cotangents: Cotangents,
        backend: Backend,
    ) -> Gradients:  # fmt: skip
        """Return the gradients."""
        other = _fallback(backend)
        if _has_sharding((operands, residuals, cotangents)):
            return other.kernel.backward(problem, operands, residuals, cotangents, backend)
        found: Gradients = _backward(*prepared(problem, operands), other, residuals, cotangents)
        return found

    def jvp(
        self, problem: Problem, operands: Operands, residuals: Residuals, tangents: Tangents,
        backend: Backend,
    ) -> tuple[Array, Array | None]:  # fmt: skip
        """Return the tangents of output and logsumexp."""
        other = _fallback(backend)
        if _has_sharding((operands, residuals, tangents)):
            return other.kernel.jvp(problem, operands, residuals, tangents, backend)
        found: tuple[Array, Array] = _jvp(*prepared(problem, operands), other, residuals, tangents)
        return found


def default_kind() -> str:
    """Return the platform of the default device."""
    chosen: Any = jax.config.jax_default_device  # type: ignore[attr-defined]
    return jax.default_backend() if chosen is None else str(getattr(chosen, "platform", chosen))


@functools.lru_cache
def _fallback(backend: Backend) -> Fallback:
    return Fallback(next(k for k in backend.kernels if k.name == "xla"), backend)


def _has_sharding(arrays: Any) -> bool:
    """Return whether the types of arrays say how they are sharded, but for parts of one device."""
    leaves = [leaf for leaf in jax.tree.leaves(arrays) if isinstance(leaf, jax.Array)]
    meshes: list[Any] = [jax.typeof(leaf).sharding.mesh for leaf in leaves]
    manual = jax.sharding.AxisType.Manual
    return any(kind != manual for mesh in meshes if not mesh.empty for kind in mesh.axis_types)


def prepared(problem: Problem, x: Operands) -> tuple[Problem, Operands]:
    """Return a call whose problem is hashed and whose operands are arrays only, to be compiled.

    Numbers that often change are arrays: lengths, a seed, an offset beside which keys are hidden.
    """
    mask: Any = x.mask
    if problem.mask_spec is not None:
        mask = mask.with_lengths(_on_device)
        problem = problem._replace(mask_spec=mask.spec())
        mask = [array for _, array in mask.carried()]
    scores: Any = x.score_mod
    has_scores = problem.score_spec is not None
    if has_scores:
        scores = [array for _, array in scores.carried()]
    offset: Any = problem.query_offset
    usual = problem.key_length - problem.query_length
    if offset is None:
        offset = x.query_offset
    elif band(problem) == (None, None) and not has_scores:
        problem, offset = problem._replace(is_causal=False, window=(None, None)), None
    elif not problem.traced and offset in OFTEN_NEW and offset != usual:
        problem, offset = problem._replace(query_offset=None), _on_device(offset, (1, 1, 1))
    else:
        offset = None
    if problem.band is None and problem.mask_spec is None and not has_scores:
        problem, offset = problem._replace(query_offset=0), None
    seed: Any = x.seed
    if isinstance(seed, int):
        seed = jax.device_put((np.uint32(seed & 0xFFFFFFFF), np.uint32(seed >> 32)))
    problem = problem._replace(
        device="",
        traced=True,
        bias_dtype=None,
        constants=problem.constants & {"bias"},
        features=problem.features & KEPT,
    )
    return problem, x._replace(mask=mask, score_mod=scores, query_offset=offset, seed=seed)


def _on_device(number: int, shape: tuple[int, ...] = ()) -> Array:
    return jax.device_put(np.full(shape, min(number, 2**31 - 1), np.int32))


def plain(problem: Problem, x: Operands) -> tuple[Problem, Arrays]:
    """Return a prepared call in what the library takes, its arrays by name, each with all axes."""
    rank, exact = len(problem.batch) + 3, problem.accumulator
    given: dict[str, Any] = {"query": x.query, "key": x.key, "value": x.value}
    ranges = Ranges(problem, x, jnp)
    if problem.mask_spec is None:
        given |= {} if x.mask is None else {"mask": x.mask}
    else:
        carried: Any = x.mask
        rest = iter(carried)
        mask: Any = problem.mask_spec.map(lambda _, thing: next(rest))
        for part in mask.conditions:
            if kind_of(part) == "dense":
                given["mask"] = part.array
            else:
                ranges.add(part)
    if problem.query_offset is None:
        if problem.band is not None:
            ranges.add(problem.band)
        problem = problem._replace(is_causal=False, window=(None, None))
        if problem.score_spec is None:
            problem = problem._replace(query_offset=0)
        else:
            given["positions"] = x.query_offset
    for name, rows in (("first", ranges.first), ("stop", ranges.stop)):
        if rows is not None:
            lead = problem.batch if rows.shape[0] != 1 else (1,) * len(problem.batch)
            given[name] = rows.reshape(*lead, 1, rows.shape[1], 1)
    if x.bias is not None:
        given["bias"] = x.bias.astype(exact)
    arrays = {name: with_rank(array, rank) for name, array in given.items()}
    if x.block_table is not None:
        arrays |= _through_table(problem, x, arrays["stop"])
    scores: Any = x.score_mod or []
    arrays |= zip(shapes_of(problem), scores, strict=True)
    if x.sinks is not None:
        arrays["sinks"] = x.sinks.astype(exact)
    if problem.dropout:
        arrays["seed_low"], arrays["seed_high"] = _words_of(x.seed)
        start: Any = problem.dropout_start
        start = x.dropout_start if start is None else np.asarray(start) % 2**32
        arrays["start"] = jnp.asarray(start).astype("uint32")
    return problem._replace(mask_spec=None, mask=None, bias=None), arrays


def _through_table(problem: Problem, x: Operands, stop: Array) -> Arrays:
    """Return the table, whose pages are all there, and a query of NaN where one was not."""
    table: Any = x.block_table
    rank, pages = len(stop.shape), x.key.shape[0]
    table = with_rank(table[..., None, None, :], rank)
    begins = with_rank(jnp.arange(0, problem.key_length, problem.page, "int32"), rank)
    is_wrong = (begins < stop) & ((table < 0) | (table >= pages))
    query = jnp.where(jnp.any(is_wrong, -1, keepdims=True), jnp.nan, with_rank(x.query, rank))
    return {"query": query, "table": jnp.clip(table, 0, pages - 1).astype("int32")}


def _words_of(seed: Any) -> tuple[Array, Array]:
    """Return the low and high word of a seed."""
    if isinstance(seed, tuple):
        return seed
    high = seed >> 32 if seed.dtype.itemsize > 4 else jnp.zeros_like(seed)
    return seed.astype("uint32"), high.astype("uint32")


@functools.partial(jax.jit, static_argnums=(0, 2))
def _attend(problem: Problem, x: Operands, other: Fallback) -> tuple[Array, Array]:
    problem, arrays = plain(problem, x)
    output, logsumexp = run("attend", problem, other, arrays)
    return output, logsumexp[..., 0]


@functools.partial(jax.jit, static_argnums=(0, 2))
def _backward(
    problem: Problem, x: Operands, other: Fallback, residuals: Residuals, cotangents: Cotangents
) -> Gradients:
    problem, arrays = plain(problem, x)
    exact = problem.accumulator
    given = arrays | _residuals(problem, residuals)
    given["output_gradient"] = cotangents.output.astype(exact)
    if cotangents.logsumexp is not None:
        given["logsumexp_gradient"] = cotangents.logsumexp.astype(exact)[..., None]
    of_bias = x.bias is not None and "bias" not in problem.constants
    found = gradients(problem, other, given, of_bias=of_bias)
    seen = given["logsumexp"] != -jnp.inf
    products = jnp.where(seen, found["query"] * arrays["query"].astype(exact), 0)

    def shaped(name: str) -> Array:
        whole = summed(found[name], arrays[name].shape)
        return whole.reshape(getattr(x, name).shape)

    return Gradients(
        query=shaped("query"),
        key=shaped("key"),
        value=shaped("value"),
        bias=shaped("bias") if of_bias else None,
        sinks=found.get("sinks"),
        score_mod=[found[name] for name in shapes_of(problem)],
        similarity=[],
        scale=jnp.sum(products) / problem.scale,
        softcap=found.get("softcap"),
    )


@functools.partial(jax.jit, static_argnums=(0, 2))
def _jvp(
    problem: Problem, x: Operands, other: Fallback, residuals: Residuals, tangents: Tangents
) -> tuple[Array, Array]:
    problem, arrays = plain(problem, x)
    given = arrays | _residuals(problem, residuals)
    for name, tangent in tangents._asdict().items():
        if tangent is not None:
            shaped = tangent.reshape(arrays[name].shape)
            given[f"{name}_tangent"] = shaped.astype(problem.accumulator)
    output, logsumexp = run("push_forward", problem, other, given)
    return output, logsumexp[..., 0]


def _residuals(problem: Problem, residuals: Residuals) -> Arrays:
    exact = problem.accumulator
    return {
        "output": residuals.output.astype(exact),
        "logsumexp": residuals.logsumexp.astype(exact)[..., None],
    }
