"""Threads of NumPy's kernels: who works, what BLAS may use meanwhile, errors, interrupts, forks."""

import functools
import itertools
import sys
import threading
import time
import traceback
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from arrays import draw

import polyattn
from polyattn import attention
from polyattn_numpy import thread_pool


@pytest.fixture
def qkv():
    return draw((2, 8, 700, 32), (2, 4, 700, 32), (2, 4, 700, 32))


def blas_threads():
    return [library.get_num_threads() for library in thread_pool.blas.libraries()]


@pytest.fixture
def two_blas_threads():
    """BLAS with two threads, whatever an earlier test has left it."""
    before = blas_threads()
    for library in thread_pool.blas.libraries():
        library.set_num_threads(2)
    yield
    for library, count in zip(thread_pool.blas.libraries(), before, strict=True):
        library.set_num_threads(count)


# ---- who works ---------------------------------------------------------------------------------


def test_as_many_threads_work_as_are_allowed_and_blas_has_one(qkv, meet, two_blas_threads):
    held = []

    def watch(b, h, i, j):
        meet()
        held.extend(blas_threads())
        return i >= j

    with polyattn.use_threads(3):
        attention(*qkv, mask=watch)
    assert len(meet.seen) > 1
    assert set(held) == {1}
    assert set(blas_threads()) == {2}
    meet.seen.clear()
    with polyattn.use_threads(1):
        attention(*qkv, mask=watch)
    assert meet.seen == {threading.current_thread().name}


def test_the_callers_context_holds_in_every_thread(qkv):
    """NumPy's error state is one; a function that divides by zero must not be reported."""
    with polyattn.use_threads(2), np.errstate(all="raise"):
        attention(*qkv, score_mod=lambda s, b, h, i, j: s + 0.0 / (s * 0 + 1))
        attention(*(x * 30 for x in qkv), is_causal=True)


def test_threads_that_cannot_be_started_are_not_needed(qkv, monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(thread_pool, "_pool", thread_pool.Pool())
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with polyattn.use_threads(3):
        assert np.isfinite(attention(*qkv)).all()


def test_first_calls_that_meet_start_the_threads_of_one(monkeypatch):
    pool, meet, start = thread_pool.Pool(), threading.Barrier(2), threading.Thread.start
    monkeypatch.setattr(thread_pool, "_pool", pool)
    monkeypatch.setattr(threading.Thread, "start", lambda thread: time.sleep(0.05) or start(thread))

    def call():
        meet.wait(30)
        thread_pool.each(lambda item: None, range(3), 3, thread_pool.Shared())

    with ThreadPoolExecutor(2) as callers:
        for one in [callers.submit(call) for _ in range(2)]:
            one.result(30)
    assert len(pool._threads) == 2


def test_threads_that_are_busy_keep_no_arrays_of_later_calls_alive(monkeypatch):
    monkeypatch.setattr(thread_pool, "_pool", thread_pool.Pool())
    begun, go = threading.Barrier(3), threading.Event()

    def long(item):
        begun.wait(30)
        go.wait(30)

    caller = threading.Thread(
        target=thread_pool.each, args=(long, range(2), 2, thread_pool.Shared()), daemon=True
    )
    caller.start()
    begun.wait(30)
    array = np.ones(2)
    kept = weakref.ref(array)
    thread_pool.each(functools.partial(np.add, array, out=array), [1, 2], 2, thread_pool.Shared())
    del array
    assert kept() is None
    go.set()
    caller.join(30)


def test_a_blas_without_a_limit_means_one_thread(qkv, monkeypatch):
    monkeypatch.setattr(thread_pool, "blas", thread_pool.Blas(list))
    seen = set()

    def watch(b, h, i, j):
        seen.add(threading.current_thread().name)
        return i >= j

    with polyattn.use_threads(4):
        attention(*qkv, mask=watch)
    assert len(seen) == thread_pool.default() == 1


# ---- BLAS --------------------------------------------------------------------------------------


def test_of_overlapping_calls_the_last_restores_blas(two_blas_threads):
    blas = thread_pool.Blas(thread_pool.numpys_blas)
    begun, ends = threading.Event(), threading.Event()
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


class Mkl(threading.local):
    """A controller of MKL, in which each thread has a number of its own."""

    internal_api = "mkl"
    count = 2

    def get_num_threads(self):
        return self.count

    def set_num_threads(self, count):
        self.count = count


def test_a_number_for_each_thread_is_limited_in_all_and_restored_in_each(monkeypatch):
    mkl, seen = Mkl(), {}  # the count that each thread sees
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


# ---- errors and interrupts ---------------------------------------------------------------------


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


def at_instruction(place, action, work):
    """Run work, and an action at an instruction of the module; return whether it got so far."""
    events = itertools.count()

    def trace(frame, event, argument):
        if frame.f_code.co_filename != thread_pool.__file__:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode" and next(events) == place:
            action()
        return trace

    before = sys.gettrace()
    sys._getframe().f_trace_opcodes = True  # Python 3.12 counts none without it
    sys.settrace(trace)
    try:
        work()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    return next(events) > place


def interrupt():
    raise KeyboardInterrupt


def test_a_signal_handler_may_call_between_any_two_instructions(two_blas_threads):
    before, done, lock = blas_threads(), [], thread_pool.Exclusive()
    assert lock.run(lambda: lock.run(bool) or lock._lock._is_owned())

    def call():
        thread_pool.each(done.append, range(2), 2, thread_pool.Shared())

    call()
    for place in itertools.count():
        done.clear()
        handled = at_instruction(place, call, call)
        assert blas_threads() == before, place
        assert len(done) == (4 if handled else 2), place
        if not handled:
            break


def test_an_interrupt_between_any_two_instructions_leaves_nothing_held(two_blas_threads):
    before, done = blas_threads(), []

    def work(item):
        assert set(blas_threads()) == {1}
        done.append(item)

    def call():
        threads = min(2, thread_pool.default())
        thread_pool.each(work, range(3), threads, thread_pool.Shared())

    call()
    for place in itertools.count():
        interrupted = at_instruction(place, interrupt, call)
        assert blas_threads() == before, place
        elsewhere = threading.Thread(target=call, daemon=True)
        done.clear()
        elsewhere.start()
        elsewhere.join(30)
        assert not elsewhere.is_alive(), place
        assert len(done) == 3, place
        if not interrupted:
            break
    assert place > 300


# ---- the end of a process, and forks -----------------------------------------------------------


def test_the_child_of_a_fork_amid_a_call_has_blas_without_a_limit(two_blas_threads):
    mkl = Mkl()
    blas = thread_pool.Blas(lambda: [*thread_pool.numpys_blas(), mkl])
    blas.forget_holders()  # before any call, there is nothing to forget
    blas._take(object())
    assert {*blas_threads(), mkl.count} == {1}
    blas.forget_holders()
    assert {*blas_threads(), mkl.count} == {2}
    assert set(blas.held(blas_threads)) == {1}
    assert set(blas_threads()) == {2}
