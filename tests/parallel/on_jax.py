"""Strategies on the devices of JAX, as a program: ``on_jax.py CHECK…``.

``value:CASE:STRATEGY:LAYOUT`` and ``gradients:…`` are cases of the conformance suite.
"""

import re
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import on_ranks
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from polyattn import attention, masks, parallel, scores
from polyattn.conformance import CASES, Target
from polyattn.conformance.cases.gradient_cases import BACKWARD_CASES
from polyattn.conformance.checks.gradients import compare
from polyattn.conformance.reference.gradients import cotangent, gradient_yardsticks
from polyattn.conformance.reference.tolerance import deviation, output_yardstick


def over_devices(strategy, layout, arrays, options, others, along=None, *, check_vma=True):
    """Return the output, and the gradients of the arrays and of other options if one is given.

    All are whole, in the order of the sequence.
    """
    size = jax.device_count()
    mesh = jax.make_mesh((size,), ("ring",), axis_types=(AxisType.Auto,))
    spread = [strategy != "decode", True, True]
    # The last axis but one is that of tokens.
    specs = [
        PartitionSpec(*[None] * (x.ndim - 2), "ring") if has_part else PartitionSpec()
        for x, has_part in zip(arrays, spread, strict=True)
    ]

    def attend(arrays, others):
        how = {"over": "ring", "strategy": strategy, "layout": layout}
        return parallel.attention(*arrays, **how, **options, **others)

    def reordered(order, array, has_part):
        return order(array, size, layout=layout) if has_part else array

    on_mesh = jax.jit(
        jax.shard_map(
            attend, mesh=mesh, in_specs=(specs, {n: PartitionSpec() for n in others}),
            out_specs=specs[0], check_vma=check_vma,
        )
    )  # fmt: skip
    given = [reordered(parallel.permute, *pair) for pair in zip(arrays, spread, strict=True)]
    if along is None:
        return reordered(parallel.unpermute, on_mesh(given, others), spread[0])
    output, transpose = jax.vjp(on_mesh, given, others)
    found, of_others = jax.jit(transpose)(reordered(parallel.permute, along, spread[0]))
    whole = [reordered(parallel.unpermute, *pair) for pair in zip(found, spread, strict=True)]
    named = dict(zip(on_ranks.WHOLE, whole, strict=True)) | of_others
    return reordered(parallel.unpermute, output, spread[0]), named


def check_case(what, name, strategy, layout):
    """Check the output or the gradients of a case by the suite's oracle."""
    gradients, to = what == "gradients", Target("jax").to
    case = on_ranks.resized((BACKWARD_CASES if gradients else CASES)[name], jax.device_count())
    arrays, options = on_ranks.arguments(case, to)
    others = {name: options.pop(name) for name in ("bias", "sinks") if name in options}
    how = strategy, layout, arrays, options, others
    if gradients:
        for check_vma in {True, strategy != "decode"}:
            _, found = over_devices(*how, to(cotangent(case)), check_vma=check_vma)
            compare(case, {name: np.asarray(found[name]) for name in gradient_yardsticks(case)})
        return
    output = np.asarray(over_devices(*how))
    off = deviation(output, output_yardstick(case), f"{case}: {strategy}")
    assert off.fault is None, off.fault


def check_options_of_another_axis(strategies=on_ranks.STRATEGIES):
    """Check the gradients of options that differ along a mesh axis, of which tokens do not."""
    mesh, x = mesh_and_tokens()
    bias = jnp.asarray(np.random.default_rng(1).standard_normal((mesh.shape["data"], 4, 8, 8)))

    def expected(*x):
        *x, bias = x
        return jnp.stack([attention(*x, bias=own, sinks=own[:, 0, 0]) for own in bias])

    for strategy in strategies:

        def attend(query, key, value, bias, strategy=strategy):
            if strategy == "decode":  # of which JAX does not know that it is the same everywhere
                query = jax.lax.all_gather(query, "ring", axis=-2, tiled=True)
            options = {"bias": bias[0], "sinks": bias[0, :, 0, 0]}
            how = {"over": "ring", "strategy": strategy}
            return parallel.attention(query, key, value, **how, **options)[None]

        tokens, spread = PartitionSpec(None, "ring"), PartitionSpec("data")
        rows = spread if strategy == "decode" else PartitionSpec("data", None, "ring")
        on_mesh = jax.shard_map(
            attend, mesh=mesh, in_specs=(tokens, tokens, tokens, spread), out_specs=rows
        )
        compare_slopes(on_mesh, expected, *x, bias)
    print("options of another axis: right")


def check_mesh_of_two_axes():
    """Check a batch over one axis and tokens over another, with numbers that each device has."""
    mesh, _ = mesh_and_tokens()
    x = jnp.asarray(np.random.default_rng(0).standard_normal((3, 4, 4, 8, 4)))
    options = {
        "mask": masks.segments([0, 0, 0, 1, 1, 1, 1, 1]) & masks.dense(np.eye(8) == 0),
        "bias": np.linspace(0, 1, 64).reshape(8, 8),
        "sinks": [0.5, 1.0, 1.5, 2.0],
        "score_mod": scores.alibi([0.1, 0.2, 0.3, 0.4]),
        "query_offset": np.asarray(-1),
    }
    spread = PartitionSpec("data", None, "ring")
    for strategy in on_ranks.STRATEGIES:

        def attend(*arrays, strategy=strategy):
            assert parallel.positions(arrays[1], over="ring", axis=-2).shape == (4,)
            start = jnp.asarray([2, 0, 0, 0]) * jax.lax.axis_index("data")  # this device's first
            how = {"over": "ring", "strategy": strategy, "dropout": (0.2, jnp.asarray(3), start)}
            return parallel.attention(*arrays, **how, **options)

        rows = PartitionSpec("data") if strategy == "decode" else spread
        specs = rows, spread, spread
        on_mesh = jax.shard_map(attend, mesh=mesh, in_specs=specs, out_specs=rows)
        compare_slopes(on_mesh, partial(attention, dropout=(0.2, 3), **options), *x)
    print("two axes: right")


def check_functions_of_traced_arrays(strategies=("ring",)):
    """Check that a function over a traced array is refused by name where its gradient is asked."""
    mesh, x = mesh_and_tokens()
    spec = PartitionSpec(None, None, "ring")

    def attend(x, slope):
        def bent(score, b, h, i, j):
            return score - slope * (i - j)

        return parallel.attention(*x, over="ring", strategy=strategies[0], score_mod=bent)

    specs = PartitionSpec(None, None, None, "ring"), PartitionSpec()
    on_mesh = jax.shard_map(attend, mesh=mesh, in_specs=specs, out_specs=spec)
    assert jax.jit(on_mesh)(jnp.stack([x, x, x]), 0.5).shape == x.shape
    with pytest.raises(TypeError, match=r"function in score_mod= uses slope, which JAX traces"):
        jax.grad(lambda slope: on_mesh(jnp.stack([x, x, x]), slope).sum())(0.5)
    print("functions of traced arrays: refused")


def mesh_and_tokens():
    """Return a mesh of two axes over all devices, or over one, and a query, key and value."""
    size = 2 if jax.device_count() == 4 else 1
    mesh = jax.make_mesh((size, size), ("data", "ring"), axis_types=(AxisType.Auto,) * 2)
    return mesh, jnp.asarray(np.random.default_rng(0).standard_normal((3, 4, 8, 4)))


def compare_slopes(function, expected, *arrays):
    """Compare the values and the gradients of two functions."""

    def loss(function, *arrays):
        return (function(*arrays) ** 2).sum()

    which = tuple(range(len(arrays)))
    found, wanted = (
        jax.jit(jax.value_and_grad(partial(loss, f), which))(*arrays) for f in (function, expected)
    )
    for one, other in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
        assert abs(one - other).max() <= 1e-13 * max(1.0, abs(other).max())


def check_heads_need_no_collectives():
    """Check that attention over sharded batches and heads makes no device wait."""
    mesh = jax.make_mesh((2, 2), ("data", "heads"), axis_types=(AxisType.Auto,) * 2)
    place = NamedSharding(mesh, PartitionSpec("data", "heads"))
    x = jax.device_put(jnp.ones((2, 4, 16, 8), jnp.float32), place)
    attend = jax.jit(lambda x: attention(x, x, x, is_causal=True, kernel="xla"))
    program = attend.lower(x).compile().as_text()
    found = re.findall(r"all-reduce|all-gather|all-to-all|collective-permute", program)
    assert not found, found
    assert attend(x).sharding.spec == place.spec
    print("heads: no collectives")


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    for name in sys.argv[1:]:
        if ":" in name:
            check_case(*name.split(":"))
            print(f"{name}: right")
        else:
            globals()[f"check_{name}"]()
