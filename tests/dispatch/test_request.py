"""Requests of a call: by argument, context and environment, for each thread and task."""

import contextlib
import contextvars
import threading

import numpy as np
import pytest

import polyattn
from polyattn import attention, explain, use_backend, use_threads
from polyattn._base.threads import thread_count
from polyattn._dispatch import request

X = np.ones((2, 4, 5, 8), np.float32)


def chosen(**options):
    return explain(X, X, X, **options).chosen.backend


def test_the_channels_select_alike(monkeypatch):
    for names in ("torch", "torch:cpu", "torch,numpy", "numpy,torch", "array-api"):
        by_argument = explain(X, X, X, backend=names)
        with monkeypatch.context() as patch:
            with use_backend(*names.split(",")):
                by_context = explain(X, X, X)
            patch.setenv("POLYATTN_BACKEND", names)
            by_environment = explain(X, X, X)
        assert by_argument.candidates == by_context.candidates == by_environment.candidates
        assert "use_backend" in by_context.source
        assert "POLYATTN_BACKEND" in by_environment.source


@pytest.mark.needs("torch")
def test_argument_over_context_over_environment(monkeypatch):
    monkeypatch.setenv("POLYATTN_BACKEND", "torch")
    assert chosen() == "torch"
    with use_backend("array-api"):
        assert chosen() == "array-api"
        with use_backend("torch"):
            assert chosen() == "torch"
        assert chosen() == "array-api"
        assert chosen(backend="numpy") == "numpy"
        assert chosen(backend="auto") == "numpy"
    assert chosen() == "torch"


def test_the_environment_is_read_at_call_time_and_refused_when_wrong(monkeypatch):
    attention(X, X, X)
    monkeypatch.setenv("POLYATTN_BACKEND", "nunpy")
    with pytest.raises(polyattn.UnknownBackendError, match=r"'numpy'.*POLYATTN_BACKEND=nunpy"):
        attention(X, X, X)
    monkeypatch.setenv("POLYATTN_BACKEND", "numpy,")
    with pytest.raises(ValueError, match="a name is missing in POLYATTN_BACKEND='numpy,'"):
        attention(X, X, X)
    monkeypatch.setenv("POLYATTN_BACKEND", "")
    assert chosen() == "numpy"


def test_a_context_refuses_a_wrong_name_at_once():
    with pytest.raises(polyattn.UnknownBackendError), use_backend("torch"), use_backend("nunpy"):
        pass
    assert chosen() == "numpy"  # a context ends with an error too
    with pytest.raises(ValueError, match="a name is missing in use_backend"), use_backend():
        pass


@pytest.mark.parametrize(
    ("kind", "named"),
    [("cuda", "jax:cuda or onnxruntime:cuda or torch:cuda"), ("mps", "torch:mps")],
)
def test_a_kind_of_device_is_refused_with_its_backends(kind, named):
    with pytest.raises(polyattn.UnknownBackendError, match=f"a kind of device, as in {named}"):
        attention(X, X, X, backend=kind)


@contextlib.contextmanager
def block(number):
    with use_backend(f"torch:cuda:{number}"), use_threads(number):
        yield


def in_generator(number):
    with block(number):
        yield


def held():
    return request.request(None).names, thread_count()


@pytest.fixture
def blocked_thread():
    """Another thread, whose block is open: the contexts of all threads are read."""
    entered, done = threading.Event(), threading.Event()

    def hold():
        with use_backend("numpy"):
            entered.set()
            done.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    entered.wait(60)
    yield
    done.set()
    thread.join()


@pytest.mark.usefixtures("blocked_thread")
def test_a_block_of_a_generator_may_end_after_the_block_around_it():
    outside, suspended = held(), in_generator(2)
    with block(3):
        around = held()
        next(suspended)
        inside = held()
    assert held() == inside != around
    suspended.close()
    assert held() == outside


@pytest.mark.usefixtures("blocked_thread")
def test_a_block_of_a_generator_may_end_in_another_context():
    outside, suspended = held(), in_generator(2)
    context = contextvars.copy_context()
    context.run(next, suspended)
    assert held() == outside != context.run(held)
    suspended.close()
    assert held() == context.run(held) == outside
