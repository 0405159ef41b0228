"""The gradients of NumPy's own kernel beside the suite: the same bits on any threads, memory."""

import math
import threading
import time
import tracemalloc
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

import polyattn
from polyattn import (
    Gradients,
    attention_backward,
    attention_partial,
    attention_vjp,
    masks,
    scores,
)
from polyattn.conformance.cases.case import make_case
from polyattn.conformance.checks.gradients import compare
from polyattn.conformance.reference.gradients import cotangent
from polyattn_numpy import backward as backward_module
from polyattn_numpy import sequencer, tiling
from polyattn_numpy.tiled_kernel import NumpyTiled

B, H, G, L, S, D, E = 2, 4, 2, 70, 80, 8, 12
RNG = np.random.default_rng(11)
KEYS = np.arange(S)
SLOPES = np.array([0.5, 0.25, 0.125, 0.0625])


def randn(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def of_tiles(tile):
    kernel = NumpyTiled()
    kernel.tile = tile
    return kernel


def arrays(shapes=None):
    shapes = shapes or [(B, H, L, D), (B, G, S, D), (B, G, S, E)]
    return [randn(*shape, seed=seed) for seed, shape in enumerate(shapes)]


def backward(qkv, kernel, gradients=None, **options):
    """Return a Partial and its gradients by a kernel, and the gradients that they are of."""
    partial = attention_partial(*qkv, kernel=kernel, **options)
    of_output, of_logsumexp = gradients or (
        randn(*partial.output.shape, seed=8),
        randn(*partial.logsumexp.shape, seed=9),
    )
    found = attention_backward(
        *qkv, partial, of_output, logsumexp_gradient=of_logsumexp, kernel=kernel, **options
    )
    return found, (of_output, of_logsumexp)


RANDOM = RNG.random((B, H, L, S)) > 0.7
BIAS = randn(1, H, L, S, seed=5)
BIAS[..., 3, 30:] = BIAS[..., 20, :] = -math.inf


# ---- bits --------------------------------------------------------------------------------------


@pytest.fixture
def many_tasks(monkeypatch):
    """Let small calls use several threads and many tasks."""
    monkeypatch.setattr(tiling, "THREAD_WORK", 2**10)
    monkeypatch.setattr(tiling, "TASK_WORK", 2**16)
    tiling.tasks.cache_clear()
    yield
    tiling.tasks.cache_clear()


def bits(found):
    slopes = getattr(found.score_mod, "slopes", None)
    return [getattr(x, "tobytes", lambda: None)() for x in (*found, slopes)]


@pytest.mark.parametrize(
    ("options", "broadcast"),  # of keys, from one item to all
    [
        ({}, True),
        ({"is_causal": True}, False),
        ({"bias": BIAS[0, 0]}, True),
        ({"bias": BIAS[..., :1, :]}, False),
        ({"mask": RANDOM}, True),
        ({"sinks": BIAS[0, :, 0, 0]}, False),
        ({"score_mod": scores.alibi(SLOPES)}, True),
    ],
    ids=["plain", "causal", "bias", "bias of heads", "mask", "sinks", "alibi"],
)
def test_any_number_of_threads_gives_the_same_bits(options, broadcast, many_tasks):
    qkv = arrays([(B, H, L, D), (1 if broadcast else B, G, S, D), (B, G, S, E)])

    def run(count):
        with polyattn.use_threads(count):
            return bits(backward(qkv, of_tiles(2**12), **options)[0])

    one = run(1)
    assert all(run(count) == one for count in (2, 5))


def test_one_item_has_the_same_bits_alone(many_tasks):
    qkv = arrays([(3, H, L, D), (3, G, S, D), (3, G, S, E)])
    for options in ({}, {"is_causal": True}, {"mask": RANDOM[:1]}):
        both, gradients = backward(qkv, of_tiles(2**12), **options)
        for item in range(3):
            own = [x[item : item + 1] for x in (*qkv, *gradients)]
            alone, _ = backward(own[:3], of_tiles(2**12), own[3:], **options)
            for one, among in zip(alone[:3], both[:3], strict=True):
                assert one.tobytes() == among[item : item + 1].tobytes()


@pytest.fixture
def first_task_last(monkeypatch):
    """Hold the first task back until another has to wait for it, or all others have ended.

    Return the threads that worked, and the tasks that had to wait for the first.
    """
    seen, waited, ended, go_on = set(), set(), [], threading.Event()
    run, wait_for = backward_module.BackwardSweep.run, sequencer.Ticket._wait_for

    def run_later(sweep):
        seen.add(threading.current_thread().name)
        if sweep.number == 0 and polyattn._base.threads.thread_count() > 1:
            assert go_on.wait(60)
        run(sweep)
        ended.append(sweep.number)
        if len(ended) == len(sweep.sums.cut) - 1:
            go_on.set()

    def watched(ticket, other, column):
        if other == 0 and ticket._order.reached[0] < column:
            waited.add(ticket._number)
            go_on.set()
        wait_for(ticket, other, column)

    def start_anew():
        for one in (seen, waited, ended, go_on):
            one.clear()

    monkeypatch.setattr(backward_module.BackwardSweep, "run", run_later)
    monkeypatch.setattr(sequencer.Ticket, "_wait_for", watched)
    return SimpleNamespace(seen=seen, waited=waited, start_anew=start_anew)


@pytest.mark.parametrize("heads", [1, 3])
def test_several_threads_work_and_add_in_one_order(many_tasks, heads, first_task_last):
    qkv = arrays([(1, heads, 130, D), (1, heads, 130, D), (1, heads, 130, E)])
    partial = attention_partial(*qkv, is_causal=True)

    def run(count, bias):
        first_task_last.start_anew()
        options = {"mask": lambda b, h, i, j: i >= j, "bias": bias, "kernel": of_tiles(2**12)}
        with polyattn.use_threads(count):
            return bits(attention_backward(*qkv, partial, qkv[2], **options))

    for shape in ((), (1, 130), (130, 130), (1, heads, 130, 130)):
        bias = np.zeros(shape)
        found = run(3, bias)
        assert first_task_last.waited
        assert len(first_task_last.seen) > 1
        assert found == run(1, bias)
        assert not first_task_last.waited
        assert len(first_task_last.seen) == 1


def test_an_error_in_one_thread_stops_those_that_wait(many_tasks):
    calls = []

    def fails(b, h, i, j):
        calls.append(1)
        time.sleep(0.002)
        if len(calls) >= 30:
            raise KeyError("in the middle")
        return i >= j

    qkv = arrays([(1, 1, 500, D), (1, 1, 500, D), (1, 1, 500, E)])
    partial = attention_partial(*qkv, is_causal=True)
    with polyattn.use_threads(3), pytest.raises(KeyError, match="in the middle"):
        attention_backward(*qkv, partial, qkv[2], mask=fails, kernel=of_tiles(2**12))
    made = len(calls)
    time.sleep(0.05)
    assert len(calls) == made < 40


@pytest.mark.parametrize("length", [3, L])  # dense, tiled
def test_a_variable_that_is_no_number_is_refused(monkeypatch, length):
    qkv = [x[:, :, :length] for x in arrays()]
    partial = attention_partial(*qkv)
    monkeypatch.setenv("POLYATTN_NUM_THREADS", "two")
    with pytest.raises(ValueError, match=r"POLYATTN_NUM_THREADS must be .*'two'"):
        attention_backward(*qkv, partial, partial.output)


# ---- what is hidden ----------------------------------------------------------------------------

HIDDEN = 60  # the keys from here on hold NaN or infinity


def only_before(s, b, h, i, j):
    return np.where(j < HIDDEN, s, -np.inf)


#: How they are hidden from all rows.
HIDES = {
    "offset": {"is_causal": True, "query_offset": HIDDEN - L},
    "mask": {"mask": KEYS < HIDDEN},
    "expression": {"mask": masks.prefix(HIDDEN)},
    "function": {"mask": lambda b, h, i, j: j < HIDDEN + 0 * i},
    "bias": {"bias": np.where(KEYS < HIDDEN, 0, -math.inf)},
    "score function": {
        "score_mod": scores.function(only_before, lambda s, b, h, i, j: 1.0 * (j < HIDDEN))
    },
    "softcap": {"mask": KEYS < HIDDEN, "softcap": 2.0},
    "dropout": {"mask": KEYS < HIDDEN, "dropout": (0.2, 1)},
    "alibi": {"mask": KEYS < HIDDEN, "score_mod": scores.alibi(H)},
    "distance": {"mask": KEYS < HIDDEN, "similarity": scores.distance()},
}


@pytest.mark.parametrize(
    ("option", "poison"), [(one, (math.nan, -math.inf)[n % 2]) for n, one in enumerate(HIDES)]
)
def test_hidden_poison_changes_no_bit(option, poison):
    qkv, options = arrays(), HIDES[option]
    want, gradients = backward(qkv, of_tiles(2**12), **options)
    qkv[1][:, :, HIDDEN:] = poison
    qkv[2][:, :, HIDDEN + 9 :] = poison
    found, _ = backward(qkv, of_tiles(2**12), gradients, **options)
    assert bits(found) == bits(want)
    assert not found.key[:, :, HIDDEN:].any()


def test_hidden_poison_reaches_no_bias_where_vectors_are_empty():
    qkv = arrays([(B, H, L, 0), (B, G, S, 0), (B, G, S, E)])
    options = {"bias": BIAS, "mask": KEYS < HIDDEN}
    want, gradients = backward(qkv, of_tiles(2**12), **options)
    qkv[2][:, :, HIDDEN:] = math.nan
    found, _ = backward(qkv, of_tiles(2**12), gradients, **options)
    assert bits(found) == bits(want)


# ---- dtypes, memory, parts ---------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", ml_dtypes.bfloat16])
def test_half_precision_is_computed_in_float32(dtype):
    qkv = [x.astype(dtype) for x in arrays()]
    wide = [x.astype("float32") for x in qkv]
    partial = attention_partial(*wide, kernel=of_tiles(2**12), is_causal=True)
    of_output = randn(B, H, L, E, seed=8).astype(dtype)
    given = partial, of_output.astype("float32")
    want = attention_backward(*wide, *given, kernel=of_tiles(2**12), is_causal=True)
    for into in (None, Gradients()):
        found = attention_backward(
            *qkv, partial, of_output, into=into, kernel=of_tiles(2**12), is_causal=True
        )
        for one, other in zip(found[:3], want[:3], strict=True):
            assert one.tobytes() == other.astype(one.dtype).tobytes()
        assert found.query.dtype == (dtype if into is None else "float32")


def test_memory_is_for_a_few_tiles_beside_the_gradients():
    qkv = [x.astype("float32") for x in arrays([(1, 1, 2400, 64)] * 3)]
    partial = attention_partial(*qkv)
    for options in ({}, {"is_causal": True, "bias": np.zeros((1, 2400), "float32")}):
        tracemalloc.start()
        with polyattn.use_threads(2):
            attention_backward(*qkv, partial, qkv[2], **options)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        gradients = sum(x.nbytes for x in qkv)
        assert peak < gradients + 12 * 2**20, options  # the scores have 22 MiB


def test_shares_of_parts_of_the_keys_add_up():
    qkv = query, key, value = arrays()
    want, gradients = backward(qkv, of_tiles(2**12), sinks=BIAS[0, :, 0, 0])
    partial = attention_partial(*qkv, sinks=BIAS[0, :, 0, 0])
    found = [
        attention_backward(
            query, key[:, :, part], value[:, :, part], partial, gradients[0],
            logsumexp_gradient=gradients[1], kernel=of_tiles(2**12)
        )
        for part in (slice(0, 37), slice(37, S))
    ]  # fmt: skip
    query_gradient = found[0].query + found[1].query
    np.testing.assert_allclose(query_gradient, want.query, atol=1e-12)
    for name in ("key", "value"):
        together = np.concatenate([getattr(x, name) for x in found], 2)
        np.testing.assert_allclose(together, getattr(want, name), atol=1e-12)


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ({"H": 1, "L": 30, "S": 90, "D": 64}, {"is_causal": True}),  # by dense, after one tile
        ({"L": 80, "S": 90, "D": 64}, {"is_causal": True}),
        (
            {"batch": (1,), "L": 2, "S": 1100, "D": 64},
            {},
        ),  # so few rows that products are with vectors
        ({"batch": (1,), "L": 20, "S": 110, "D": 512}, {}),
        ({"L": 70, "S": 70, "D": 64}, {"softcap": 300.0}),
    ],
)
def test_the_weights_of_the_gradient_have_the_bits_of_those_of_the_output(shape, options):
    name = f"alike {shape} {options}"
    case = make_case(name, **shape, values="keys of mean 64", rounded_once=True, **options)
    (query, key, value), given = case.arguments()
    _, pullback = attention_vjp(query, key, value, **given)
    found = pullback(cotangent(case))
    compare(case, {name: getattr(found, name) for name in ("query", "key", "value")})
