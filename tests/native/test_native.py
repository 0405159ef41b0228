"""The compiled kernel against the formula in float64, with random options, sizes and layouts."""

import contextlib
import contextvars
import itertools
import os
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from random_options import random_options

import polyattn
from polyattn import masks, scores

native = pytest.importorskip("polyattn_native.kernel")
library = pytest.importorskip("polyattn_native.library")
call = pytest.importorskip("polyattn_native.call")
ready = pytest.importorskip("polyattn_native.ready")

TOLERANCE = {"float32": 3e-5, "float64": 1e-12, "float16": 4e-3}


def strided(rng, shape, dtype):
    """Return an array in one of several layouts."""
    kind = rng.integers(4)
    if kind == 0:  # heads after length
        moved = (*shape[:-3], shape[-2], shape[-3], shape[-1])
        return rng.standard_normal(moved).astype(dtype).swapaxes(-2, -3)
    if kind == 1:  # every other row of a larger array
        return rng.standard_normal((*shape[:-2], 2 * shape[-2], shape[-1])).astype(dtype)[
            ..., ::2, :
        ]
    if kind == 2:  # the last axis is not contiguous
        return (
            rng.standard_normal((*shape[:-2], shape[-1], shape[-2])).astype(dtype).swapaxes(-1, -2)
        )
    return rng.standard_normal(shape).astype(dtype)


class Drawn:
    """A random call: arrays in random sizes, layouts and dtype, and options."""

    def __init__(self, seed, dtypes, sizes):
        draw = self.draw = random.Random(seed)
        self.rng = np.random.default_rng(seed)
        b, groups = draw.randint(1, 3), draw.choice([1, 2, 4])
        self.rows, self.keys, d, self.e = (draw.choice(sizes) for _ in range(4))
        self.heads, self.dtype = groups * draw.randint(1, 2), draw.choice(dtypes)
        shapes = (
            (b, self.heads, self.rows, d),
            (draw.choice([1, b]), groups, self.keys, d),
            (b, groups, self.keys, self.e),
        )
        self.arrays = [strided(self.rng, shape, self.dtype) for shape in shapes]
        self.options = random_options(seed, b, self.heads, self.rows, self.keys)
        self.along = self.rng.standard_normal((b, self.heads, self.rows, self.e))

    def given(self, dtype):
        return [np.asarray(x, dtype) for x in self.arrays], in_dtype(self.options, dtype)


def in_dtype(options, dtype):
    floats = ("bias", "sinks")
    return {n: np.asarray(x, dtype) if n in floats else x for n, x in options.items()}


def near(found, wanted, limit, name=""):
    atol = limit * (1 + np.abs(wanted).max(initial=0))
    np.testing.assert_allclose(found, wanted, rtol=0, atol=atol, err_msg=name)


@pytest.mark.parametrize("seed", range(60))
def test_random_calls_equal_the_formula(seed, isa):
    x = Drawn(seed, ("float32", "float32", "float64", "float16"), (1, 5, 8, 33, 40, 71, 300))
    arrays, options = x.given("float64")
    wanted = polyattn.attention_partial(*arrays, **options, kernel="dense")
    found = polyattn.attention_partial(*x.arrays, **x.options, kernel=native.Native())
    near(found.output, wanted.output, TOLERANCE[x.dtype])
    np.testing.assert_allclose(
        found.logsumexp, wanted.logsumexp, rtol=1e-5 if x.dtype != "float64" else 1e-12, atol=1e-5
    )


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize(("rows", "size"), [(1, 64), (40, 24), (2100, 17)])
def test_the_mean_of_ones_is_1(rows, size, dtype, isa):
    q, k = np.random.default_rng(0).standard_normal((2, 1, 4, rows, size)).astype(dtype)
    k = np.concatenate([k, k[..., ::-1]], axis=-2)
    found = polyattn.attention(q, k, np.ones_like(k), is_causal=True)
    assert (found == 1).all()


@pytest.mark.parametrize("far", [-1e38, 1e7, -3e5])
@pytest.mark.parametrize("rows", [1, 40])
def test_rows_whose_scores_are_all_far_from_0_have_the_mean(rows, far, isa):
    q, k, v = np.random.default_rng(0).standard_normal((3, 1, 4, rows, 16), dtype=np.float32)
    v = np.concatenate([v, v + 1, v + 2], axis=-2)
    bias = np.full((rows, 3 * rows), far, np.float32)
    found = polyattn.attention(q * 0, np.concatenate([k] * 3, axis=-2), v, bias=bias)
    near(found, np.broadcast_to(v.mean(-2, keepdims=True), found.shape), 1e-5)


@pytest.mark.parametrize("seed", range(24))
def test_random_gradients_equal_those_of_the_formula(seed, isa):
    x = Drawn(seed, ("float32", "float64"), (1, 7, 64, 150, 301))

    def gradients(kernel, dtype):
        arrays, options = x.given(dtype)
        pullback = polyattn.attention_vjp(*arrays, **options, kernel=kernel)[1]
        found = pullback(np.asarray(x.along, dtype))._asdict()
        score_mod = found.pop("score_mod")
        return found | dict([] if score_mod is None else score_mod.carried())

    wanted, found = gradients("dense", "float64"), gradients(native.Native(), x.dtype)
    assert wanted.keys() == found.keys()
    for name, one in wanted.items():
        assert (one is None) == (found[name] is None), name
        if one is not None:
            near(found[name], one, 1e-4 if x.dtype == "float32" else 1e-11, name)


@pytest.mark.parametrize("row", [0, 6])
def test_a_row_that_is_not_finite_reaches_the_gradients_of_its_keys_only(row):
    rng = np.random.default_rng(0)
    query, key = rng.standard_normal((2, 1, 1, 7, 5))
    query[..., row, :] = np.nan
    mask = (np.arange(7)[:, None] != row) | (np.arange(7) == 3)
    pull = polyattn.attention_vjp(query, key, key, mask=mask, kernel="native")[1]
    for found in pull(np.ones((1, 1, 7, 5)))[1:3]:
        assert np.isnan(found).any(-1).ravel().tolist() == (np.arange(7) == 3).tolist()


@pytest.mark.parametrize("offsets", [[5, 5, 5], [5, 9, -7], [5, 10**5, -7]], ids=str)
def test_gradients_of_slopes_and_tables_are_summed_over_items(offsets, isa):
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((3, h, n, 16)) for h, n in ((4, 50), (2, 70), (2, 70))]
    table = scores.relative_bias(rng.standard_normal((32, 4)))
    options = {
        "score_mod": scores.temperature(2.0) >> scores.alibi(rng.random(4)) >> table,
        "query_offset": np.array(offsets),
        "window": (40, 30),
        "bias": rng.standard_normal((50, 70)),
    }
    _, exact = polyattn.attention_vjp(*arrays, **options, kernel="dense")
    _, vjp = polyattn.attention_vjp(*arrays, **options, kernel=native.Native())
    gradient = rng.standard_normal((3, 4, 50, 16))
    wanted, found = (dict(f(gradient).score_mod.carried()) for f in (exact, vjp))
    assert wanted.keys() == found.keys()
    for name, one in wanted.items():
        np.testing.assert_allclose(found[name], one, rtol=0, atol=1e-11, err_msg=name)


def test_batch_axes_broadcast_around_one_of_length_1():
    rng = np.random.default_rng(7)
    shapes = [(1, 1, 3), (2, 1, 3), (2, 1, 1), (3,), (1, 4, 1), ()]
    for one, other in itertools.product(shapes, shapes):
        q, k = (rng.standard_normal((*lead, 2, 3, 4)) for lead in (one, other))
        wanted = polyattn.attention(q, k, k, kernel="dense")
        kernel = native.Native()
        for _ in range(3):  # it keeps what it knows of a call
            found = polyattn.attention(q, k, k, kernel=kernel)
            np.testing.assert_allclose(found, wanted, atol=1e-12)


def test_a_query_whose_bytes_are_in_another_order():
    x = np.random.default_rng(8).standard_normal((2, 5, 4)).astype("float32")
    swapped = x.astype(x.dtype.newbyteorder())
    wanted = polyattn.attention_partial(x, x, x, kernel=native.Native())
    found = polyattn.attention_partial(swapped, x, x, kernel=native.Native())
    assert found.output.dtype == swapped.dtype
    np.testing.assert_array_equal(found.output, wanted.output)
    np.testing.assert_array_equal(found.logsumexp, wanted.logsumexp)


@pytest.mark.parametrize(
    "offset",
    [
        2**63 - 1,
        -(2**70),
        np.asarray([0, 2**30]),
        np.asarray([-(2**63), 2**63 - 1]),
        np.asarray([3, 2**64 - 1], "uint64"),
        np.asarray([2**62, -(2**62)]),
    ],
    ids=str,
)
@pytest.mark.parametrize("options", ["alibi", "table", "band", "wide", "causal", "far", "far mask"])
def test_positions_may_be_far_away_and_far_apart(options, offset):
    rng = np.random.default_rng(9)
    q, k = (rng.standard_normal((2, 2, n, 8)) for n in (5, 7))
    table = rng.standard_normal((8, 2))
    given = {
        "alibi": {"score_mod": scores.alibi(2)},
        "table": {"score_mod": scores.relative_bias(table, max_distance=16)},
        "band": {"mask": masks.window(3, 2)},
        "wide": {"window": (2**70, 2**70)},
        "causal": {"is_causal": True},
        "far": {"window": (2**62 - 2, 2**62 + 3)},
        "far mask": {"mask": masks.window(2**62 - 2, 2**62 + 3)},
    }[options]
    results = [
        polyattn.attention(q, k, k, query_offset=offset, kernel=kernel, **given)
        for kernel in ("dense", native.Native())
    ]
    np.testing.assert_allclose(results[1], results[0], atol=1e-6)


@pytest.mark.parametrize("keys", [2**30 + 100, 2**31 + 100, 2**32 + 100])
def test_rows_see_keys_beyond_32_bits(keys, isa):
    query, one = np.zeros((1, 3, 1), "float32"), np.ones((1, 1, 1), "float32")
    far = np.broadcast_to(one, (1, keys, 1))  # without memory
    for options, seen in (
        ({"window": (10, 0)}, [11, 11, 11]),
        ({"window": (10, 1)}, [12, 12, 11]),
        ({"window": (10, 0), "query_offset": keys - 1}, [11, 10, 9]),
        ({"window": (5, None), "is_causal": True}, [6, 6, 6]),
    ):
        for kernel in (native.Native(), "tiled"):
            found = polyattn.attention_partial(query, far, far, **options, kernel=kernel)
            np.testing.assert_allclose(np.exp(found.logsumexp[0]), seen, rtol=1e-6)


def test_a_gradient_of_16_bits_may_have_any_strides():
    rng = np.random.default_rng(11)
    x, moved = (rng.standard_normal(shape).astype("float16") for shape in ((2, 5, 4), (2, 4, 5)))
    gradient = moved.swapaxes(-1, -2)
    _, vjp = polyattn.attention_vjp(x, x, x, kernel=native.Native())
    for one, other in zip(vjp(gradient)[:3], vjp(gradient.copy("C"))[:3], strict=True):
        assert one.tobytes() == other.tobytes()


def odd(array):
    """Return a copy whose numbers begin at odd addresses."""
    found = np.empty(array.nbytes + 1, "uint8")[1:].view(array.dtype).reshape(array.shape)
    found[...] = array
    return found


def test_numbers_at_odd_addresses_are_copied(monkeypatch):
    rng = np.random.default_rng(10)
    x = rng.standard_normal((2, 5, 4)).astype("float32")
    bias, sinks = (rng.standard_normal(n).astype("float32") for n in ((5, 5), 2))
    kernel, addresses, describe = native.Native(), [], call.describe

    def describe_and_look(to, array, *more):
        describe(to, array, *more)
        addresses.append(to.data % array.itemsize)

    def results(moved):
        y, given = moved(x), {"sinks": moved(sinks)}
        plain = polyattn.attention(y, y, y, kernel=kernel)
        partial = polyattn.attention_partial(y, y, y, **given, bias=moved(bias), kernel=kernel)
        partial = polyattn.Partial(*map(moved, partial))
        found = polyattn.attention_backward(y, y, y, partial, y, **given, kernel=kernel)
        return [plain, *partial, *found[:3], found.sinks]

    monkeypatch.setattr(call, "describe", describe_and_look)
    wanted = results(np.array)
    assert addresses
    for one, other in zip(results(odd), wanted, strict=True):
        assert one.tobytes() == other.tobytes()
    assert not any(addresses)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_bits_depend_neither_on_threads_nor_on_other_rows(dtype, isa):
    rng = np.random.default_rng(3)
    q, k, v = (rng.standard_normal((2, 2, 700, 40)).astype(dtype) for _ in range(3))
    kernel = native.Native()
    bias = rng.standard_normal((700, 700)).astype(dtype)  # items and heads add to its gradient

    def run(*arrays):
        output, vjp = polyattn.attention_vjp(*arrays, bias=bias, is_causal=True, kernel=kernel)
        return output, vjp(arrays[0])

    with polyattn.use_threads(1):
        one, of_one = run(q, k, v)
    with polyattn.use_threads(3):
        three, of_three = run(q, k, v)
        item, of_item = run(q[1:], k[1:], v[1:])
        rows = polyattn.attention(
            q[:, :, 650:], k, v, bias=bias[650:], is_causal=True, query_offset=650, kernel=kernel
        )
    assert one.tobytes() == three.tobytes()
    assert one[1:].tobytes() == item.tobytes()
    assert one[:, :, 650:].tobytes() == rows.tobytes()
    assert of_one.bias.tobytes() == of_three.bias.tobytes()
    for name in ("query", "key", "value"):
        assert getattr(of_one, name).tobytes() == getattr(of_three, name).tobytes(), name
        assert getattr(of_one, name)[1:].tobytes() == getattr(of_item, name).tobytes(), name


@pytest.mark.parametrize("group", [3, 5, 6, 7])
@pytest.mark.parametrize("axes", [(), (2, 1)], ids=["(L, S)", "(B, 1, L, S)"])
def test_heads_of_a_group_add_to_a_bias_in_one_order(group, axes, isa):
    # Half of the rows of the key head end inside a position.
    rng = np.random.default_rng(3)
    shapes = (2, group, 100, 64), (2, 1, 300, 64), (2, 1, 300, 64), (*axes, 100, 300)
    q, k, v, bias = (rng.standard_normal(shape).astype("float32") for shape in shapes)
    _, vjp = polyattn.attention_vjp(q, k, v, bias=bias, kernel=native.Native())

    def bits(threads):
        with polyattn.use_threads(threads):
            found = vjp(q)
        return [found.bias.tobytes(), found.key.tobytes()]

    one = bits(1)
    assert all(bits(2) == one for _ in range(20))


PROGRAM = """
import os, signal, sys, threading, time
import numpy as np, polyattn
from polyattn_native.kernel import Native
x = np.ones((1, 1, 20000, 64), "float32")
{body}
"""


def run_program(body):
    done = subprocess.run(
        [sys.executable, "-P", "-c", PROGRAM.format(body=body)],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


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
    x = np.ones((24, 2048, 64), np.float32)
    options: dict[str, Any]
    for options in ({}, {"mask": masks.causal() & masks.dilated(3)}, {}):  # the last one is ready
        shares.clear()
        polyattn.attention(x, x, x, kernel="native", **options)
        assert shares == sorted(shares)
        assert shares
        assert shares[0] > 0
        assert shares[-1] <= 1


def test_an_interrupt_ends_a_call_and_the_next_one_works():
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
    assert run_program(body) == "interrupted\n"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_forked_process_computes():
    body = """
y = x[:, :, :3000]
with polyattn.use_threads(2):
    polyattn.attention(y, y, y, kernel=Native())
    child = os.fork()
    if child == 0:
        ok = np.allclose(polyattn.attention(y, y, y, kernel=Native()), 1)
        os._exit(0 if ok else 1)
print(os.waitpid(child, 0)[1])
"""
    assert run_program(body) == "0\n"


def test_threads_of_the_caller_compute_at_once():
    rng = np.random.default_rng(6)
    arrays = [rng.standard_normal((4, 600, 64)).astype("float32") for _ in range(8)]
    kernel = native.Native()
    with polyattn.use_threads(2):
        wanted = [polyattn.attention(x, x, x, kernel=kernel) for x in arrays]
        with ThreadPoolExecutor(8) as pool:
            context = [contextvars.copy_context() for _ in arrays]
            found = list(
                pool.map(
                    lambda c, x: c.run(polyattn.attention, x, x, x, kernel=kernel), context, arrays
                )
            )
    assert [x.tobytes() for x in wanted] == [x.tobytes() for x in found]


def test_a_process_ends_amid_a_call_of_a_daemon_thread():
    """Its threads end with the tasks that they have begun; the whole call takes minutes."""
    run_program("""
os.environ["POLYATTN_NUM_THREADS"] = "2"
x = np.broadcast_to(x[:, :, :1], (1, 1, 500_000, 64))
threading.Thread(target=polyattn.attention, args=(x, x, x), daemon=True).start()
time.sleep(0.5)
""")


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel counts memory so on Linux")
def test_memory_beyond_inputs_and_results_does_not_grow_with_the_scores():
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
    assert all(int(size) < 12 * 1024 for size in run_program(body).split())


def test_an_unknown_instruction_set_is_an_error():
    with pytest.raises(ValueError, match=r"POLYATTN_NATIVE_ISA may be .*; got 'mmx'"):
        library.use(library.library(), "mmx")


@pytest.mark.parametrize("rows", [1, 2, 3, 8])
@pytest.mark.parametrize(
    "options", [{}, {"is_causal": True}, {"softcap": 2.0}, {"window": (290, 0)}], ids=str
)
def test_few_rows_of_a_head_with_elements_as_lanes(rows, options, isa):
    """Blocks that all rows see, in which the scores of the rows are adjacent, and others."""
    rng = np.random.default_rng(rows)
    query = rng.standard_normal((2, 3, rows, 48))
    key, value = (rng.standard_normal((2, 3, 700, size)) for size in (48, 32))
    for dtype in ("float32", "float64"):
        arrays = [x.astype(dtype) for x in (query, key, value)]
        found = [
            polyattn.attention_partial(*arrays, kernel=x, **options) for x in ("native", "dense")
        ]
        for got, expected in zip(*((x.output, x.logsumexp) for x in found), strict=True):
            np.testing.assert_allclose(got, expected, atol=TOLERANCE[dtype])
