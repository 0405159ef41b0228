"""The measurements of ``polyattn bench``: work, turns, roof and budget."""

import math
import os
import time

import numpy as np
import pytest

from polyattn import attention
from polyattn._dispatch import contract, registry
from polyattn.bench import machine, measure, peaks, timing
from polyattn.bench.contender import contenders, everything_here
from polyattn.bench.results import BenchResults
from polyattn.bench.workload import Workload
from polyattn.plugin import Backend, BackendSpec

NUMPY, ARRAY_API = contenders("numpy,array-api")
FOREVER = math.inf
HASTE = timing.Turns(rounds=timing.FEWEST, window=0.0, rest=0.0)


class Acme(Backend):
    """NumPy arrays that pretend to be on two devices of one kind and on the CPU."""

    def __init__(self):
        super().__init__(np)
        self.waited = []

    def devices(self):
        return ["npu:0", "npu:1", "cpu"]

    def place(self, array, device):
        return np.array(array)

    def synchronize(self, device=None):
        self.waited.append(device)


@pytest.fixture
def acme(monkeypatch):
    """Register a backend for the length of a test, and return it."""
    backend = Acme()
    spec = BackendSpec(
        "acme", ("numpy",), "acme:Acme", (), "pip install acme", 3, ("cpu", "npu"), ("float32",)
    )
    plugin = contract.Plugin("acme", "acme", spec, backend=backend)
    known = {name: registry._find()[name] for name in registry.names()}
    monkeypatch.setattr(registry, "_plugins", {**known, "acme": plugin})
    return backend


@pytest.fixture
def quick(monkeypatch):
    """Return results with a roof of which no measurement was made; windows take no time."""
    monkeypatch.setattr(measure, "TURNS", HASTE)
    call = Workload(heads=2, key_heads=2, size=8)
    results = BenchResults(machine.look([NUMPY]), call, "polyattn bench")
    results.peaks.append(peaks.Peak("numpy", "cpu", 1e11, 1e10))
    return results


def measured(results, everyone, lengths, deadline=FOREVER):
    return [*measure.measure(results, everyone, lengths, deadline, lambda text: None)]


def raise_memory_error(*given):
    raise MemoryError("no room\x1b[2J for it\nat all")


# ---- the work and who does it ----

CALLS = {
    "full": Workload(),
    "causal": Workload(causal=True, batch=2),
    "causal window": Workload(window=(3, None), causal=True, heads=4, key_heads=2),
    "decode in a window": Workload(decode=True, window=(3, 0)),
}


@pytest.mark.parametrize("name", CALLS)
def test_visible_scores_and_keys_are_counted_one_by_one(name):
    call = CALLS[name]
    for length in (1, 2, 11):
        rows = 1 if call.decode else length
        left, right = (length if end is None else end for end in call.window or (None, None))
        p, j = np.ogrid[length - rows : length, :length]
        seen = (p - left <= j) & (j <= p + right) & ((j <= p) | (not call.causal))
        assert call.flops(length) == 4 * call.size * call.batch * call.heads * seen.sum()
        elements = 2 * call.heads * rows + 2 * call.key_heads * seen.any(axis=0).sum()
        bytes_each = np.dtype(call.dtype).itemsize
        assert call.bytes(length) == call.batch * elements * call.size * bytes_each


@pytest.mark.parametrize(
    ("names", "found"),
    [
        ("acme", [("acme:npu", "npu:0", "npu:0"), ("acme:cpu", "cpu", "cpu")]),  # each kind once
        ("acme:npu:1,acme:1", [("acme:npu:1", "npu:1", "npu:1")]),
        (["numpy", "numpy:cpu", "array-api"], [(n, "cpu", "cpu") for n in ("numpy", "array-api")]),
        ("torch:cpu,jax", [("torch:cpu", "cpu", "cpu"), ("jax:cpu", "cpu:0", "cpu")]),
    ],
)
def test_a_name_means_each_kind_of_device_or_the_one_that_it_names(acme, names, found):
    assert [(one.name, one.device, one.hardware) for one in contenders(names)] == found


@pytest.mark.needs("jax", "torch")
def test_all_backends_that_compute_are_measured_by_default():
    first, *others = everything_here()
    assert first == "numpy"  # the ratios are over its time
    assert {"torch", "jax"} <= set(others)
    assert not {"array-api", "onnx"} & set(others)


def test_the_public_call_is_timed_until_its_device_is_done(acme):
    call = Workload(size=8, causal=True, kernel="dense")
    running = contenders("acme:npu:1")[0].start(call, call.arrays(4))
    assert running.kernel == "dense"
    expected = attention(*call.arrays(4), is_causal=True, backend="array-api")
    np.testing.assert_array_equal(running(), expected)
    assert acme.waited == ["npu:1"]


def test_the_machine_lists_what_changes_speed(acme, monkeypatch):
    acme.hardware = lambda device: {"name": device, "memory": 2**34}
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("SECRET_TOKEN", "x")
    monkeypatch.setattr(os, "getloadavg", lambda: (50.0, 0, 0))
    here = machine.look([NUMPY, *contenders("acme")])
    assert here.devices == {"npu:0": "npu:0, 16 GiB"}
    assert here.libraries["numpy"] == np.__version__
    assert (here.environment["OMP_NUM_THREADS"], "SECRET_TOKEN" in here.environment) == ("3", False)
    assert "this machine is busy" in "\n".join(here.lines())


# ---- turns, and the roof ----


def test_calls_take_turns_in_reversed_order_and_are_warmed_up_unless_they_fill_the_window():
    made, calls = [], {name: lambda name=name: made.append(name) for name in "abc"}
    times = timing.alternate(calls, HASTE._replace(rounds=5), seconds=0.0)
    assert "".join(made) == "abccbaabc"
    assert {name: len(own) for name, own in times.items()} == dict.fromkeys("abc", timing.FEWEST)
    ticks, made = iter(range(99)), []
    turns = timing.Turns(rounds=1, window=2.0, rest=0.0, clock=lambda: float(next(ticks)))
    calls = {name: lambda name=name: made.append(name) for name in "ab"}
    times = timing.alternate(calls, turns, {"b": 2.0})
    assert "".join(made) == "aaabb"
    assert times == {"a": [1.0], "b": [1.0]}


def test_the_roof_of_a_device_is_its_largest_rate_or_that_of_its_memory():
    reached = [peaks.Peak("slow", "cpu", 10.0, 7.0), peaks.Peak("fast", "cpu", 30.0, 5.0)]
    assert peaks.roofs(reached) == {"cpu": peaks.Peak("fast", "cpu", 30.0, 7.0)}
    call, peak = Workload(), peaks.Peak("numpy", "cpu", 1e11, 1e10)
    assert peaks.roof(peak, call, 4096) == 1e11
    assert peaks.roof(peak, call, 8) == call.flops(8) / call.bytes(8) * 1e10 < 1e11


@pytest.fixture
def small_peaks(monkeypatch):
    """Measure peaks of small arrays."""
    for name, value in {"SIDES": (4, 8), "SMALLEST": 2**12, "LARGEST": 2**13}.items():
        monkeypatch.setattr(peaks, name, value)


def test_a_peak_counts_the_operations_and_bytes_of_the_calls_dtype(monkeypatch, small_peaks):
    (one,), seen = contenders("jax:cpu"), []

    def multiply(a, b, **options):
        seen.append((a.shape, str(a.dtype)))
        return a

    monkeypatch.setattr(one.backend.xp, "matmul", multiply)
    monkeypatch.setattr(peaks, "LONG", 2.0)
    monkeypatch.setattr(peaks, "_least", lambda call: call() or 0.5)
    peak = peaks.measure(one, "float16")
    assert seen[-1] == ((8, 8), "float16")
    assert peak.product == 2 * 8**3 / 0.5
    assert peak.bandwidth in (1.5 * 2**12 / 0.5, 1.5 * 2**13 / 0.5)


def test_peaks_take_half_of_the_time_or_the_smallest_arrays(quick, monkeypatch, small_peaks):
    clock = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: None)

    def slow(call):
        clock[0] += 1.0
        return 0.001  # as told by itself

    monkeypatch.setattr(peaks, "_least", slow)
    monkeypatch.setattr(peaks, "SIDES", (4, 8, 16, 32))
    for seconds, calls in ((1.0, 4), (64.0, 12)):
        began = clock[0]
        measure.measure_peaks(quick, [NUMPY, ARRAY_API], began + seconds, lambda text: None)
        assert clock[0] - began >= calls


# ---- the budget ----


def test_each_length_has_a_row_for_each_backend(quick):
    groups = measured(quick, [NUMPY, ARRAY_API], (8, 16), 0.0)  # however little time is left
    found = [[(row.length, row.backend) for row in rows] for rows in groups]
    assert found == [[(n, "numpy"), (n, "array-api")] for n in (8, 16)]
    assert quick.rows == [*groups[0], *groups[1]]
    for row in quick.rows:
        assert 0 < row.low <= row.seconds <= row.high
        assert (row.rounds, row.first > 0, row.note) == (timing.FEWEST, True, None)
    assert {row.kernel for row in quick.rows} == {"small", "dense"}  # of calls as short as these
    assert all(rows[0].ratio == 1.0 != rows[1].ratio for rows in groups)


def test_a_backend_that_would_exceed_the_budget_is_left_out_with_a_note(quick, monkeypatch):
    ((row,),) = measured(quick, [NUMPY], (2**22,), time.perf_counter() + 2)
    assert row.seconds is None
    assert row.note.startswith("left out: a call would take about")
    monkeypatch.setattr(measure, "LEAST", 0.0)
    quick.peaks.clear()
    (first,), (second,) = measured(quick, [NUMPY], (32, 64), 0.0)
    assert first.note == "only one call, for lack of time"
    assert first.low == first.seconds == first.high
    assert first.ratio is None
    assert second.note.startswith("left out: a call would take about")


def test_a_failure_is_noted_and_stops_no_other(quick, acme, monkeypatch):
    monkeypatch.setattr(acme, "place", raise_memory_error)
    monkeypatch.setattr(peaks, "measure", raise_memory_error)
    quick.peaks.clear()
    measure.measure_peaks(quick, [NUMPY], FOREVER, lambda text: None)
    ((first, other),) = measured(quick, [*contenders("acme:cpu"), NUMPY], (8,))
    assert (first.seconds, first.note) == (None, "MemoryError: no room[2J for it")
    assert (other.seconds > 0, quick.of_roof(other)) == (True, None)
    monkeypatch.setattr(Workload, "arrays", raise_memory_error)
    ((row,),) = measured(quick, [NUMPY], (16,))
    assert row.note == first.note
