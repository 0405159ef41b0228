"""The compiled kernel against the formula in float64, with random options, sizes and layouts."""

import contextlib
import random
import sys

import kernel_calls
import numpy as np
import pytest
from arrays import close, draw, to_torch
from optional import jax, jnp, torch
from random_options import random_options

import polyattn
from polyattn import masks, scores
from polyattn.conformance.cases.case import with_arrays
from polyattn_native import call, library, ready
from polyattn_native.kernel import Native


def strided(rng, shape):
    """Return an array in one of several layouts."""
    *lead, heads, length, size = shape
    kind = rng.integers(4)
    if kind == 0:  # heads after length
        return rng.standard_normal((*lead, length, heads, size)).swapaxes(-2, -3)
    if kind == 1:  # every other row of a larger array
        return rng.standard_normal((*lead, heads, 2 * length, size))[..., ::2, :]
    if kind == 2:  # the last axis is not contiguous
        return rng.standard_normal((*lead, heads, size, length)).swapaxes(-1, -2)
    return rng.standard_normal(shape)


def random_call(seed, sizes, dtype):
    """Return arrays of random sizes and layouts, options, and a gradient of the output."""
    choose, rng = random.Random(seed), np.random.default_rng(seed)
    b, groups = choose.randint(1, 3), choose.choice([1, 2, 4])
    rows, keys, d, e = (choose.choice(sizes) for _ in range(4))
    heads = groups * choose.randint(1, 2)
    shapes = (b, heads, rows, d), (choose.choice([1, b]), groups, keys, d), (b, groups, keys, e)
    arrays = [strided(rng, shape).astype(dtype, order="K") for shape in shapes]
    along = rng.standard_normal((b, heads, rows, e)).astype(dtype)
    return arrays, random_options(seed, b, heads, rows, keys), along


def in_float64(x):
    return x.astype("float64") if x.dtype.kind == "f" else x


@pytest.mark.parametrize("seed", range(8))
def test_random_calls_equal_the_formula(seed, isa):
    dtype = ("float32", "float64", "float16")[seed % 3]
    arrays, options, along = random_call(seed, (1, 5, 8, 33, 48, 71, 301), dtype)
    wide = {name: with_arrays(x, in_float64) for name, x in options.items()}
    exact = [x.astype("float64") for x in arrays]
    wanted = polyattn.attention_partial(*exact, **wide, kernel="dense")
    found = polyattn.attention_partial(*arrays, **options, kernel=Native())
    close(found.output, wanted.output, 4 if dtype == "float16" else 100)
    close(found.logsumexp, wanted.logsumexp, 100)
    wanted, found = (
        polyattn.attention_vjp(*x, **more, kernel=one)[1](along.astype(x[0].dtype))._asdict()
        for x, more, one in ((exact, wide, "dense"), (arrays, options, Native()))
    )
    for of_all in (wanted, found):
        score_mod = of_all.pop("score_mod")
        of_all |= dict([] if score_mod is None else score_mod.carried())
    for name, one in wanted.items():
        assert (one is None) == (found[name] is None), name
        if one is not None:
            close(found[name], one, 30 if found[name].dtype == "float16" else 800)
    assert wanted.keys() == found.keys()


def of_torch(arrays, options, along, dtype="float64", kernel="dense"):
    """Return the output and the gradients of all arrays of floats."""
    leaves = []

    def to(x):
        x = to_torch(x)
        if x.is_floating_point():
            x = x.to(getattr(torch, dtype)).requires_grad_()
            leaves.append(x)
        return x

    arrays = [to(x) for x in arrays]
    options = {name: with_arrays(x, to) for name, x in options.items()}
    output = polyattn.attention(*arrays, **options, kernel=kernel)
    return output, torch.autograd.grad(output, leaves, to_torch(along).to(output.dtype))


@pytest.mark.parametrize("seed", range(8, 24))
def test_random_calls_of_torch_equal_the_formula(seed):
    dtype = ("float32", "float16", "bfloat16", "float64")[seed % 4]
    given = random_call(seed, (1, 7, 40, 64), "float32")
    close(of_torch(*given, dtype, "native"), of_torch(*given), 12 if "16" in dtype else 100)


@pytest.mark.parametrize("seed", [0, 1, 3])
def test_random_calls_of_jax_equal_the_formula(seed):
    arrays, options, along = random_call(seed, (7, 40), "float32")
    dtype, leaves = ("float32", "float32", "float16", "bfloat16")[seed % 4], []

    def keep(x):
        leaves.extend([jnp.asarray(x, dtype)] if x.dtype.kind == "f" else [])
        return x

    [with_arrays(x, keep) for x in (*arrays, *options.values())]

    def call(leaves):
        leaves = iter(leaves)

        def to(x):
            return next(leaves) if x.dtype.kind == "f" else jnp.asarray(x)

        given = [to(x) for x in arrays]
        options_of_jax = {name: with_arrays(x, to) for name, x in options.items()}
        return polyattn.attention(*given, **options_of_jax, kernel="native")

    output, pull = jax.vjp(call, leaves)
    (gradients,) = pull(jnp.asarray(along, dtype))
    close((output, gradients), of_torch(arrays, options, along), 12 if "16" in dtype else 100)
    close(jax.jit(call)(leaves), output)
    if "bias" not in options and dtype == "float32":  # −∞ has no tangent
        pushed = jax.jvp(call, (leaves,), (leaves,))[1]
        product = sum(jnp.vdot(x, gradient) for x, gradient in zip(leaves, gradients, strict=True))
        np.testing.assert_allclose(jnp.vdot(pushed, along), product, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_the_mean_of_ones_is_1(dtype, isa):
    for rows, size in ((1, 64), (600, 17)):
        q, k = draw((4, rows, size), (4, 2 * rows, size), dtype=dtype)
        assert (polyattn.attention(q, k, np.ones_like(k), is_causal=True) == 1).all()


@pytest.mark.parametrize(("rows", "far"), [(1, -1e38), (40, 1e7), (1, -3e5)])
def test_rows_whose_scores_are_all_far_from_0_have_the_mean(rows, far, isa):
    q, k, v = np.random.default_rng(0).standard_normal((3, 1, 4, rows, 16), dtype=np.float32)
    v = np.concatenate([v, v + 1, v + 2], axis=-2)
    bias = np.full((rows, 3 * rows), far, np.float32)
    found = polyattn.attention(q * 0, np.concatenate([k] * 3, axis=-2), v, bias=bias)
    close(found, np.broadcast_to(v.mean(-2, keepdims=True), found.shape))


def test_gradients_of_slopes_and_tables_are_summed_over_items(isa):
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((3, h, n, 16)) for h, n in ((4, 50), (2, 70), (2, 70))]
    table = scores.relative_bias(rng.standard_normal((32, 4)))
    options = {
        "score_mod": scores.temperature(2.0) >> scores.alibi(rng.random(4)) >> table,
        "query_offset": np.array([5, 10**5, -7]),
        "window": (40, 30),
        "bias": rng.standard_normal((50, 70)),
    }
    _, exact = polyattn.attention_vjp(*arrays, **options, kernel="dense")
    _, vjp = polyattn.attention_vjp(*arrays, **options, kernel=Native())
    gradient = rng.standard_normal((3, 4, 50, 16))
    wanted, found = (dict(f(gradient).score_mod.carried()) for f in (exact, vjp))
    assert wanted.keys() == found.keys()
    for name, one in wanted.items():
        np.testing.assert_allclose(found[name], one, rtol=0, atol=1e-11, err_msg=name)


def test_a_query_whose_bytes_are_in_another_order():
    x = np.random.default_rng(8).standard_normal((2, 5, 4)).astype("float32")
    swapped = x.astype(x.dtype.newbyteorder())
    wanted = polyattn.attention_partial(x, x, x, kernel=Native())
    found = polyattn.attention_partial(swapped, x, x, kernel=Native())
    assert found.output.dtype == swapped.dtype
    np.testing.assert_array_equal(found.output, wanted.output)
    np.testing.assert_array_equal(found.logsumexp, wanted.logsumexp)


@pytest.mark.parametrize(
    "offset",
    [
        -(2**70),
        np.asarray([-(2**63), 2**63 - 1]),
        np.asarray([3, 2**64 - 1], "uint64"),
    ],
    ids=str,
)
def test_positions_may_be_far_away_and_far_apart(offset):
    q, k, table = draw((2, 2, 5, 8), (2, 2, 7, 8), (8, 2), dtype="float64")
    for given in (
        {"score_mod": scores.alibi(2)},
        {"score_mod": scores.relative_bias(table, max_distance=16)},
        {"mask": masks.window(3, 2)},
        {"window": (2**70, 2**70)},
        {"is_causal": True},
        {"window": (2**62 - 2, 2**62 + 3)},
        {"mask": masks.window(2**62 - 2, 2**62 + 3)},
    ):
        results = [
            polyattn.attention(q, k, k, query_offset=offset, kernel=kernel, **given)
            for kernel in ("dense", Native())
        ]
        np.testing.assert_allclose(results[1], results[0], atol=1e-6, err_msg=str(given))


@pytest.mark.parametrize("keys", [2**31 + 100, 2**32 + 100])
def test_rows_see_keys_beyond_32_bits(keys, isa):
    query, one = np.zeros((1, 3, 1), "float32"), np.ones((1, 1, 1), "float32")
    far = np.broadcast_to(one, (1, keys, 1))  # without memory
    for options, seen in (
        ({"window": (10, 0)}, [11, 11, 11]),
        ({"window": (10, 1)}, [12, 12, 11]),
        ({"window": (10, 0), "query_offset": keys - 1}, [11, 10, 9]),
        ({"window": (5, None), "is_causal": True}, [6, 6, 6]),
    ):
        for kernel in (Native(), "tiled"):
            found = polyattn.attention_partial(query, far, far, **options, kernel=kernel)
            np.testing.assert_allclose(np.exp(found.logsumexp[0]), seen, rtol=1e-6)


def test_a_gradient_of_16_bits_may_have_any_strides():
    rng = np.random.default_rng(11)
    x, moved = (rng.standard_normal(shape).astype("float16") for shape in ((2, 5, 4), (2, 4, 5)))
    gradient = moved.swapaxes(-1, -2)
    _, vjp = polyattn.attention_vjp(x, x, x, kernel=Native())
    for one, other in zip(vjp(gradient)[:3], vjp(gradient.copy("C"))[:3], strict=True):
        assert one.tobytes() == other.tobytes()


def odd(array):
    """Return a copy whose numbers begin at odd addresses."""
    found = np.empty(array.nbytes + 1, "uint8")[1:].view(array.dtype).reshape(array.shape)
    found[...] = array
    return found


def test_numbers_at_odd_addresses_are_copied(monkeypatch):
    x, bias, sinks = draw((2, 5, 4), (5, 5), (2,))
    native, addresses, describe = Native(), [], call.describe

    def describe_and_look(to, array, *more):
        describe(to, array, *more)
        addresses.append(to.data % array.itemsize)

    def results(moved):
        y, given = moved(x), {"sinks": moved(sinks)}
        plain = polyattn.attention(y, y, y, kernel=native)
        partial = polyattn.attention_partial(y, y, y, **given, bias=moved(bias), kernel=native)
        partial = polyattn.Partial(*map(moved, partial))
        found = polyattn.attention_backward(y, y, y, partial, y, **given, kernel=native)
        return [plain, *partial, *found[:3], found.sinks]

    monkeypatch.setattr(call, "describe", describe_and_look)
    wanted = results(np.array)
    assert addresses
    for one, other in zip(results(odd), wanted, strict=True):
        assert one.tobytes() == other.tobytes()
    assert not any(addresses)


def test_bits_depend_neither_on_threads_nor_on_other_rows(isa):
    q, k, v, bias = draw(*[(2, 1, 700, 40)] * 3, (700, 700))  # items add to its gradient
    native = Native()

    def run(*arrays):
        output, vjp = polyattn.attention_vjp(*arrays, bias=bias, is_causal=True, kernel=native)
        return output, vjp(arrays[0])

    with polyattn.use_threads(1):
        one, of_one = run(q, k, v)
    with polyattn.use_threads(3):
        three, of_three = run(q, k, v)
        item, of_item = run(q[1:], k[1:], v[1:])
        rows = polyattn.attention(
            q[:, :, 650:], k, v, bias=bias[650:], is_causal=True, query_offset=650, kernel=native
        )
    assert one.tobytes() == three.tobytes()
    assert one[1:].tobytes() == item.tobytes()
    assert one[:, :, 650:].tobytes() == rows.tobytes()
    assert of_one.bias.tobytes() == of_three.bias.tobytes()
    for name in ("query", "key", "value"):
        assert getattr(of_one, name).tobytes() == getattr(of_three, name).tobytes(), name
        assert getattr(of_one, name)[1:].tobytes() == getattr(of_item, name).tobytes(), name


def test_a_long_bias_of_another_dtype_has_one_axis(monkeypatch):
    monkeypatch.setattr(call, "MADE", 100)
    rng = np.random.default_rng(3)
    q, k, v = rng.standard_normal((3, 2, 33, 8)).astype("float32")
    bias = rng.standard_normal(33)
    found, pullback = polyattn.attention_vjp(q, k, v, bias=bias, kernel="native")
    wanted, reference = polyattn.attention_vjp(q, k, v, bias=bias, kernel="dense")
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    np.testing.assert_allclose(pullback(found).bias, reference(found).bias, atol=1e-5)


def test_the_share_that_is_done_grows_to_the_whole(monkeypatch):
    shares = []
    for module in (call, ready):
        monkeypatch.setattr(module, "progress", lambda: contextlib.nullcontext(shares.append))
    x = np.ones((12, 2048, 64), np.float32)
    for options in ({}, {"mask": masks.causal() & masks.dilated(3)}, {}):  # the last one is ready
        shares.clear()
        polyattn.attention(x, x, x, kernel="native", **options)
        assert shares == sorted(shares)
        assert 0 < shares[0] <= shares[-1] <= 1


PROGRAM = """
import os, signal, threading, time
import numpy as np, polyattn
from polyattn_native.kernel import Native
x = np.ones((1, 1, 20000, 64), "float32")
"""


def test_a_first_call_of_tensors_imports_neither_the_compiler_nor_all_of_numpy(run_python):
    names = "torch._dynamo", "sympy", "numpy.f2py", "polyattn_native.visible"
    code = "import polyattn, sys, torch; x = torch.ones(1, 2, 64, 64); polyattn.attention(x, x, x)"
    found = run_python(f"{code}\nprint(*[name for name in {names} if name in sys.modules])")
    assert found == "polyattn_native.visible\n"


def test_an_interrupt_ends_a_call_and_the_next_one_works(run_python):
    body = """
signal.signal(signal.SIGINT, signal.default_int_handler)  # a parent in the background ignores it
threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
try:
    for _ in range(1000):
        polyattn.attention(x, x, x, kernel=Native())
except KeyboardInterrupt:
    y = x[:, :, :300]
    assert np.allclose(polyattn.attention(y, y, y, kernel=Native()), 1)
    print("interrupted")
"""
    assert run_python(PROGRAM + body, "-P") == "interrupted\n"


def test_a_process_ends_amid_a_call_of_a_daemon_thread(run_python):
    """Its threads end with the tasks that they have begun; the whole call takes minutes."""
    body = """
os.environ["POLYATTN_NUM_THREADS"] = "2"
x = np.broadcast_to(x[:, :, :1], (1, 1, 500_000, 64))
threading.Thread(target=polyattn.attention, args=(x, x, x), daemon=True).start()
time.sleep(0.5)
"""
    run_python(PROGRAM + body, "-P")


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel counts memory so on Linux")
def test_memory_beyond_inputs_and_results_does_not_grow_with_the_scores(run_python):
    body = """
import resource
x = np.ones((1, 1, 8192, 64), "float32")
y = x[:, :, :64]
options = dict(is_causal=True, kernel=Native())
def forward(x):
    return polyattn.attention_partial(x, x, x, **options)
def backward(x, partial):
    return polyattn.attention_backward(x, x, x, partial, x, **options)
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
backward(y, forward(y))
before = peak()
partial = forward(x)
between = peak()
backward(x, partial)
print(between - before - x.nbytes // 1024, peak() - between - 3 * x.nbytes // 1024)
"""
    assert all(int(size) < 12 * 1024 for size in run_python(PROGRAM + body, "-P").split())


def test_an_unknown_instruction_set_is_an_error():
    with pytest.raises(ValueError, match=r"POLYATTN_NATIVE_ISA may be .*; got 'mmx'"):
        library.use(library.library(), "mmx")


@pytest.mark.skipif(not kernel_calls.is_possible(), reason="no compiler for it")
def test_random_calls_in_cpp_are_those_of_the_formula(tmp_path):
    (tmp_path / "backends").symlink_to(kernel_calls.ROOT / "backends")
    assert kernel_calls.wrong_call(tmp_path, "", kernel_calls.FEW) is None
