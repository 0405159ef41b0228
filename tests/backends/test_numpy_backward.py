"""The gradients of NumPy's own kernel beside the suite: the same bits on any threads, memory."""

import math
import threading
import time
import tracemalloc

import numpy as np
import pytest
from arrays import draw

import polyattn
from polyattn import Gradients, attention_backward, attention_partial, attention_vjp, masks, scores
from polyattn._base.threads import thread_count
from polyattn.conformance.cases.case import make_case
from polyattn.conformance.checks.gradients import compare
from polyattn.conformance.reference.gradients import cotangent
from polyattn_numpy import backward as backward_module
from polyattn_numpy import prepared, sequencer, tiling
from polyattn_numpy.tiled_kernel import NumpyTiled

B, H, G, L, S, D, E = 2, 4, 2, 70, 80, 8, 12
KEYS = np.arange(S)


def of_tiles(tile=2**12):
    kernel = NumpyTiled()
    kernel.tile = tile
    return kernel


def arrays(*shapes):
    return draw(*(shapes or [(B, H, L, D), (B, G, S, D), (B, G, S, E)]), dtype="float64")


def backward(qkv, gradients=None, tile=2**12, **options):
    """Return the gradients of a call in small tiles, and the cotangents of its results."""
    partial = attention_partial(*qkv, kernel=of_tiles(tile), **options)
    shapes = partial.output.shape, partial.logsumexp.shape
    along, rows = gradients or draw(*shapes, dtype="float64", seed=8)
    found = attention_backward(
        *qkv, partial, along, logsumexp_gradient=rows, kernel=of_tiles(tile), **options
    )
    return found, (along, rows)


RANDOM = np.random.default_rng(11).random((B, H, L, S)) > 0.7
(BIAS,) = draw((1, H, L, S), dtype="float64", seed=5)
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
    ("options", "items_of_keys", "items"),
    [
        ({"bias": BIAS[0, 0]}, 1, B),
        ({"bias": BIAS[..., :1, :]}, B, B),
        ({"mask": RANDOM}, 1, B),
        ({"sinks": BIAS[0, :, 0, 0], "is_causal": True}, B, B),
        ({"score_mod": scores.alibi(H)}, 1, B),
        # A task has several items, one item or some heads, by the number of threads.
        ({"bias": np.ones((9, 1, L, S))}, 9, 9),
        ({}, 1, 9),
    ],
    ids=["bias", "heads' bias", "mask", "causal, sinks", "alibi", "items' bias", "shared keys"],
)
def test_threads_and_other_items_change_no_bit(options, items_of_keys, items, many_tasks):
    qkv = arrays((items, H, L, D), (items_of_keys, G, S, D), (items, G, S, E))

    def run(count):
        with polyattn.use_threads(count):
            return backward(qkv, tile=2**12 if items == B else 2**16, **options)

    together, cotangents = run(1)
    assert bits(together) == bits(run(2)[0]) == bits(run(5)[0])
    if items_of_keys == B:
        own = [x[1:2] for x in (*qkv, *cotangents)]
        alone, _ = backward(own[:3], own[3:], **options)
        assert bits(alone)[:3] == [x[1:2].tobytes() for x in together[:3]]


class FirstTaskLast:
    """Holds the first task back until another has to wait for it, or all others have ended."""

    def __init__(self, monkeypatch):
        self.threads, self.waited, self.ended = set(), set(), []
        self.go_on = threading.Event()
        self.run = backward_module.BackwardSweep.run
        self.wait_for = sequencer.Ticket._wait_for
        monkeypatch.setattr(
            backward_module.BackwardSweep, "run", lambda sweep: self.run_late(sweep)
        )
        monkeypatch.setattr(sequencer.Ticket, "_wait_for", lambda *x: self.watch(*x))

    def run_late(self, sweep):
        self.threads.add(threading.current_thread().name)
        if sweep.number == 0 and thread_count() > 1:
            assert self.go_on.wait(60)
        self.run(sweep)
        self.ended.append(sweep.number)
        if len(self.ended) == len(sweep.sums.cut) - 1:
            self.go_on.set()

    def watch(self, ticket, other, column):
        if other == 0 and ticket._order.reached[0] < column:
            self.waited.add(ticket._number)
            self.go_on.set()
        self.wait_for(ticket, other, column)


@pytest.mark.parametrize(("heads", "shape"), [(3, (130, 130)), (3, (1, 3, 130, 130))], ids=str)
def test_several_threads_work_and_add_in_one_order(many_tasks, heads, shape, monkeypatch):
    qkv = arrays((1, heads, 130, D), (1, heads, 130, D), (1, heads, 130, E))
    partial, bias = attention_partial(*qkv, is_causal=True), np.zeros(shape)

    def run(count):
        with monkeypatch.context() as context, polyattn.use_threads(count):
            watched = FirstTaskLast(context)
            options = {"mask": lambda b, h, i, j: i >= j, "bias": bias, "kernel": of_tiles()}
            return bits(attention_backward(*qkv, partial, qkv[2], **options)), watched

    found, watched = run(3)
    assert watched.waited
    assert len(watched.threads) > 1
    expected, watched = run(1)
    assert found == expected
    assert (len(watched.threads), watched.waited) == (1, set())


def test_an_error_in_one_thread_stops_those_that_wait(many_tasks):
    calls = []

    def fails(b, h, i, j):
        calls.append(1)
        time.sleep(0.002)
        if len(calls) >= 30:
            raise KeyError("in the middle")
        return i >= j

    qkv = arrays((1, 1, 500, D), (1, 1, 500, D), (1, 1, 500, E))
    partial = attention_partial(*qkv, is_causal=True)
    with polyattn.use_threads(3), pytest.raises(KeyError, match="in the middle"):
        attention_backward(*qkv, partial, qkv[2], mask=fails, kernel=of_tiles())
    made = len(calls)
    time.sleep(0.05)
    assert len(calls) == made < 40


# ---- hidden keys -------------------------------------------------------------------------------

HIDDEN = 60  # the keys from here on hold NaN or infinity


def only_before(s, b, h, i, j):
    return np.where(j < HIDDEN, s, -np.inf)


SHOWN = {"mask": KEYS < HIDDEN}
#: How they are hidden from all rows.
HIDES = {
    "expression": {"mask": masks.prefix(HIDDEN)},
    "bias": {"bias": np.where(KEYS < HIDDEN, 0, -math.inf)},
    "score function": {
        "score_mod": scores.function(only_before, lambda s, b, h, i, j: 1.0 * (j < HIDDEN))
    },
    "rules": {**SHOWN, "softcap": 2.0, "dropout": (0.2, 1), "score_mod": scores.alibi(H)},
    "distance": {**SHOWN, "similarity": scores.distance()},
    "empty vectors": {**SHOWN, "bias": BIAS},
}


@pytest.mark.parametrize("option", HIDES)
def test_hidden_poison_changes_no_bit(option):
    size = 0 if option == "empty vectors" else D
    qkv, options = arrays((B, H, L, size), (B, G, S, size), (B, G, S, E)), HIDES[option]
    expected, gradients = backward(qkv, **options)
    qkv[1][:, :, HIDDEN:], qkv[2][:, :, HIDDEN + 9 :] = -math.inf, math.nan
    found, _ = backward(qkv, gradients, **options)
    assert bits(found) == bits(expected)
    assert not found.key[:, :, HIDDEN:].any()


def test_a_sink_of_no_weight_has_no_gradient_from_rows_without_keys():
    sinks = np.array([-math.inf, 0.5, 0.5, -math.inf])
    found, _ = backward(arrays(), mask=np.arange(L)[:, None] > 3, sinks=sinks)
    assert np.isfinite(found.sinks).all()
    assert not found.sinks[sinks == -math.inf].any()


# ---- dtypes and memory -------------------------------------------------------------------------


def test_memory_is_for_a_few_tiles_beside_the_gradients():
    qkv, options = draw(*[(1, 1, 2400, 64)] * 3), {"bias": np.zeros((1, 2400), "f")}
    partial = attention_partial(*qkv)
    tracemalloc.start()
    with polyattn.use_threads(2):
        attention_backward(*qkv, partial, qkv[2], **options)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < sum(x.nbytes for x in qkv) + 12 * 2**20  # the scores have 22 MiB


@pytest.mark.parametrize(
    "options",
    [
        {"H": 1, "L": 30, "S": 90, "D": 64, "is_causal": True},  # by dense, after one tile
        {"L": 80, "S": 90, "D": 64, "is_causal": True},
        {"batch": (1,), "L": 2, "S": 500, "D": 64},  # so few rows that products are with vectors
    ],
    ids=["dense", "tiles", "vectors"],
)
def test_the_weights_of_the_gradient_have_the_bits_of_those_of_the_output(options):
    values = {"values": "keys of mean 64", "rounded_once": True}
    case = make_case(f"alike {options}", **values, **options)
    (query, key, value), given = case.arguments()
    _, pullback = attention_vjp(query, key, value, **given)
    found = pullback(cotangent(case))
    compare(case, {name: getattr(found, name) for name in ("query", "key", "value")})


def test_the_gradient_of_a_softcap_is_the_same_by_either_exponential(monkeypatch):
    qkv, found = [x.astype("float32") for x in arrays()], []
    for by_exp2 in (False, True):
        monkeypatch.setattr(prepared, "fast_exp2", lambda dtype, answer=by_exp2: answer)
        kernel = of_tiles()
        partial = attention_partial(*qkv, softcap=2.0, kernel=kernel)
        given = {"softcap": 2.0, "kernel": kernel, "into": Gradients()}
        gradients = attention_backward(*qkv, partial, partial.output, **given)
        found.append(float(gradients.softcap))
    assert math.isclose(*found, rel_tol=1e-3)  # a lost factor of log2(e) is 1.44
