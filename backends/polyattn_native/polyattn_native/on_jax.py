"""The compiled kernel of the JAX backend, which XLA calls in its programs for the CPU."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterable
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
    Mask,
    Operands,
    Problem,
    Residuals,
    band,
    in_one_piece,
    undeclared,
)
from polyattn_native.kernel import Native
from polyattn_native.selected import selects
from polyattn_native.visible import kind_of
from polyattn_native.xla_arguments import (
    arguments,
    by_distance,
    constant_ends,
    is_constant,
    is_range,
)
from polyattn_native.xla_call import Arrays
from polyattn_native.xla_primitive import attend, by_xla, gradients

# A program makes an array of a mask that its arrays decide, at most of so many elements.
MOST_ELEMENTS = 2**28
ARRAYS = ("query", "key", "value", "bias", "sinks")


class NativeOnJax(Native):
    """The kernel for arrays of NumPy as a custom call of XLA."""

    devices = frozenset({"cpu"})
    features = Native.features - {"mask_mod"}
    counts_far = Kernel.counts_far
    reads_quantized = Kernel.reads_quantized
    promises = Native.promises - {"reads_selections"}

    def reasons_against(self, problem: Problem) -> list[str]:
        """Return why a call is left to XLA."""
        reasons = super().reasons_against(problem)
        if selects(problem):
            reasons.append("it reads selected keys of NumPy and torch only")
        if not all(isinstance(length, int) for length in problem.scores):
            reasons.append("it is compiled for lengths, and these are symbolic")
        chosen: Any = jax.config.jax_default_device or jax.default_backend()  # type: ignore[attr-defined]
        kind = getattr(chosen, "platform", chosen)
        if not problem.device and kind != "cpu":
            reasons.append(f"it runs on cpu only, and JAX would put this on {kind}")
        conditions = () if problem.mask_spec is None else problem.mask_spec.conditions
        if not reasons and _makes_an_array(problem, conditions):
            elements = math.prod(problem.batch) * problem.query_length * problem.key_length
            if elements > MOST_ELEMENTS:
                reasons.append(f"it would make an array of the mask, of {elements:,} elements")
        # What is traced may be differentiated, by the rules of this kernel.
        missing = undeclared(self, problem.features | {"backward"}) if problem.traced else None
        return reasons if missing is None else [*reasons, missing]

    def __call__(
        self, problem: Problem, operands: Operands, backend: Backend
    ) -> tuple[Array, Array | None]:
        """Return the output, and the logsumexp if the problem asks for it."""
        if _has_sharding(operands):
            return by_xla(backend, problem)(problem, in_one_piece(operands), backend)
        output, logsumexp = _attend(*prepared(problem, operands), backend)
        return output, logsumexp if "logsumexp" in problem.features else None

    def backward(
        self, problem: Problem, operands: Operands, residuals: Residuals, cotangents: Cotangents,
        backend: Backend,
    ) -> Gradients:  # fmt: skip
        """Return the gradients."""
        if _has_sharding((operands, residuals, cotangents)):
            return by_xla(backend, problem).backward(
                problem, operands, residuals, cotangents, backend
            )
        found: Gradients = _backward(*prepared(problem, operands), backend, residuals, cotangents)
        return found


def _makes_an_array(problem: Problem, conditions: Iterable[Mask]) -> bool:
    """Return whether a part of a mask is neither ranges of keys nor an array of the caller's."""
    others = [one for one in conditions if not is_range(one) and kind_of(one) != "dense"]
    if not all(map(is_constant, others)):
        return True
    return bool(others) and constant_ends(problem, others) is None


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
    mask, rule, offset, seed = (
        getattr(x, n) for n in ("mask", "score_mod", "query_offset", "seed")
    )
    is_fixed = False  # whether the ranges of a mask are constants
    if problem.mask_spec is not None:
        conditions = mask.conditions
        is_fixed = any(map(is_constant, conditions))
        mask = functools.reduce(
            operator.and_,
            [one if is_constant(one) else one.with_lengths(_on_device) for one in conditions],
        )
        problem = problem._replace(mask_spec=mask.spec())
        mask = [array for _, array in mask.carried()]
    if problem.score_spec is not None:
        rule = [array for _, array in rule.carried()]
    elif problem.query_offset is not None and band(problem) == (None, None):
        problem = problem._replace(is_causal=False, window=(None, None))
    usual, first = problem.key_length - problem.query_length, problem.query_offset
    if all(one is None for one in (problem.band, problem.mask_spec, problem.score_spec)):
        problem, offset = problem._replace(query_offset=0), None
    elif (
        first is not None
        and not (problem.traced or is_fixed)
        and abs(first) < 2**31
        and first != usual
    ):
        problem, offset = problem._replace(query_offset=None), _on_device(first, (1, 1, 1))
    elif first is not None:
        offset = None
    if isinstance(seed, int):
        seed = jax.device_put((np.uint32(seed & 0xFFFFFFFF), np.uint32(seed >> 32)))
    bias = problem.constants & {"bias"}
    facts = {"device": "", "traced": True, "bias_dtype": None, "features": frozenset()}
    problem = problem._replace(**facts, constants=bias)  # type: ignore[arg-type]
    return problem, x._replace(mask=mask, score_mod=rule, query_offset=offset, seed=seed)


def _on_device(number: int, shape: tuple[int, ...] = ()) -> Array:
    return jax.device_put(np.full(shape, min(number, 2**31 - 1), np.int32))


@functools.partial(jax.jit, static_argnums=(0, 2))
def _attend(problem: Problem, x: Operands, backend: Backend) -> tuple[Array, Array]:
    problem, arrays = arguments(problem, x)
    output, logsumexp = attend(problem, backend, arrays)
    return output, logsumexp[..., 0]


@functools.partial(jax.jit, static_argnums=(0, 2))
def _backward(
    problem: Problem, x: Operands, backend: Backend, residuals: Residuals, cotangents: Cotangents
) -> Gradients:
    call, arrays = arguments(problem, x)
    arrays |= _rows_of(problem, residuals)
    arrays |= {f"{n}_gradient": a for n, a in _rows_of(problem, cotangents).items()}
    names = [n for n in ARRAYS if n in arrays and n not in problem.constants]
    found = gradients(call, backend, arrays, names + (["by_distance"] if x.score_mod else []))
    score_mod: list[Array] = []
    if x.score_mod:
        pull = jax.vjp(functools.partial(by_distance, problem, x), x.score_mod)[1]
        score_mod = pull(found["by_distance"])[0]
    # A row that sees no key may hold NaN.
    products = found["query"] * arrays["query"].astype(problem.accumulator)
    seen = arrays["logsumexp"] != -jnp.inf
    return Gradients(
        **{n: found[n].reshape(getattr(x, n).shape) if n in names else None for n in ARRAYS},
        score_mod=score_mod,
        similarity=[],
        scale=jnp.sum(jnp.where(seen, products, 0)) / problem.scale,
        softcap=found.get("softcap"),
    )


def _rows_of(problem: Problem, record: Residuals | Cotangents) -> Arrays:
    """Return output and logsumexp (..., H, L, 1), or the gradients of them that are given."""
    found = {"output": record.output.astype(problem.accumulator)}
    if record.logsumexp is not None:
        found["logsumexp"] = record.logsumexp.astype(problem.accumulator)[..., None]
    return found
