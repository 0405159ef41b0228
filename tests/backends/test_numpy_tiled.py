"""NumPy's own tiled kernel: its threads, its cuts, the three kinds of pass."""

import contextlib
import itertools
import math
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import polyattn
from polyattn import attention, attention_partial, scores
from polyattn._base.span import Span
from polyattn._core.expressions.replacements import Distance
from polyattn._core.tiles.band import column_span
from polyattn_numpy import thread_pool
from polyattn_numpy.tiled_kernel import NumpyTiled
from polyattn_numpy.tiling import tasks, tiles

KERNEL = "tiled"
OPTIONS = {
    "full": {},
    "causal": {"is_causal": True},
    "window": {"window": (100, 30)},
    "bias": {"bias": np.linspace(-2, 2, 700, dtype=np.float32)},
    "mask": {"mask": np.random.default_rng(5).random((700, 700)) > 0.4},
    "mask function": {"mask": lambda b, h, i, j: (i + j + h + b) % 3 != 0},
    "score_mod": {"score_mod": lambda s, b, h, i, j: s - 0.01 * abs(i - j) + 0.1 * h - b},
    "sinks": {"sinks": np.linspace(-1, 1, 8, dtype=np.float32)},
    "softcap": {"softcap": 2.0},
}


def randn(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


@pytest.fixture
def qkv():
    return randn(2, 8, 700, 32), randn(2, 4, 700, 32, seed=1), randn(2, 4, 700, 32, seed=2)


def bits(result):
    return [np.ascontiguousarray(x).tobytes() for x in result]


def blas_threads():
    return [library.get_num_threads() for library in thread_pool.blas.libraries()]


# ---- threads -----------------------------------------------------------------------------------


@pytest.mark.parametrize("option", OPTIONS)
def test_any_number_of_threads_gives_the_same_bits(qkv, option):
    def run(count):
        with polyattn.use_threads(count):
            return bits(attention_partial(*qkv, kernel=KERNEL, **OPTIONS[option]))

    one = run(1)
    assert all(run(count) == one for count in (2, 5))


@pytest.mark.parametrize("option", ["full", "causal", "mask", "mask function", "bias"])
def test_one_item_has_the_same_bits_alone(qkv, option):
    options = OPTIONS[option] if option != "mask function" else {"mask": lambda b, h, i, j: i != j}
    both = attention_partial(*qkv, kernel=KERNEL, **options)
    for item in range(2):
        alone = attention_partial(*(x[item : item + 1] for x in qkv), kernel=KERNEL, **options)
        assert bits(alone) == bits(x[item : item + 1] for x in both)


def test_several_threads_do_work(qkv, meet):
    def watch(b, h, i, j):
        meet()
        return i >= j

    with polyattn.use_threads(3):
        attention(*qkv, mask=watch)
    assert len(meet.seen) > 1
    meet.seen.clear()
    with polyattn.use_threads(1):
        attention(*qkv, mask=watch)
    assert meet.seen == {threading.current_thread().name}


def test_callers_own_threads_get_the_same_bits(qkv):
    want, found = bits([attention(*qkv, is_causal=True)]), []

    def call():
        found.append(bits([attention(*qkv, is_causal=True)]) == want)

    callers = [threading.Thread(target=call) for _ in range(8)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert found == [True] * 8


@pytest.fixture
def two_blas_threads():
    """BLAS with two threads, whatever an earlier test has left it."""
    before = blas_threads()
    for library in thread_pool.blas.libraries():
        library.set_num_threads(2)
    yield
    for library, count in zip(thread_pool.blas.libraries(), before, strict=True):
        library.set_num_threads(count)


def test_blas_has_its_threads_back(qkv, two_blas_threads):
    held = []

    def look(b, h, i, j):
        held.extend(blas_threads())
        return i >= j

    with polyattn.use_threads(2):
        attention(*qkv, mask=look)
    assert set(held) == {1}
    assert set(blas_threads()) == {2}


def test_blas_is_held_and_put_back_by_any_thread(two_blas_threads):
    """The first of two calls that overlap ends first, so that another thread puts it back."""
    blas, begun, ends = (
        thread_pool.Blas(thread_pool.numpys_blas),
        threading.Event(),
        threading.Event(),
    )
    held = []

    def second():
        begun.set()
        ends.wait(30)
        held.extend(blas_threads())

    other = threading.Thread(target=blas.held, args=(second,))

    def first():
        other.start()
        begun.wait(30)

    blas.held(first)
    ends.set()
    other.join(30)
    assert set(held) == {1}
    assert set(blas_threads()) == {2}
    alone = threading.Thread(target=blas.held, args=(lambda: held.extend(blas_threads()),))
    alone.start()
    alone.join(30)
    assert set(held) == {1}
    assert set(blas_threads()) == {2}


def test_first_calls_that_meet_hold_blas_together(two_blas_threads):
    """One finds the libraries after the other has limited them."""
    delays, meet = iter([0.05, 0.0]), threading.Barrier(2)

    def found_slowly():
        time.sleep(next(delays, 0))
        return thread_pool.numpys_blas()

    blas = thread_pool.Blas(found_slowly)

    def work():
        time.sleep(0.1)
        return blas_threads()

    def call():
        meet.wait(30)
        assert blas.libraries()
        return blas.held(work)

    with ThreadPoolExecutor(2) as pool:
        held = [pool.submit(call) for _ in range(2)]
        assert all(set(one.result(30)) == {1} for one in held)
    assert set(blas_threads()) == {2}
    assert blas.threads() == 2


class Mkl(threading.local):
    """A controller of MKL, in which each thread has a number of its own."""

    internal_api = "mkl"
    count = 2

    def get_num_threads(self):
        return self.count

    def set_num_threads(self, count):
        self.count = count


class OnOpenmp(Mkl):
    """A controller of OpenBLAS as conda-forge builds it for some."""

    internal_api, threading_layer = "openblas", "openmp"


@pytest.mark.parametrize("kind", [Mkl, OnOpenmp])
def test_a_number_for_each_thread_is_held_in_all_and_put_back_in_each(kind, monkeypatch):
    mkl, seen = kind(), {}  # the count that each thread sees
    monkeypatch.setattr(thread_pool, "blas", thread_pool.Blas(lambda: [mkl]))
    monkeypatch.setattr(thread_pool, "_pool", thread_pool.Pool())
    all_here = threading.Barrier(4)  # two callers and the two threads that help both

    def look(item):
        thread = threading.current_thread()
        if thread not in seen:
            seen[thread] = mkl.count
            all_here.wait(30)

    def call():
        thread_pool.each(look, range(3), 3, thread_pool.Shared())
        return mkl.count

    with ThreadPoolExecutor(1) as pool:
        elsewhere = pool.submit(call)
        assert call() == elsewhere.result(30) == 2
    assert list(seen.values()) == [1] * 4
    assert thread_pool.default() == 2


def test_an_error_in_another_thread_comes_out_with_its_traceback(qkv, two_blas_threads):
    caller, failed = threading.current_thread(), threading.Event()

    def fails_elsewhere(b, h, i, j):
        if threading.current_thread() is not caller:
            failed.set()
            raise KeyError("in a helper")
        assert failed.wait(60)
        return i >= j

    with polyattn.use_threads(2), pytest.raises(KeyError, match="in a helper") as caught:
        attention(*qkv, mask=fails_elsewhere)
    frames = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert "fails_elsewhere" in frames
    assert set(blas_threads()) == {2}
    assert np.isfinite(attention(*qkv)).all()


def test_an_error_in_the_callers_thread_stops_the_others(qkv, monkeypatch):
    caller, calls, states = threading.current_thread(), [], []

    class Watched(thread_pool.Shared):
        def __init__(self):
            super().__init__()
            states.append(self)

    def fails_here(b, h, i, j):
        calls.append(1)
        if threading.current_thread() is caller:
            raise KeyError("here")
        while not states[0].stopped:
            time.sleep(0.001)
        return i >= j

    monkeypatch.setattr(thread_pool, "Shared", Watched)

    with polyattn.use_threads(2), pytest.raises(KeyError, match="here"):
        attention(*qkv, mask=fails_here)
    made = len(calls)
    time.sleep(0.05)
    assert len(calls) == made < 8


def test_the_callers_context_holds_in_every_thread(qkv):
    """NumPy's error state is one; a function that divides by zero must not be reported."""
    with polyattn.use_threads(2), np.errstate(all="raise"):
        attention(*qkv, score_mod=lambda s, b, h, i, j: s + 0.0 / (s * 0 + 1))
        attention(*(x * 30 for x in qkv), is_causal=True)


@pytest.mark.skipif(not hasattr(signal, "SIGINT") or os.name == "nt", reason="needs signals")
def test_an_interrupt_stops_a_long_call():
    code = """
import os, signal, threading, time
import numpy as np
import polyattn
from polyattn_numpy import thread_pool
signal.signal(signal.SIGINT, signal.default_int_handler)  # a parent in the background ignores it
x = np.ones((1, 8, 8192, 64), np.float32)
small = np.ones((1, 8, 600, 64), np.float32)
with polyattn.use_threads(2):
    polyattn.attention(small, small, small)
    before = [library.get_num_threads() for library in thread_pool.blas.libraries()]
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    start = time.perf_counter()
    try:
        for _ in range(100):
            polyattn.attention(x, x, x)
    except KeyboardInterrupt:
        print("interrupted", time.perf_counter() - start)
    assert [library.get_num_threads() for library in thread_pool.blas.libraries()] == before
    assert not any(limit.holders for limit in thread_pool.blas.limits())
    print(float(polyattn.attention(small, small, small).max()))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first.startswith("interrupted")
    assert float(first.split()[1]) < 5
    assert float(second) == pytest.approx(1, rel=1e-5)


def interrupt_at(place, work):
    """Run some work, interrupt it at an instruction of `threads`; return whether it got so far."""
    events = itertools.count()

    def trace(frame, event, argument):
        if frame.f_code.co_filename != thread_pool.__file__:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode" and next(events) == place:
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys._getframe().f_trace_opcodes = True  # Python 3.12 counts none without it
    sys.settrace(trace)
    try:
        work()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


@pytest.mark.parametrize("fails", [False, True], ids=["it works", "it fails"])
def test_an_interrupt_between_any_two_instructions_leaves_nothing_held(two_blas_threads, fails):
    before, done = blas_threads(), []

    def work(item):
        assert set(blas_threads()) == {1}
        done.append(item)
        if fails:
            raise KeyError(item)

    def call():
        with contextlib.suppress(KeyError):
            thread_pool.each(work, range(3), min(2, thread_pool.default()), thread_pool.Shared())

    call()
    for place in itertools.count():
        interrupted = interrupt_at(place, call)
        assert blas_threads() == before, place
        elsewhere = threading.Thread(target=call, daemon=True)
        done.clear()
        elsewhere.start()
        elsewhere.join(30)
        assert not elsewhere.is_alive(), place
        assert len(done) == 3 or fails, place
        if not interrupted:
            break
    assert place > 300


@pytest.mark.slow
def test_a_call_at_exit_is_computed(run_python):
    code = """
import atexit
import numpy as np, polyattn
x = np.ones((1, 8, 700, 64), np.float32)

def call():
    with polyattn.use_threads(3):
        print(round(float(polyattn.attention(x, x, x).mean()), 3))

call()
atexit.register(call)
"""
    assert run_python(code).split() == ["1.0", "1.0"]
    assert run_python(code.replace("\ncall()", "")).split() == ["1.0"]


def test_threads_that_cannot_be_started_are_not_needed(qkv, monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(thread_pool, "_pool", thread_pool.Pool())
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with polyattn.use_threads(3):
        assert np.isfinite(attention(*qkv)).all()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_has_threads_of_its_own(run_python):
    said = run_python("""
import os, threading, time
import numpy as np
import polyattn
x = np.random.default_rng(0).standard_normal((1, 8, 700, 64), dtype=np.float32)
seen = set()

def watch(b, h, i, j):
    seen.add(threading.current_thread().name)
    while len(seen) < 2:  # until another thread has come
        time.sleep(0.001)
    return i >= j

with polyattn.use_threads(3):
    here = polyattn.attention(x, x, x, mask=watch)
    child = os.fork()
    if child == 0:
        seen.clear()
        there = polyattn.attention(x, x, x, mask=watch)
        os._exit(0 if (here == there).all() and len(seen) > 1 else 1)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
""")
    assert said.split() == ["0"]


def test_a_fork_amid_a_call_leaves_the_child_no_held_blas(two_blas_threads):
    mkl = Mkl()
    blas = thread_pool.Blas(lambda: [*thread_pool.numpys_blas(), mkl])
    before = blas_threads()
    blas._take(object())
    assert {*blas_threads(), mkl.count} == {1}
    blas.forget_holders()
    assert blas_threads() == before
    assert mkl.count == 2
    assert set(blas.held(blas_threads)) == {1}
    assert blas_threads() == before


def test_a_fork_before_any_call_looks_for_no_blas():
    thread_pool.Blas(pytest.fail).forget_holders()


def test_blas_that_cannot_be_held_means_one_thread(qkv, monkeypatch):
    monkeypatch.setattr(thread_pool, "blas", thread_pool.Blas(list))
    seen = set()

    def watch(b, h, i, j):
        seen.add(threading.current_thread().name)
        return i >= j

    with polyattn.use_threads(4):
        attention(*qkv, mask=watch)
    assert len(seen) == 1
    assert thread_pool.default() == 1


def test_a_call_inside_a_call_leaves_it_alone(qkv):
    def nested(score, b, h, i, j):
        attention(*(x[:1, :4, :50] for x in qkv), kernel=KERNEL)
        return score * 1.5

    want = attention(*qkv, score_mod=lambda score, b, h, i, j: score * 1.5)
    assert bits([attention(*qkv, score_mod=nested)]) == bits([want])


# ---- three kinds of pass -----------------------------------------------------------------------


def test_small_scores_need_no_maximum(qkv, passes):
    attention(*qkv, is_causal=True)
    assert set(passes) == {"fast"}


def test_rows_that_see_nothing_need_no_maximum_either(qkv, passes):
    out = attention(*qkv, mask=np.arange(700)[:, None] > 350 + 0 * np.arange(700))
    assert set(passes) == {"fast"}
    assert (out[:, :, :351] == 0).all()


def test_what_is_hidden_is_left_out_in_a_poison_safe_pass(qkv, passes):
    q, k, v = qkv
    want = attention(q, k, v, is_causal=True)
    k, v = k.copy(), v.copy()
    k[0, 1, -1], v[1, 2, -1] = math.nan, math.inf
    passes.clear()
    got = attention(q, k, v, is_causal=True)
    assert set(passes) == {"fast", "poison_safe", "stable"}  # the last row sees them
    assert bits([got[:, :, :-1]]) == bits([want[:, :, :-1]])
    assert np.isnan(got[0, 2:4, -1]).all()


@pytest.mark.parametrize(("dtype", "size"), [("float32", 128), ("float64", 64), ("float16", 64)])
def test_a_hidden_value_changes_no_bit_of_a_whole_tile(dtype, size, passes):
    q, k, v = (randn(1, 2, 512, size, seed=seed).astype(dtype) for seed in range(3))
    want = attention(q, k, v, is_causal=True)
    v[0, 0, 300], v[0, 1, 511] = math.nan, -math.inf
    got = attention(q, k, v, is_causal=True)
    assert "poison_safe" in passes
    assert bits([got[:, 0, :300], got[:, 1, :511]]) == bits([want[:, 0, :300], want[:, 1, :511]])
    assert not np.isfinite(got[:, 0, 300:]).any()


def test_large_scores_need_a_maximum(qkv, passes):
    q, k, v = qkv
    attention(q * 100, k, v)
    assert set(passes) == {"fast", "stable"}


def test_a_row_with_large_scores_changes_no_bit_of_another(qkv):
    q, k, v = qkv
    want = attention(q, k, v, is_causal=True)
    q = q.copy()
    q[0, 3, 300] *= 1000
    got = attention(q, k, v, is_causal=True)
    others = np.ones(got.shape[:-1], bool)
    others[0, 3, 300] = False
    assert bits([got[others]]) == bits([want[others]])
    assert not np.array_equal(got[~others], want[~others])


def test_values_near_the_end_of_the_range(qkv, passes):
    q, k, v = qkv
    v = v / np.abs(v).max() * np.float32(1e35)
    got = attention(q * 4, k, v)
    assert set(passes) == {"fast", "stable"}
    np.testing.assert_allclose(got / 1e35, attention(q * 4, k, v / 1e35), atol=1e-5)


# ---- cuts --------------------------------------------------------------------------------------


def problem_of(length, keys, heads=(2, 2), batch=1, **options):
    query = (batch, heads[0], length, 8)
    return polyattn.explain(
        query, (batch, heads[1], keys, 8), (batch, heads[1], keys, 8), **options
    ).problem


BANDS = [
    {},
    {"is_causal": True},
    {"is_causal": True, "query_offset": 0},
    {"is_causal": True, "query_offset": -40},
    {"window": (20, 0)},
    {"window": (70, 35)},
    {"window": (None, 10), "query_offset": 7},
    {"window": (0, 0)},
    {"window": (300, None)},
]


SIZES = [(1, 90), (64, 64), (150, 200), (200, 130)]


@pytest.mark.parametrize(
    ("length", "keys", "heads", "band"),
    [
        (*size, ((2, 2), (6, 2))[(m + n) % 2], band)
        for m, size in enumerate(SIZES)
        for n, band in enumerate(BANDS)
    ],
    ids=str,
)
def test_tiles_hold_every_visible_key_once(length, keys, heads, band):
    problem = problem_of(length, keys, heads, batch=3, **band)
    visible = np.zeros((length, keys), bool)
    for row in range(length):
        visible[row, slice(*column_span(problem, Span(row, row + 1)))] = True
    for tile, threads_ in ((2**10, 1), (2**10, 4), (2**18, 2)):
        times = np.zeros((3, heads[1], length, keys), int)
        for task in tasks(problem, tile, threads_):
            for part in tiles(problem, task, tile):
                inside = np.s_[
                    slice(*task.batch), slice(*part.heads), slice(*part.rows), slice(*part.columns)
                ]
                times[inside] += 1
                assert part.crosses_band or visible[inside[2:]].all()
                assert part.width > 0
        assert (times[..., visible] == 1).all()
        assert times.max(initial=0) <= 1


def test_the_work_of_a_band_grows_with_what_is_visible():
    for window, most in (((256, 0), 1.6), ((1024, 0), 1.25), ((None, 0), 1.05)):
        problem = problem_of(8192, 8192, window=window)
        area = sum(
            part.heads.length * part.rows.length * part.columns.length
            for task in tasks(problem, NumpyTiled.tile, 1)
            for part in tiles(problem, task, NumpyTiled.tile)
        )
        visible = sum(column_span(problem, Span(row, row + 1)).length for row in range(8192))
        assert area / 2 < most * visible


def test_the_longest_tasks_come_first():
    work = [task.columns.length for task in tasks(problem_of(4096, 4096, is_causal=True), 2**18, 2)]
    assert work == sorted(work, reverse=True)
    assert work[0] > work[-1]


def test_the_plugins_own_kernel_stands_in_the_place_of_the_cores():
    shape = (1, 2, 64, 8)
    names = [c.kernel for c in polyattn.explain(shape, shape, shape, backend="numpy").candidates]
    assert names == ["small", "tiled", "dense"]
    assert isinstance(
        polyattn._dispatch.registry.kernels_of(polyattn._dispatch.registry.loaded("numpy"))[1],
        NumpyTiled,
    )


def test_few_queries_of_many_keys_are_cut_by_keys():
    q, k, v = randn(1, 4, 1, 16), randn(1, 2, 40000, 16, seed=1), randn(1, 2, 40000, 16, seed=2)
    problem = polyattn.explain(q, k, v).problem
    assert {task.parts for task in tasks(problem, NumpyTiled.tile, 8)} == {5}


def test_an_item_is_computed_one_way_in_any_batch():
    for batch in (1, 1000):
        shape = (batch, 4, 16, 8)
        assert polyattn.explain(shape, shape, shape).chosen.kernel == "small"
        shape = (batch, 4, 40, 8)
        assert polyattn.explain(shape, shape, shape).chosen.kernel == "tiled"


@pytest.mark.parametrize("dtype", [">f4", "<f8", ">f2"])
def test_any_byte_order_and_stride(dtype, qkv):
    q, k, v = (x.astype(dtype) for x in qkv)
    want = attention(*(x.astype(x.dtype.newbyteorder("=")) for x in (q, k, v)))
    got = attention(q, np.asfortranarray(k), v[..., ::-1][..., ::-1])
    np.testing.assert_allclose(np.asarray(got, "f8"), np.asarray(want, "f8"), atol=1e-3)


# ---- how many threads --------------------------------------------------------------------------


def test_a_block_wins_over_the_variable_over_the_machine(monkeypatch):
    from polyattn._base.threads import thread_count

    monkeypatch.delenv("POLYATTN_NUM_THREADS", raising=False)
    assert thread_count(lambda: 1) == 1
    monkeypatch.setenv("POLYATTN_NUM_THREADS", "5")
    assert thread_count(lambda: 1) == 5
    with polyattn.use_threads(3):
        with polyattn.use_threads(2):
            assert thread_count() == 2
        assert thread_count() == 3
    assert thread_count() == 5


@pytest.mark.parametrize(
    ("text", "length"),  # dense, tiled in one task, on threads
    [("0", 3), ("-1", 30), ("two", 700), ("1.5", 3), (" ", 30)],
)
def test_a_variable_that_is_no_number_is_refused(monkeypatch, text, length, qkv):
    monkeypatch.setenv("POLYATTN_NUM_THREADS", text)
    with pytest.raises(ValueError, match=f"POLYATTN_NUM_THREADS must be .*{text!r}"):
        attention(*(x[..., :length, :] for x in qkv))


def test_a_variable_that_is_empty_is_not_set(monkeypatch):
    from polyattn._base.threads import granted, thread_count

    monkeypatch.setenv("POLYATTN_NUM_THREADS", "")
    assert thread_count() == granted(os.getpid())


def test_use_threads_takes_any_integer():
    from polyattn._base.threads import thread_count

    with polyattn.use_threads(np.int64(2)):
        assert type(thread_count()) is int
        assert thread_count() == 2


@pytest.mark.parametrize(
    ("count", "error"),
    [
        (0, ValueError), (-2, ValueError), (np.int64(0), ValueError), (1.5, TypeError),
        (True, TypeError), (np.True_, TypeError), ("2", TypeError),
    ],
)  # fmt: skip
def test_use_threads_refuses_what_is_no_number(count, error):
    with pytest.raises(error, match="use_threads takes"), polyattn.use_threads(count):
        pass


def test_the_control_group_limits(tmp_path):
    from polyattn._base.threads import _quota

    assert _quota(tmp_path) > 10**6
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    assert _quota(tmp_path) == 2
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert _quota(tmp_path) > 10**6
    (tmp_path / "cpu.max").unlink()
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu/cpu.cfs_quota_us").write_text("100000\n")
    (tmp_path / "cpu/cpu.cfs_period_us").write_text("100000\n")
    assert _quota(tmp_path) == 1
    (tmp_path / "cpu/cpu.cfs_quota_us").write_text("-1\n")
    assert _quota(tmp_path) > 10**6


def test_affinity_limits(run_python):
    code = """
import os
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
from polyattn._base.threads import thread_count
print(thread_count())
"""
    if hasattr(os, "sched_setaffinity"):
        assert run_python(code).split() == ["1"]


def test_the_sums_of_parts_of_the_keys_do_not_overflow_together():
    query, value = np.ones((1, 1, 1), np.float32), np.ones((1, 64, 1), np.float32)
    kernel = NumpyTiled()
    kernel.tile = 2**10  # so that a part has 32 keys
    output, logsumexp = attention_partial(query, 85 * value, value, kernel=kernel)
    np.testing.assert_allclose(output, 1, rtol=1e-6)
    np.testing.assert_allclose(logsumexp, 85 + math.log(64), rtol=1e-6)


def test_distances_that_underflow_are_computed_once(monkeypatch):
    # Without maxima exp(-distance) is 0 here, and a second pass would compute all distances again.
    count, between = [], Distance.between

    def counted(self, *arguments):
        count.append(1)
        return between(self, *arguments)

    query, key = 100 * np.random.default_rng(2).random((2, 1, 1, 256, 16), dtype=np.float32)
    with polyattn.use_threads(1):
        monkeypatch.setattr(Distance, "between", counted)
        found = attention(query, key, key, similarity=scores.distance(), kernel=KERNEL)
        tiles_computed = len(count)
        expected = attention(query, key, key, similarity=scores.distance(), kernel="dense")
    assert tiles_computed == 1
    np.testing.assert_allclose(found, expected, rtol=1e-5)
