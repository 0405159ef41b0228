"""What a kernel must know of a mesh of devices: which arrays vary along its axes, who waits."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax as untyped_lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from polyattn.plugin import Array, split

lax: Any = untyped_lax
Spec: Any = PartitionSpec


def varying_like(state: Any, x: Any) -> Any:
    """Return arrays as ones that vary along the manual mesh axes along which `x` varies."""
    # Inside ``jax.shard_map``, what a loop starts from must vary along the axes of what it adds.
    axes: set[str] = set()
    for leaf in jax.tree.leaves(x):
        for array in split(leaf, lambda x: isinstance(x, jax.Array))[1]:
            axes |= _axes(array)
    return jax.tree.map(lambda one: _along(one, axes) if axes else one, state)


def _axes(array: Any) -> frozenset[str]:
    kind: Any = jax.typeof(array)
    if hasattr(kind, "manual_axis_type"):
        varying: frozenset[str] = kind.manual_axis_type.varying
        return varying
    return getattr(kind, "vma", frozenset())  # until JAX 0.9


def _along(array: Array, axes: set[str]) -> Any:
    missing = tuple(sorted(axes - _axes(array)))
    if not missing:
        return array
    if hasattr(lax, "pcast"):
        return lax.pcast(array, missing, to="varying")
    return lax.pvary(array, missing)


@jax.custom_batching.custom_vmap
def all_finite(result: Array, key: Array, value: Array) -> Array:
    """Return whether a product with values is finite; under vmap, those of all items together."""
    # vmap turns a condition that differs between items into the computation of both branches. Each
    # device learns it of its own part of sharded batches and heads, so that none waits for another.
    if _axes(result) or _axes(key) or _axes(value):  # inside jax.shard_map there are own ones only
        return jnp.all(jnp.isfinite(result))
    return _own_finite(result, key, value)


@all_finite.def_vmap
def _all_finite_under_vmap(
    size: int, batched: list[bool], result: Array, key: Array, value: Array
) -> tuple[Array, bool]:
    return all_finite(result, key, value), False


@custom_partitioning
def _own_finite(result: Array, key: Array, value: Array) -> Array:
    return jnp.all(jnp.isfinite(result))


def _partitioned(mesh: Any, shapes: Any, result: Any) -> Any:
    """Return the check of one device, for the shardings that the arrays have."""
    shardings = tuple(shape.sharding for shape in shapes)
    specs = [tuple(s.spec) + (None,) * len(x.shape) for s, x in zip(shardings, shapes, strict=True)]
    # Devices may differ in the branch that they take only if none of it communicates.
    whole = [spec[len(x.shape) - 2 : len(x.shape)] for spec, x in zip(specs, shapes, strict=True)]
    local = all(axes == (None, None) for axes in whole)

    def check(result: Array, key: Array, value: Array) -> Array:
        own = jnp.all(jnp.isfinite(result))
        return own if local else lax.pmin(own.astype(jnp.int32), mesh.axis_names) == 1

    return mesh, check, NamedSharding(mesh, Spec()), shardings


_own_finite.def_partition(  # type: ignore[no-untyped-call]
    partition=_partitioned,
    infer_sharding_from_operands=lambda mesh, shapes, _: NamedSharding(mesh, Spec()),
    sharding_rule="..., ...2, ...3 ->",
)
