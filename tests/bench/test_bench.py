"""What ``polyattn bench`` measures: the work, turns, the roof, errors, memory and the budget."""

import math
import sys
import time
import types

import numpy as np
import pytest
from optional import jax, torch

from polyattn import attention
from polyattn._dispatch import registry
from polyattn._dispatch.errors import BackendUnavailableError, UnknownBackendError, UnsupportedError
from polyattn.bench import exact, measure, memory, peaks, timing
from polyattn.bench.contender import Running, contenders, everything_here
from polyattn.bench.machine import look
from polyattn.bench.results import BenchResults
from polyattn.bench.workload import Workload
from polyattn.plugin import Backend, BackendSpec

NUMPY, ARRAY_API = contenders("numpy,array-api")
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="the system counts no peak")


@pytest.fixture
def hasty(monkeypatch):
    """Let windows and rests take no time."""
    monkeypatch.setattr(timing, "REST", 0.0)
    monkeypatch.setattr(measure, "REST", 0.0)
    monkeypatch.setattr(timing, "WINDOW", 0.0)


class Acme(Backend):
    """NumPy arrays that pretend to be on two devices of one kind and on the CPU."""

    def __init__(self):
        super().__init__(np)
        self.waited, self.compiled = [], []

    def devices(self):
        return ["npu:0", "npu:1", "cpu"]

    def place(self, array, device):
        return np.array(array)

    def synchronize(self, device=None):
        self.waited.append(device)

    def compile(self, function):
        self.compiled.append(function)
        return function


SPEC = BackendSpec(
    "acme", ("numpy",), "acme:Acme", (), "pip install acme", 3, ("cpu", "npu"), ("float32",)
)


@pytest.fixture
def acme(monkeypatch):
    """Register a backend for the length of a test, and return it."""
    backend = Acme()
    plugin = registry.Registered("acme", "acme", SPEC, backend=backend)
    known = {name: registry._find()[name] for name in registry.names()}
    monkeypatch.setattr(registry, "_plugins", {**known, "acme": plugin})
    return backend


# ---- the work ----

CALLS = {
    "full": Workload(),
    "causal": Workload(causal=True, batch=2),
    "window": Workload(window=(3, 2)),
    "causal window": Workload(window=(3, None), causal=True, heads=4, key_heads=2),
    "one after": Workload(window=(None, 1), size=16, dtype="float16"),
    "decode": Workload(decode=True, causal=True),
    "decode in a window": Workload(decode=True, window=(3, 0)),
}


@pytest.mark.parametrize("length", [1, 2, 11])
@pytest.mark.parametrize("name", CALLS)
def test_visible_scores_and_keys_are_counted_one_by_one(name, length):
    call = CALLS[name]
    rows = 1 if call.decode else length
    seen = np.zeros((rows, length), bool)
    left, right = (length if end is None else end for end in call.window or (None, None))
    for i in range(rows):
        p = i + length - rows
        for j in range(length):
            seen[i, j] = p - left <= j <= p + right and (j <= p or not call.causal)
    assert call.flops(length) == 4 * call.size * call.batch * call.heads * seen.sum()
    elements = 2 * call.heads * rows + 2 * call.key_heads * seen.any(axis=0).sum()
    assert call.bytes(length) == call.batch * elements * call.size * np.dtype(call.dtype).itemsize


def test_a_length_that_no_memory_holds_is_counted_too():
    call, length = Workload(causal=True, window=(2**70, 0), heads=1, key_heads=1, size=1), 10**12
    assert call.flops(length) == 2 * length * (length + 1)
    assert call.bytes(length) == 16 * length


def test_the_arrays_are_the_same_each_time():
    call = Workload(heads=4, key_heads=2, size=8, dtype="float16", batch=3, decode=True)
    first, second = call.arrays(5), call.arrays(5)
    assert [x.shape for x in first] == [(3, 4, 1, 8), (3, 2, 5, 8), (3, 2, 5, 8)]
    assert all(x.dtype == np.float16 for x in first)
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a, b)
    assert call.output_bytes(5) == attention(*first).nbytes


def test_a_workload_says_what_is_asked():
    call = Workload(heads=8, key_heads=2, causal=True, window=(255, None), kernel="dense")
    said = "batch 1, 8/2 heads of 64, float32, causal, window 255 before and all after"
    assert str(call) == f"{said}, kernel dense"


# ---- who is measured ----


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


def test_a_backend_that_names_no_devices_is_measured_where_its_spec_says(acme, monkeypatch):
    monkeypatch.setattr(acme, "devices", list)
    (one,) = contenders("acme")
    assert (one.name, one.device, one.hardware) == ("acme", None, "cpu")
    assert one.start(Workload(size=8), Workload(size=8).arrays(4))().shape == (1, 8, 4, 8)


@pytest.mark.needs("jax", "torch")
def test_all_that_is_here_is_every_plugin_that_loads():
    assert {"numpy", "torch", "jax"} <= set(everything_here())
    assert not {"array-api", "onnx"} & set(everything_here())


@pytest.mark.parametrize(
    ("names", "kind", "message"),
    [
        ("nunpy", UnknownBackendError, "did you mean 'numpy'"),
        ("torch:tpu", BackendUnavailableError, "no device 'tpu' here; it has cpu"),
        ("auto", ValueError, "name backends"),
        ("onnx", UnsupportedError, "'onnx' makes a graph, which another program runs"),
        ("array-api:cpu", ValueError, "takes no device; got 'array-api:cpu'"),
        ("numpy,,torch", ValueError, "a backend's name is missing"),
    ],
)
def test_a_wrong_name_says_what_is_right(names, kind, message):
    with pytest.raises(kind, match=message):
        contenders(names)


def test_a_call_goes_through_the_front_door_compiled_and_is_waited_for(acme):
    one = contenders("acme:npu:1")[0]
    call = Workload(size=8, causal=True, kernel="dense")
    running = one.start(call, call.arrays(4))
    assert running.kernel == "dense"
    assert running.function is acme.compiled[-1]
    output = running()
    assert acme.waited == ["npu:1"]
    arrays = call.arrays(4)
    np.testing.assert_array_equal(output, attention(*arrays, is_causal=True, backend="array-api"))


def test_jax_is_compiled_and_says_which_kernel_runs_so():
    (one,) = contenders("jax:cpu")
    call = Workload(size=8)
    running = one.start(call, call.arrays(4))
    assert "func.func public @main" in running.function.lower(*running.arrays).as_text()
    assert running.kernel == "xla"


def test_who_cannot_take_a_call_says_why():
    assert NUMPY.refusal(Workload(), 16) is None
    assert "no kernel of that name" in NUMPY.refusal(Workload(kernel="sdpa"), 16)


# ---- turns ----


def test_calls_take_turns_in_an_order_that_turns_too(hasty):
    made = []
    calls = {name: lambda name=name: made.append(name) for name in "abc"}
    times = timing.alternate(calls, dict.fromkeys("abc", 1.0), 0.0)
    assert "".join(made) == "abccbaabc"
    assert {name: len(own) for name, own in times.items()} == dict.fromkeys("abc", timing.FEWEST)
    times = timing.alternate({"a": lambda: None}, {"a": 1.0}, 60.0)
    assert len(times["a"]) == timing.MOST  # however much time there is


def test_a_short_call_is_warmed_up_and_a_long_one_is_not():
    calls = []
    timing.window(lambda: calls.append(1), 0.0, expected=1.0)
    assert len(calls) == 1
    timing.window(lambda: calls.append(1), 1e-9, expected=0.0)
    assert len(calls) == 3


def test_the_spread_is_that_of_the_quartiles():
    assert timing.spread_of([5.0, 1.0, 3.0, 2.0, 4.0]) == (3.0, 2.0, 4.0)
    assert timing.spread_of([7.0]) == (7.0, 7.0, 7.0)


# ---- the roof ----


@pytest.fixture
def small_peaks(monkeypatch):
    """Return a function that lets peaks be those of small arrays, and sets what it is given."""

    def small(**settings):
        for name, value in {
            "SIDES": (4, 8),
            "SMALLEST": 2**12,
            "LARGEST": 2**13,
            **settings,
        }.items():
            monkeypatch.setattr(peaks, name, value)

    return small


def test_a_device_has_the_largest_rates_that_anyone_reached_on_it():
    reached = [
        peaks.Peak("slow", "cpu", 10.0, 7.0),
        peaks.Peak("fast", "cpu", 30.0, 5.0),
        peaks.Peak("other", "cuda:0", 99.0, 99.0),
    ]
    assert peaks.roofs(reached) == {
        "cpu": peaks.Peak("fast", "cpu", 30.0, 7.0),
        "cuda:0": reached[2],
    }


def test_the_roof_is_the_memorys_where_little_is_computed():
    call, peak = Workload(), peaks.Peak("numpy", "cpu", 1e11, 1e10)
    assert peaks.roof(peak, call, 4096) == 1e11
    short = call.flops(8) / call.bytes(8) * 1e10
    assert peaks.roof(peak, call, 8) == short < 1e11


@pytest.mark.parametrize(("name", "dtype"), [("numpy", "float32"), ("jax", "float16")])
def test_a_peak_is_of_the_calls_dtype_and_counts_what_is_done(
    name, dtype, monkeypatch, small_peaks
):
    (one,) = contenders(f"{name}:cpu")
    seen = []

    def multiply(a, b, **options):
        seen.append((a.shape, str(a.dtype)))
        return a

    owner = one.backend if dtype == "float32" else one.backend.xp
    monkeypatch.setattr(owner, "matmul", multiply)
    small_peaks(LONG=2.0, _least=lambda call: call() or 0.5)
    peak = peaks.measure(one, dtype)
    assert seen[-1] == ((8, 8), dtype)
    assert peak.product == 2 * 8**3 / 0.5
    assert peak.bandwidth in (1.5 * 2**12 / 0.5, 1.5 * 2**13 / 0.5)


def test_a_product_that_had_to_wait_spoils_no_peak(monkeypatch):
    waits = iter([0.0, 0.05, 0.05])  # the first call of all, and two that are timed

    def call():
        time.sleep(next(waits, 0.0))

    monkeypatch.setattr(peaks, "FOR", 0.2)
    assert peaks._least(call) < 0.05


def test_the_peak_is_of_the_fastest_square_and_for_16_bits_of_the_faster_way(small_peaks):
    seconds = iter([1e-6, 1.0])
    small_peaks(_least=lambda call: next(seconds))
    assert peaks._product(NUMPY, "float32") == 2 * 4**3 / 1e-6
    seconds = iter([2.0, 4.0])  # in float32, in float16
    assert peaks._product(NUMPY, "float16") == 2 * 4**3 / 2.0


def test_peaks_take_half_of_the_time_or_the_smallest_arrays(quick, acme, monkeypatch, small_peaks):
    clock, everyone = [100.0], [NUMPY, ARRAY_API, *contenders("acme")]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: None)

    def slow(call):
        clock[0] += 1.0
        return 0.001  # as told by itself

    small_peaks(_least=slow, SIDES=(4, 8, 16, 32))
    for seconds, calls in ((1.0, 2 * 4), (64.0, 6 * 4)):
        quick.peaks.clear()
        began = clock[0]
        measure.measure_peaks(quick, everyone, began + seconds, lambda text: None)
        assert len(quick.peaks) == len(everyone) == 4
        assert clock[0] - began == calls


# ---- errors ----


@pytest.mark.parametrize("name", CALLS)
def test_exact_rows_are_rows_of_the_whole(name):
    call, length = CALLS[name], 70
    arrays = call.arrays(length)
    wide = [array.astype(np.float64) for array in arrays]
    whole = attention(
        *wide, is_causal=call.causal, window=call.window, backend="array-api", kernel="dense"
    )
    rows = exact.exact_rows(call, arrays, length)
    assert exact.largest_error(whole, rows) < 1e-12
    covered = np.zeros(whole.shape, bool)
    for where, _ in rows:
        covered[where] = True
    assert covered[-1, 0, 0].all()
    assert covered[-1, -1, -1].all()


def test_a_row_or_head_that_is_mixed_up_is_an_error():
    call = Workload(heads=4, key_heads=2, causal=True, size=8)
    arrays = call.arrays(64)
    rows = exact.exact_rows(call, arrays, 64)
    right = attention(*arrays, is_causal=True)
    assert exact.largest_error(right, rows) < 1e-5
    assert exact.largest_error(right[:, ::-1], rows) > 0.1
    assert exact.largest_error(attention(*arrays), rows) > 0.1
    right[0, -1, -1, 0] = np.nan
    assert np.isnan(exact.largest_error(right, rows))


# ---- memory ----


@LINUX
def test_the_growth_of_the_process_is_counted():
    grown = memory.host_peak(lambda: np.ones(2**23, np.float64)[0])
    assert 62 * 2**20 < grown < 80 * 2**20  # the system counts to a megabyte or so


@pytest.mark.slow
@LINUX
@pytest.mark.parametrize("name", ["numpy", "torch:cpu", "jax:cpu"])
def test_all_scores_at_once_are_seen_as_memory(name):
    (one,) = contenders(name)
    call, length = Workload(kernel="dense"), 1024
    scores = 4 * 8 * length**2
    running = one.start(call, call.arrays(length))
    running()
    found = memory.peak_memory(running, call.output_bytes(length))
    assert 1.9 * scores < found < 2.6 * scores


def test_what_a_library_counts_goes_before_the_growth_of_the_process(acme, monkeypatch):
    call = Workload(size=8)
    (one,) = contenders("acme:npu:1")
    running = one.start(call, call.arrays(4))
    assert memory.peak_memory(running, call.output_bytes(4)) is None
    acme.peak_memory = lambda device, function, *arrays: (device, function(*arrays).shape)
    assert memory.peak_memory(running, call.output_bytes(4)) == ("npu:1", (1, 8, 4, 8))
    running = contenders("acme:cpu")[0].start(call, call.arrays(4))
    acme.peak_memory = lambda *given: None
    monkeypatch.setattr(memory, "host_peak", lambda run: 1500)
    assert memory.peak_memory(running, 1024) == 1500 - 1024  # the output is no part of it
    assert memory.peak_memory(running, 2000) == 0


def test_where_nobody_counts_memory_is_not_known(monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "_RESET", tmp_path / "nowhere" / "clear_refs")
    assert memory.host_peak(lambda: None) is None


# ---- the budget ----


@pytest.fixture
def quick(hasty, monkeypatch):
    """Return a report with a roof of which no measurement was made."""
    monkeypatch.setattr(timing, "MOST", timing.FEWEST)
    report = BenchResults(look([NUMPY]), Workload(heads=2, key_heads=2, size=8), "polyattn bench")
    report.peaks.append(peaks.Peak("numpy", "cpu", 1e11, 1e10))
    return report


def measured(report, everyone, lengths, deadline):
    return [*measure.measure(report, everyone, lengths, deadline, lambda text: None)]


@pytest.mark.slow
def test_each_length_is_yielded_with_a_row_for_each_backend(quick):
    groups = measured(quick, [NUMPY, ARRAY_API], (8, 16), 0.0)  # however little time is left
    assert [[(row.length, row.backend) for row in rows] for rows in groups] == [
        [(8, "numpy"), (8, "array-api")],
        [(16, "numpy"), (16, "array-api")],
    ]
    assert quick.rows == [*groups[0], *groups[1]]
    for row in quick.rows:
        assert 0 < row.low <= row.seconds <= row.high
        assert row.rounds == timing.FEWEST
        assert row.error < 1e-6
        assert row.first > 0
        assert row.note is None
    assert {row.kernel for row in quick.rows} == {"small", "dense"}  # of calls as short as these


@pytest.mark.slow
def test_a_backend_that_would_burst_the_budget_sits_out_and_the_row_says_so(quick, monkeypatch):
    monkeypatch.setattr(measure, "LEAST", 0.0)
    quick.peaks.clear()
    first, second = measured(quick, [NUMPY], (32, 64), 0.0)
    assert first[0].note == "only one call, for lack of time"
    assert first[0].rounds == 1
    assert first[0].low == first[0].seconds == first[0].high
    assert second[0].seconds is None
    assert second[0].note.startswith("left out: a call would take about")


def test_a_first_length_that_not_even_a_product_could_do_in_time_sits_out(quick):
    ((row,),) = measured(quick, [NUMPY], (2**22,), time.perf_counter() + 2)
    assert row.seconds is None
    assert row.note.startswith("left out: a call would take about")


@pytest.mark.slow
def test_what_a_short_call_took_says_nothing_of_a_much_longer_one(quick, monkeypatch):
    monkeypatch.setattr(measure, "LEAST", 1e-3)
    quick.peaks[:] = [peaks.Peak("numpy", "cpu", 1e15, 1e10)]
    monkeypatch.setattr(BenchResults, "rate", lambda self, row: 1.0)  # as if all were dispatch
    near, far = measured(quick, [NUMPY], (8, 16), 0.0), measured(quick, [NUMPY], (8, 64), 0.0)
    assert near[1][0].note.startswith("left out")
    assert not (far[1][0].note or "").startswith("left out")


@pytest.mark.slow
def test_a_backend_that_fails_in_a_round_stops_no_other_and_says_why(quick, acme, monkeypatch):
    genuine, calls = Running.__call__, []

    def fail(self):
        if self.contender.backend is acme:
            calls.append(self)
            if len(calls) > 3:  # once started: two that are timed, and one for its memory
                raise RuntimeError("the device\x1b[2J was lost")
        return genuine(self)

    monkeypatch.setattr(Running, "__call__", fail)
    (rows,) = measured(quick, [*contenders("acme:cpu"), NUMPY], (8,), float("inf"))
    assert rows[0].note == "RuntimeError: the device[2J was lost"
    assert rows[0].seconds is None
    assert rows[1].rounds == timing.FEWEST


@pytest.mark.slow
def test_a_length_for_which_there_is_no_memory_leaves_the_rows_before_it(quick, monkeypatch):
    genuine = Workload.arrays
    arrays = lambda self, n: genuine(self, n) if n == 8 else raise_memory_error()  # noqa: E731
    monkeypatch.setattr(Workload, "arrays", arrays)
    first, second = measured(quick, [NUMPY], (8, 16), float("inf"))
    assert first[0].seconds > 0
    assert second[0].note == "MemoryError: no room for it"


def raise_memory_error(*given):
    raise MemoryError("no room for it\nat all")


def test_a_backend_without_a_peak_is_measured_all_the_same(quick, acme, monkeypatch):
    monkeypatch.setattr(peaks, "measure", raise_memory_error)
    quick.peaks.clear()
    measure.measure_peaks(quick, [NUMPY], math.inf, lambda text: None)
    (rows,) = measured(quick, [NUMPY], (8,), float("inf"))
    assert rows[0].seconds > 0
    assert quick.of_product(rows[0]) is None
    assert quick.of_roof(rows[0]) is None


def test_the_budget_is_spent_and_the_longer_a_length_the_more_of_it_it_has():
    left, shares = 1.0, []
    for lengths in (4, 3, 2, 1):
        shares.append(left * measure._share(lengths))
        left -= shares[-1]
    assert left == pytest.approx(0)
    assert shares == sorted(shares)
    assert shares[0] < shares[-1] / 2


def test_a_backend_that_fails_says_so_and_stops_no_other(quick, acme, monkeypatch):
    monkeypatch.setattr(acme, "place", raise_memory_error)
    (rows,) = measured(quick, [*contenders("acme:cpu"), NUMPY], (8,), float("inf"))
    assert rows[0].note == "MemoryError: no room for it"
    assert rows[0].seconds is None
    assert rows[1].seconds > 0


@pytest.mark.slow
def test_an_output_that_is_no_number_has_no_error_that_json_could_hold(quick, acme, monkeypatch):
    monkeypatch.setattr(acme, "place", lambda array, device: np.full_like(array, np.nan))
    (rows,) = measured(quick, contenders("acme:cpu"), (8,), float("inf"))
    assert rows[0].error is None
    assert "NaN" not in quick.as_json()


# ---- what plugins do for it ----


def test_waiting_for_jax_waits_for_what_was_queued():
    backend = contenders("jax:cpu")[0].backend
    slow = jax.jit(lambda x: jax.lax.fori_loop(0, 200, lambda _, y: jax.numpy.tanh(y @ y), x))
    x = jax.numpy.ones((200, 200)) / 200
    slow(x).block_until_ready()
    result = slow(x)
    backend.synchronize("cpu:0")
    assert result.is_ready()


def test_jax_tells_the_scratch_memory_of_a_program():
    backend = contenders("jax:cpu")[0].backend
    function = backend.compile(lambda x: jax.numpy.tanh(x @ x) @ x)
    x = jax.numpy.ones((256, 256))
    assert x.nbytes <= backend.peak_memory("cpu:0", function, x) <= 3 * x.nbytes


def test_torch_tells_what_its_allocator_counts_beside_the_output(monkeypatch):
    backend = contenders("torch:cpu")[0].backend
    x, calls = torch.ones(1000), []
    monkeypatch.setattr(backend, "synchronize", lambda device: calls.append("wait"))
    for name, bytes_ in (("memory_allocated", 500), ("max_memory_allocated", 9000)):
        monkeypatch.setattr(torch.cuda, name, lambda device, bytes_=bytes_: bytes_)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: calls.append("reset"))
    assert backend.peak_memory("cuda:0", lambda x: x + 1, x) == 9000 - 500 - 4000
    assert calls == ["wait", "reset", "wait"]
    assert backend.peak_memory("cpu", lambda x: x + 1, x) is None


def test_cupy_tells_by_how_much_its_pool_grows_beside_the_output(monkeypatch):
    pytest.importorskip("cupy")
    from polyattn_cupy import backend as module

    pool, on = types.SimpleNamespace(total=300), []
    pool.free_all_blocks = lambda: setattr(pool, "total", 100)
    pool.total_bytes = lambda: pool.total

    def call(x):
        pool.total += 4096
        return x

    cuda = types.SimpleNamespace(Device=lambda number: _Current(number, on))
    fake = types.SimpleNamespace(cuda=cuda, get_default_memory_pool=lambda: pool)
    monkeypatch.setattr(module, "cupy", fake)
    backend = module.CupyBackend.__new__(module.CupyBackend)
    assert backend.peak_memory("cuda:1", call, np.zeros(16)) == 4096 - 128
    assert on == [1, "in", 1, "wait", "out"]


class _Current:
    """A device of CuPy that notes when it is the current one and when it is waited for."""

    def __init__(self, number, log):
        self.log = log
        log.append(number)

    def __enter__(self):
        self.log.append("in")

    def __exit__(self, *error):
        self.log.append("out")

    def synchronize(self):
        self.log.append("wait")


def test_a_contender_is_told_of_its_own_hardware_alone(acme, monkeypatch):
    asked = []
    acme.hardware = lambda device: asked.append(device) or {"name": "NPU", "memory": 2**34}
    machine = look([NUMPY, *contenders("acme")])
    assert asked == ["npu:0"]
    assert machine.devices == {"npu:0": "NPU, 16 GiB"}
    assert machine.libraries["numpy"] == np.__version__
    assert machine.cores >= 1


def test_the_machine_is_said_to_be_busy_if_it_is(monkeypatch):
    fake = types.SimpleNamespace(**{**vars(sys.modules["os"]), "getloadavg": lambda: (50.0, 0, 0)})
    monkeypatch.setattr("polyattn.bench.machine.os", fake)
    machine = look([NUMPY])
    assert machine.is_busy
    assert "this machine is busy" in "\n".join(machine.lines())


def test_a_variable_that_changes_speed_is_recorded_and_no_other(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("SECRET_TOKEN", "x")
    assert look([NUMPY]).environment["OMP_NUM_THREADS"] == "3"
    assert "SECRET_TOKEN" not in look([NUMPY]).environment
