"""The compiled kernel on JAX arrays, under JAX's transforms, and in its programs."""

import os
import shutil
import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import close, draw

import polyattn
from polyattn import explain, masks, scores
from polyattn_native.on_jax import _attend

SOURCE = Path(__file__).resolve().parents[2] / "backends" / "polyattn_native" / "src"


def small(*shape, seed=0):
    return draw(shape, to=jnp.asarray, seed=seed)[0]


def same(found, expected):
    """Compare trees of arrays to the roundings of sums that two libraries make."""
    close(jax.tree.leaves(found), jax.tree.leaves(expected), 200)


AXES = {
    "the second axis": ((1, 1, 1), {"window": (5, 2)}),
    "keys": ((None, 0, 0), {"is_causal": True}),
    "rows": ((0, None, None), {"softcap": 3.0}),
    "a mask": ((0, 0, None), {"mask": masks.padding(jnp.asarray([3, 9]))}),
}


@pytest.mark.parametrize(("axes", "options"), AXES.values(), ids=AXES)
def test_vmap_equals_a_loop_and_is_one_call(axes, options):
    whole = [small(3, 3, 2, 4, 11, 8, seed=i) for i in range(3)]
    given = [x if axis is not None else x[0] for x, axis in zip(whole, axes, strict=True)]

    def loss(*x):
        return jnp.sum(polyattn.attention(*x, **options, kernel="native") ** 2)

    def both(*x):
        return jax.value_and_grad(loss, (0, 1, 2))(*x)

    inner = jax.vmap(both)
    mapped = jax.vmap(inner, axes)
    items = [
        inner(*[x if a is None else jnp.take(x, i, a) for x, a in zip(given, axes, strict=True)])
        for i in range(3)
    ]
    looped = jax.tree.map(lambda *x: jnp.stack(x), *items)
    same(mapped(*given), looped)
    text = str(jax.make_jaxpr(mapped)(*given))
    assert "while" not in text
    assert "scan" not in text


#: What a call has of each item, and options of it.
OF_ITEMS = {
    "bias": (small(3, 2, 1, 11, 11, seed=1), lambda bias: {"bias": bias}),
    "slopes": (
        small(3, 4, seed=1),
        lambda slopes: {
            "score_mod": scores.alibi(slopes), "query_offset": jnp.asarray([0, 3])
        },
    ),
    "seed": (jnp.arange(3), lambda seed: {"dropout": (0.4, seed)}),
}  # fmt: skip


@pytest.mark.parametrize("name", OF_ITEMS)
def test_options_of_each_item_may_be_mapped(name):
    x, (given, options) = small(3, 2, 4, 11, 8), OF_ITEMS[name]

    def gradients(kernel):
        def loss(x, given):
            return jnp.sum(polyattn.attention(x, x, x, **options(given), kernel=kernel) ** 2)

        return jax.jit(jax.vmap(jax.grad(loss, 0 if name == "seed" else (0, 1))))

    same(gradients("native")(x, given), gradients("xla")(x, given))
    if name == "bias":
        text = gradients("native").lower(x, given).as_text()
        assert "@polyattn_differentiate" in text
        assert "dot_general" not in text


def test_a_far_offset_reads_the_last_bucket():
    x, table = small(2, 4, 11, 8), small(8, 4, seed=1)
    options = {"score_mod": scores.relative_bias(table, max_distance=16), "query_offset": 2**40}

    def call(kernel):
        return jax.jit(lambda x: polyattn.attention(x, x, x, **options, kernel=kernel))(x)

    same(call("native"), call("xla"))


def test_gradients_under_vmap_over_sinks_are_those_of_xla():
    def call(kernel):
        def gradients(x, sinks):
            pull = polyattn.attention_vjp(x, x, x, sinks=sinks, softcap=2.0, kernel=kernel)[1]
            found = pull(x, x[..., 0])
            return found.query, found.sinks, found.softcap, found.scale

        return jax.vmap(gradients)(small(3, 2, 4, 11, 8), small(3, 4, seed=1))

    same(call("native"), call("xla"))


def test_a_long_call_is_computed_to_its_end():
    x = small(1, 4, 2048, 64)  # the library returns after 30 ms, to be called again
    wanted = polyattn.attention(*[np.asarray(x)] * 3, kernel="native")
    np.testing.assert_allclose(polyattn.attention(x, x, x, kernel="native"), wanted, atol=1e-6)


def test_derivatives_of_derivatives_are_those_of_xla():
    x, bias = small(2, 3, 4), small(3, 3)

    def loss(kernel):
        return lambda x, b: jnp.sum(jnp.sin(polyattn.attention(x, x, x, bias=b, kernel=kernel)))

    def hessian(kernel, jacobian):
        return jax.jit(jacobian(jax.grad(loss(kernel), (0, 1))))(x, bias)

    same(hessian("native", jax.jacrev), hessian("dense", jax.jacfwd))


def test_a_linearized_call_is_computed_by_xla_and_transposed_by_the_library():
    x = small(2, 3, 11, 8)

    def call(kernel):
        return lambda x: polyattn.attention(x, x, x, is_causal=True, kernel=kernel)

    push = jax.linearize(call("native"), x)[1]
    same(push(x), jax.jvp(call("xla"), (x,), (x,))[1])
    assert "@polyattn" not in jax.jit(push).lower(x).as_text()
    text = jax.jit(jax.linear_transpose(push, x)).lower(x).as_text()
    assert "@polyattn_differentiate" in text
    assert "dot_general" not in text


def test_few_rows_read_keys_of_another_layout_where_they_lie():
    query, key = small(2, 3, 4, 8), small(2, 600, 2, 8, seed=1)

    def attend(query, key):
        return polyattn.attention(query, key, key, kernel="native", layout="...LHD")

    compiled = jax.jit(attend).lower(query, key).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < key.nbytes / 4
    output, pull = jax.vjp(attend, query, key)
    arrays = np.asarray(query), *[np.asarray(key)] * 2
    wanted, pullback = polyattn.attention_vjp(*arrays, kernel="dense", layout="...LHD")
    gradients = pullback(wanted)
    same((output, *pull(output)), (wanted, gradients.query, gradients.key + gradients.value))


def test_subnormal_halves_are_not_flushed_to_0():
    x, value = jnp.zeros((1, 1, 3, 9), "float16"), jnp.full((1, 1, 3, 9), 2e-5, "float16")
    np.testing.assert_array_equal(polyattn.attention(x, x, value, kernel="native"), value)


def test_a_new_offset_length_or_seed_compiles_nothing():
    x = small(2, 4, 10, 8)
    before = None
    for i in range(3):
        polyattn.attention(x[:, :, :1], x, x, is_causal=True, query_offset=i, kernel="native")
        polyattn.attention(x, x, x, mask=masks.padding(3 + i), kernel="native")
        polyattn.attention(x, x, x, dropout=(0.5, i), kernel="native")
        before = before or _attend._cache_size()
    assert _attend._cache_size() == before


def test_it_computes_without_jit_and_says_where_a_nan_comes_from():
    x = small(2, 4, 10, 8)

    def attend(x):
        return polyattn.attention(x, x, x, is_causal=True, kernel="native")

    def loss(x):
        return (attend(x) ** 2).sum()

    for function in (jax.grad(loss), jax.vmap(attend)):
        wanted = function(x)
        for quietly in (jax.disable_jit(), jax.debug_nans(True)):
            with quietly:
                np.testing.assert_allclose(function(x), wanted, atol=1e-6)
    x *= jnp.nan
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="polyattn_native"):
        attend(x)


def test_an_axis_of_length_0_may_be_mapped():
    x, y = small(0, 4, 10, 8), small(4, 10, 8)

    def attend(x, y):
        return polyattn.attention(x, y, y, is_causal=True, score_mod=scores.alibi(4))

    mapped = jax.vmap(attend, in_axes=(0, None))
    assert mapped(x, y).shape == x.shape
    gradients = jax.jit(jax.grad(lambda x, y: mapped(x, y).sum(), (0, 1)))(x, y)
    assert [gradient.shape for gradient in gradients] == [x.shape, y.shape]


def test_what_it_does_not_take_is_left_to_xla():
    x = small(2, 4, 10, 8)
    late = scores.alibi(4) >> scores.temperature(2.0)
    assert explain(x, x, x, score_mod=scores.alibi(4)).chosen.kernel == "native"
    assert explain(x, x, x, score_mod=late).chosen.kernel == "xla"
    long = small(1, 1, 20_000, 2)
    streaming = masks.window(9, 0) | masks.prefix(4)
    assert explain(long, long, long, mask=streaming).chosen.kernel == "native"
    of_ids = explain(long, long, long, mask=masks.segments(jnp.zeros(20_000, int)))
    assert of_ids.chosen.kernel == "xla"
    assert "an array of the mask, of 400,000,000 elements" in str(of_ids)


@pytest.mark.parametrize("offset", [3, [3, 9]], ids=str)
def test_ranges_of_masks_are_constants_of_a_program(offset):
    x, lengths = small(2, 4, 20, 8), jnp.asarray([7, 19])
    mask = masks.causal() & (masks.window(5, 0) | masks.prefix(2)) & masks.padding(lengths)

    def call(x):
        first = jnp.asarray(offset) if isinstance(offset, list) else offset
        return polyattn.attention(x, x, x, mask=mask, query_offset=first, kernel="native")

    compiled = jax.jit(call).lower(x).compile()
    same(compiled(x), call(x))
    makes_array = "pred[2,1,20,20]" in compiled.as_text()
    assert makes_array == isinstance(offset, list)


def test_an_exported_program_needs_no_library():
    x = small(2, 4, 10, 8)

    def call(x):
        return polyattn.attention(x, x, x, is_causal=True, score_mod=scores.alibi(4))

    exported = jax.export.export(jax.jit(call))(x)
    assert "@polyattn_" not in exported.mlir_module()
    np.testing.assert_allclose(exported.call(x), call(x), atol=1e-6)


SAME = """
#include "xla_ffi.h"
#include "xla/ffi/api/c_api.h"
#define SAME(a, b) static_assert(offsetof a == offsetof b)
SAME((xla::Frame, api), (XLA_FFI_CallFrame, api));
SAME((xla::Frame, stage), (XLA_FFI_CallFrame, stage));
SAME((xla::Frame, arguments), (XLA_FFI_CallFrame, args));
SAME((xla::Frame, results), (XLA_FFI_CallFrame, rets));
SAME((xla::Frame, attributes), (XLA_FFI_CallFrame, attrs));
SAME((xla::Buffers, count), (XLA_FFI_Args, size));
SAME((xla::Buffers, buffers), (XLA_FFI_Rets, rets));
SAME((xla::Buffer, data), (XLA_FFI_Buffer, data));
SAME((xla::Attributes, types), (XLA_FFI_Attrs, types));
SAME((xla::Attributes, names), (XLA_FFI_Attrs, names));
SAME((xla::Attributes, values), (XLA_FFI_Attrs, attrs));
SAME((xla::Text, size), (XLA_FFI_ByteSpan, len));
SAME((xla::Array, data), (XLA_FFI_Array, data));
SAME((xla::ErrorArguments, code), (XLA_FFI_Error_Create_Args, errc));
SAME((xla::Api, version), (XLA_FFI_Api, api_version));
SAME((xla::Api, create_error), (XLA_FFI_Api, XLA_FFI_Error_Create));
SAME((xla::Metadata, version), (XLA_FFI_Metadata, api_version));
SAME((xla::Metadata, traits), (XLA_FFI_Metadata, traits));
SAME((xla::MetadataExtension, metadata), (XLA_FFI_Metadata_Extension, metadata));
static_assert((int)xla::EXECUTE == XLA_FFI_ExecutionStage_EXECUTE);
static_assert((int)xla::METADATA == XLA_FFI_Extension_Metadata);
static_assert((int)xla::ATTRIBUTE_ARRAY == XLA_FFI_AttrType_ARRAY);
static_assert((int)xla::S64 == XLA_FFI_DataType_S64);
static_assert((int)xla::INVALID_ARGUMENT == XLA_FFI_Error_Code_INVALID_ARGUMENT);
static_assert((int)xla::RESOURCE_EXHAUSTED == XLA_FFI_Error_Code_RESOURCE_EXHAUSTED);
static_assert((int)xla::ABORTED == XLA_FFI_Error_Code_ABORTED);
static_assert(XLA_FFI_API_MAJOR == 0);
"""


def test_declarations_lie_as_in_the_header_of_the_installed_jaxlib():
    compiler = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))))
    folders = f"-I{SOURCE}", f"-I{jax.ffi.include_dir()}"
    command = [compiler, "-std=c++20", "-fsyntax-only", *folders, "-x", "c++", "-"]
    done = subprocess.run(command, input=SAME, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_float64():
    with jax.enable_x64(True):
        (x,) = draw((2, 4, 30, 8), dtype="float64")
        options = {"is_causal": True, "query_offset": np.array([-2, 5]), "softcap": 2.0}

        def call(*x):
            return polyattn.attention(*x, **options, kernel="native")

        output, pull = jax.vjp(call, *map(jnp.asarray, (x, x, x)))
        wanted, pullback = polyattn.attention_vjp(x, x, x, **options, kernel="dense")
        assert output.dtype == "float64"
        close((output, *pull(output)), (wanted, *pullback(wanted)[:3]), 200)


@pytest.mark.slow
def test_it_computes_where_jax_does_not_let_it_ask_for_devices(run_python):
    run_python("""
import sys, types
import jax, jax.interpreters.xla, jax.numpy as jnp
genuine = sys.modules["jax._src.dispatch"]
other = sys.modules["jax._src.dispatch"] = types.ModuleType("dispatch")
vars(other).update(vars(genuine))
del other.prim_requires_devices_during_lowering
import polyattn, polyattn_native.xla_primitive as program
assert program.primitive not in genuine.prim_requires_devices_during_lowering
sys.modules["jax._src.dispatch"] = genuine
x = jnp.ones((2, 4, 8, 8))
call = jax.jit(lambda x: polyattn.attention(x, x, x, kernel="native"))
assert "@polyattn_attend" in call.lower(x).as_text()
assert jnp.allclose(call(x), x, atol=1e-5)
""")


@pytest.mark.slow
def test_each_of_several_devices_computes_its_part(run_python, monkeypatch):
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=2"
    monkeypatch.setenv("XLA_FLAGS", flags)
    run_python("""
import jax, jax.numpy as jnp, numpy as np, polyattn
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
exact = np.random.default_rng(0).standard_normal((2, 4, 16, 8))
x = jnp.asarray(exact, "float32")
def call(x):
    return polyattn.attention(x, x, x, is_causal=True, kernel="native")
wanted = polyattn.attention(exact, exact, exact, is_causal=True)
mesh = Mesh(np.array(jax.devices()), ("b",))
placed = jax.device_put(x, NamedSharding(mesh, P("b")))
compiled = jax.jit(call).lower(placed).compile()
assert "all-gather" not in compiled.as_text()
np.testing.assert_allclose(compiled(placed), wanted, atol=1e-5)
np.testing.assert_allclose(call(placed), wanted, atol=1e-5)
assert "polyattn_attend" not in compiled.as_text()  # of a sharded array it has no parts
def slopes(x, y):
    return jax.grad(lambda x, y: jnp.sum(
        polyattn.attention(x, y, y, is_causal=True, kernel="native") ** 2), (0, 1))(x, y)
def expected(x, y):
    output, pull = polyattn.attention_vjp(x, y, y, is_causal=True)
    gradients = pull(2 * output)
    return gradients.query, gradients.key + gradients.value
y = x[:1] + 0
for specs, of_y in ((P("b"), y), (P(None, "b"), x)):
    whole = (specs, P() if of_y is y else specs)
    part = jax.jit(jax.shard_map(slopes, mesh=mesh, in_specs=whole, out_specs=whole))
    assert "polyattn_differentiate" in part.lower(x, of_y).as_text()
    for one, other in zip(part(x, of_y), expected(exact, exact[:len(of_y)])):
        np.testing.assert_allclose(one, other, atol=1e-4)
def of_slopes(kernel):
    def loss(slopes, x):
        score_mod = polyattn.scores.alibi(slopes)
        return jnp.sum(polyattn.attention(x, x, x, score_mod=score_mod, kernel=kernel) ** 2)
    part = jax.grad(loss, (0, 1))
    return jax.jit(jax.shard_map(part, mesh=mesh, in_specs=(P(), P("b")), out_specs=(P(), P("b"))))
assert "polyattn_differentiate" in of_slopes("native").lower(jnp.ones(4), x).as_text()
for one, other in zip(of_slopes("native")(jnp.ones(4), x), of_slopes("xla")(jnp.ones(4), x)):
    np.testing.assert_allclose(one, other, atol=1e-4)
""")


def test_pools_have_derivatives_where_a_call_has_two_batch_axes():
    query, pool = draw((2, 3, 4, 5, 8), (13, 2, 4, 8), to=jnp.asarray)
    table, lengths = np.arange(36).reshape(2, 3, 6) % 13, np.arange(1, 25, 4).reshape(2, 3)

    given = {"block_table": table, "key_lengths": lengths}

    def call(pool):
        return polyattn.attention(query, pool, pool, **given, kernel="native")

    output, pull = jax.vjp(call, pool)
    (found,) = pull(output)
    arrays = map(np.asarray, (query, pool, pool))
    wanted = polyattn.attention_vjp(*arrays, **given, kernel="dense")[1](np.asarray(output))
    same(found, wanted.key + wanted.value)
    pushed = jax.jvp(call, (pool,), (pool,))[1]
    np.testing.assert_allclose(jnp.vdot(pushed, output), jnp.vdot(pool, found), rtol=1e-4)
