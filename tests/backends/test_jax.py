"""What is JAX's own: transformations, devices, memory."""

import copy
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from arrays import draw

import polyattn
from polyattn import attention, explain, masks
from polyattn_jax import array_operands, loop_layout
from polyattn_jax.backend import JaxBackend
from polyattn_jax.loop_layout import block_sizes, loops
from polyattn_jax.xla import Xla, compiled

Q, K, V = draw((2, 4, 37, 8), (2, 2, 41, 8), (2, 2, 41, 8))


def in_thirds(b, h, i, j):
    return (i + j + b) % 3 != 0


def small_tiles(scores=150):
    kernel = copy.copy(Xla())
    kernel.tile = scores
    return kernel


# ---- the xla kernel ----------------------------------------------------------------------------


@pytest.mark.slow
def test_memory_is_for_a_tile():
    kernel = small_tiles(2**16)

    def call(q, k, v):
        return attention(q, k, v, is_causal=True, kernel=kernel)

    def slope(q, k, v):
        return jax.grad(lambda *x: jnp.sum(call(*x)), (0, 1, 2))(q, k, v)

    x = jax.ShapeDtypeStruct((1, 4, 4096, 64), "float32")
    for function, most in ((call, 4 * 4096**2 * 4 / 16), (slope, 24 * 2**20)):
        compiled = jax.jit(function).lower(x, x, x).compile()
        assert compiled.memory_analysis().temp_size_in_bytes < most


def test_a_length_that_is_given_to_a_program_keeps_its_number():
    assert int(array_operands.length_as_array(2**30)) == 2**30


def test_a_token_with_a_window_reads_the_keys_of_the_window():
    query, key = np.ones((1, 2, 1, 8), np.float32), np.ones((1, 2, 8192, 8), np.float32)

    def bytes_read(tile, **options):
        kernel = small_tiles(tile)
        call = jax.jit(lambda q, k: attention(q, k, k, kernel=kernel, **options))
        return call.lower(query, key).compile().cost_analysis()["bytes accessed"]

    window = {"window": (127, 0), "query_offset": jnp.asarray(8000)}
    for tile in (2**21, 2**13):  # all scores in a tile, and fewer
        assert bytes_read(tile, **window) < bytes_read(tile) / 8


def test_values_are_read_once_unless_one_is_not_finite():
    x = [jax.ShapeDtypeStruct((1, 2, length, 8), "float32") for length in (1, 4096, 4096)]
    mask = jax.ShapeDtypeStruct((1, 4096), "bool")
    call = jax.jit(lambda q, k, v, mask: attention(q, k, v, mask=mask))
    entry = call.lower(*x, mask).compile().as_text().partition("ENTRY")[2]
    of_values = [line for line in entry.splitlines() if ",4096,8]{" in line.partition("(")[0]]
    assert of_values
    assert not [line for line in of_values if "fusion(" in line]


def test_a_token_needs_no_copy_of_the_keys():
    x = [jax.ShapeDtypeStruct((1, 2, length, 64), "float32") for length in (1, 4096, 4096)]
    program = jax.jit(attention).lower(*x).compile()
    assert program.memory_analysis().temp_size_in_bytes < 2 * 4096 * 64 * 4 / 2


def test_an_accelerator_has_larger_tiles(monkeypatch):
    """Also where JAX has not chosen the device, as in a program that is traced."""
    x = jax.ShapeDtypeStruct((1, 4, 2048, 64), "float32")

    def loops_in(kernel):
        return str(jax.make_jaxpr(lambda x: attention(x, x, x, kernel=kernel))(x)).count("scan[")

    assert loops_in("xla") == 2
    monkeypatch.setattr(loop_layout, "default_kind", lambda: "cuda")
    assert loops_in("xla") == 0
    assert loops_in(small_tiles(2**21)) == 2


def test_an_eager_call_with_a_function_goes_to_kernels_that_need_no_compiling():
    q, k, v = map(jnp.asarray, (Q, K, V))
    told = explain(q, k, v, mask=in_thirds)
    assert told.chosen.kernel == "dense"
    assert "jax.jit" in str(told)
    chosen = []

    @jax.jit
    def call(q, k, v):
        chosen.append(explain(q, k, v, mask=in_thirds).chosen.kernel)
        return attention(q, k, v, mask=in_thirds)

    np.testing.assert_allclose(call(q, k, v), attention(Q, K, V, mask=in_thirds), atol=2e-6)
    assert chosen == ["xla"]


def test_nothing_is_moved_to_or_from_the_host():
    q, k, v = map(jnp.asarray, (Q, K, V))
    attention(q, k, v, is_causal=True)
    with jax.transfer_guard("disallow"):
        attention(q, k, v, is_causal=True)


# ---- its layout of loops ---------------------------------------------------------------------


def test_keys_that_no_row_sees_are_not_gone_over():
    whole = explain((1, 1, 8192, 8), (1, 1, 8192, 8), (1, 1, 8192, 8), library="jax").problem
    tile = 512**2

    def steps(problem):
        keys = [firsts for loop in loops(problem, tile) for firsts in loop.first_keys]
        return sum(first < 8192 for firsts in keys for first in firsts)

    rows, columns = block_sizes(whole, tile)
    assert steps(whole) == (8192 // rows) * (8192 // columns)
    assert steps(whole._replace(is_causal=True)) < 0.6 * steps(whole)
    window = whole._replace(is_causal=True, window=(256, 0))
    assert steps(window) <= 2 * (8192 // rows)


@pytest.mark.parametrize(
    ("mask", "lengths"),  # of each block of rows, loop by loop
    [
        (lambda b, h, i, j: (i >= 896) | (j < 16), [[1] * 56, [64] * 8]),
        (lambda b, h, i, j: (i // 16 % 2 == 0) | (j < 16), [[64, 1] * 32]),
        (lambda b, h, i, j: i >= j, [[*range(1, 65)]]),
    ],
    ids=["a few wide rows", "rows that take turns", "causal rows"],
)
def test_few_wide_rows_alone_have_a_loop_of_their_own(mask, lengths):
    shape, mask = (1, 1, 1024, 8), masks.compile(mask, 1024, tile=16)
    problem = explain(shape, shape, shape, mask=mask, library="jax").problem
    found = loops(problem._replace(mask_spec=mask.spec(tables=True)), 256)
    steps = [[sum(key < 1024 for key in keys) for keys in loop.first_keys] for loop in found]
    assert steps == lengths


# ---- placement ---------------------------------------------------------------------------------


def test_devices_have_names():
    backend = JaxBackend()
    assert backend.devices()[0] == "cpu:0"
    assert explain((2, 3), (2, 3), (2, 3), library="jax").problem.device == "cpu:0"
    info = {info.name: info for info in polyattn.list_backends()}["jax"]
    assert info.available
    assert info.devices[0] == "cpu:0"
    assert "cpu:0" in info.hardware
    backend.synchronize()
    backend.synchronize("cpu:0")


COME = {
    "byte order": ("jax:0", lambda x: x.astype(">f4")),
    "bfloat16": ("jax:cpu", lambda x: torch.from_numpy(x).bfloat16()),
}


@pytest.mark.parametrize("name", COME)
def test_arrays_of_any_library_come_and_the_result_goes_home(name):
    backend, to = COME[name]
    arrays = [to(x) for x in (Q, K, V)]
    ours = attention(*arrays, backend=backend)
    assert type(ours) is type(arrays[0])
    is_half = name.endswith("float16")
    assert not is_half or ours.dtype == arrays[0].dtype
    found = ours.float() if is_half else ours + 0  # which may be written to
    np.testing.assert_allclose(found, attention(Q, K, V), atol=0.05 if is_half else 2e-6)


def test_a_torch_tensor_comes_without_a_copy():
    tensor = torch.arange(64, dtype=torch.float32)
    placed = JaxBackend().place(tensor, None)
    assert placed.unsafe_buffer_pointer() == tensor.data_ptr()


def test_float64_is_kept_or_refused():
    to = torch.from_numpy
    q, k, v = (to(x.astype(np.float64)) for x in (Q, K, V))
    with pytest.raises(polyattn._dispatch.errors.UnsupportedError, match="jax_enable_x64"):
        attention(q, k, v, backend="jax")
    assert explain(q, k, v, backend="jax,numpy").chosen.backend == "numpy"
    q32, k32, v32 = map(to, (Q, K, V))
    bias = to(np.ones((37, 41)))
    assert attention(q32, k32, v32, bias=bias, backend="jax").dtype == q32.dtype
    with jax.enable_x64(True):
        ours = attention(q, k, v, backend="jax", is_causal=True)
        assert ours.dtype == q.dtype
        np.testing.assert_allclose(ours, attention(q, k, v, is_causal=True), atol=1e-14)


def test_offsets_beyond_32_bits_do_not_wrap():
    options = {"is_causal": True, "query_offset": np.array([2**40, -(2**40)])}
    ours, expected = (attention(Q, K, V, **options, backend=name) for name in ("jax", "numpy"))
    np.testing.assert_allclose(ours, expected, atol=2e-6)


def test_a_traced_key_beside_a_query_of_another_library_is_refused():
    with pytest.raises(
        polyattn._dispatch.errors.UnsupportedError, match="key is traced, so the result"
    ):
        jax.jit(lambda k, v: attention(Q, k, v, backend="jax"))(K, V)


NUMBERS = {
    "offset of a window": lambda n: {"window": (3, 2), "query_offset": n},
    "scale": lambda n: {"scale": n / 20, "softcap": n / 5},
    "lengths": lambda n: {"mask": masks.padding(n + 20, n) | masks.prefix(n), "query_offset": n},
}


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_that_changes_is_compiled_once(name):
    q, k, v = map(jnp.asarray, (Q, K, V))
    compiled._clear_cache()
    for number in (5, 11):
        options = NUMBERS[name](number)
        found = attention(q, k, v, kernel="xla", **options)
        np.testing.assert_allclose(found, attention(Q, K, V, **options), atol=2e-6)
    assert compiled._cache_size() == 1


def test_masks_that_hide_nothing_and_other_layouts_are_not_compiled():
    q, k, v = jnp.asarray(Q[:, :, :1]), jnp.asarray(K), jnp.asarray(V)
    compiled._clear_cache()
    for options in ({}, {"is_causal": True}, {"window": (40, 0)}, {"window": (99, 99)}):
        attention(q, k, v, **options, kernel="xla")
    attention(q, k, v, is_causal=True, query_offset=50, kernel="xla")
    swapped = [x.swapaxes(1, 2) for x in (q, k, v)]
    found = attention(*swapped, kernel="xla", layout="...LHD")
    np.testing.assert_array_equal(found.swapaxes(1, 2), attention(q, k, v, kernel="xla"))
    assert compiled._cache_size() == 1


def test_a_bias_beyond_float32_masks_and_warns_of_nothing():
    bias = np.where(np.tri(37, 41) > 0, 0, np.finfo(float).min)
    expected = attention(Q, K, V, is_causal=True, query_offset=0)
    for arrays, backend in ((map(jnp.asarray, (Q, K, V)), None), ((Q, K, V), "jax")):
        found = attention(*arrays, bias=bias, backend=backend)
        np.testing.assert_allclose(found, expected, atol=2e-6)


def test_neither_ranks_nor_dtypes_are_promoted():
    """In 16 bits: gradients, tangents and weights, where JAX refuses both."""
    mask, bias, sinks = map(jnp.asarray, draw((37, 41), (1, 4, 37, 41), (4,)))
    options = {
        **{"mask": mask > 0, "bias": bias, "sinks": sinks, "query_offset": jnp.asarray([0, 7])},
        **{"is_causal": True, "window": (5, 2), "softcap": 1.5},
    }
    q, k, v = (jnp.asarray(x, "bfloat16") for x in (Q, K[0], V))  # keys without a batch axis

    def loss(kernel, *arrays):
        return jnp.sum(attention(*arrays, kernel=kernel, **options).astype("float32"))

    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        slopes = jax.jit(lambda *x: jax.grad(functools.partial(loss, "dense"), (0, 1, 2))(*x))
        found = slopes(q, k, v)
        own = jax.jvp(functools.partial(loss, "xla"), (q, k, v), (q, k, v))[1]
        weights = jax.jit(lambda q, k: polyattn.attention_weights(q, k, top=3, **options))(q, k)
    # The tangent along the arrays is their product with the gradient.
    along = sum(
        np.sum(np.asarray(a, np.float64) * np.asarray(b, np.float64))
        for a, b in zip((q, k, v), found, strict=True)
    )
    assert float(own) == pytest.approx(along, rel=0.02, abs=2)
    assert weights.weights.shape == (2, 4, 37, 3)


def test_precision_and_weak_types_are_those_of_jax_nn():
    x = jnp.full((1, 4, 2, 8), 0.5)
    assert x.weak_type
    assert not attention(x, x, x).weak_type
    with pytest.raises(TypeError, match="one dtype; got query bfloat16, key float32"):
        attention(x.astype("bfloat16"), x, x)

    def products(function, precision):
        with jax.default_matmul_precision(precision):
            return set(re.findall(r" precision=[^\n]*", str(jax.make_jaxpr(function)(x, x, x))))

    for precision in ("bfloat16", "BF16_BF16_F32"):
        theirs = products(jax.nn.dot_product_attention, precision)
        assert len(theirs) == 1
        for kernel in ("xla", "dense"):
            assert products(functools.partial(attention, kernel=kernel), precision) == theirs
    assert products(attention, None) == products(attention, "highest")


@pytest.mark.slow
def test_without_jit():
    arrays = Q[:1, :, :5], K[:1, :, :7], V[:1, :, :7]
    q, k, v = map(jnp.asarray, arrays)
    with jax.disable_jit():
        none = attention(q, k, v, is_causal=True, query_offset=-50, kernel=small_tiles(10))
        some = attention(q, k, v, is_causal=True)
    assert not none.any()
    np.testing.assert_allclose(some, attention(*arrays, is_causal=True), atol=2e-6)


def test_under_vmap_a_value_that_is_not_finite_stays_a_condition():
    """Or else the products that only such values need would be computed for all."""
    q, k, v = (jnp.asarray(x) for x in (Q, K, V))
    call = jax.vmap(lambda *x: attention(*x, is_causal=True, kernel="xla"))
    assert "cond[" in str(jax.make_jaxpr(call)(q, k, v))


@pytest.mark.slow
def test_two_devices(run_python):
    """An array that was put somewhere stays there; one that was not goes where the others are."""
    code = """
import os
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
import jax, jax.numpy as jnp, numpy as np, polyattn
from polyattn_jax.xla import Xla
x = np.random.default_rng(0).standard_normal((2, 3, 8)).astype(np.float32)
one, other = jax.devices()
free, here, there = jnp.asarray(x), jax.device_put(x, one), jax.device_put(x, other)
call = polyattn.attention
expected = call(x, x, x)
for given in ((there, there, there), (there, free, free), (free, there, there)):
    result = call(*given)
    assert result.device == other, result.device
    np.testing.assert_allclose(result, expected, atol=1e-6)
assert polyattn.explain(there, there, there).problem.device == "cpu:1"
places = []
class Spy(Xla):
    def __call__(self, problem, operands, backend):
        places.append((problem.device, str(operands.query.device)))
        return super().__call__(problem, operands, backend)
for given, name in ((x, "jax:cpu:1"), (here, "jax:1"), (there, "jax:cpu"), (there, "jax:cpu:0")):
    call(given, given, given, backend=name, kernel=Spy())
assert places == [("cpu:1", "cpu:1")] * 3 + [("cpu:0", "cpu:0")], places
assert call(here, here, here, backend="jax:1").device == one
assert call(here, here, here, backend="jax:cpu").device == one
assert call(there, there, there, backend="jax:cpu").device == other
heads = np.concatenate([x, x])[:4]
with jax.set_mesh(jax.make_mesh((2,), ("heads",))) as mesh:
    q, k = (jax.device_put(y, jax.sharding.NamedSharding(jax.sharding.get_mesh(),
            jax.sharding.PartitionSpec("heads"))) for y in (heads, heads[:2]))
    np.testing.assert_allclose(call(q, k, k), call(heads, heads[:2], heads[:2]), atol=1e-6)
try:
    call(here, there, there)
except ValueError as error:
    print(error)
mesh = jax.sharding.Mesh(np.array([one, other]), ("heads",))
spec = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, None))
whole = jax.device_put(x, spec)
np.testing.assert_allclose(call(whole, whole, whole), expected, atol=1e-6)
print(polyattn.explain(whole, whole, whole).problem.device or "several")
"""
    told, several = run_python(code).splitlines()
    assert told.startswith("query is on cpu:0 and key on cpu:1; pass jax.device_put")
    assert several == "several"
