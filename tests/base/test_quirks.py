"""Each quirk is still there: where a test of its name fails, its workaround may go."""

import contextvars
import os
import timeit

import pytest

from polyattn._base.quirks import QUIRKS, reader_of

NAME = "POLYATTN_TEST_VARIABLE"


def test_os_environ_get_is_slow():
    def least(function):
        return min(timeit.repeat(function, number=2000, repeat=20))

    assert least(lambda: os.environ.get(NAME)) > 2 * least(reader_of(NAME))


def test_torch_cannot_trace_a_context_variable():
    torch = pytest.importorskip("torch")
    variable = contextvars.ContextVar("variable", default=1)
    program = torch.compile(lambda x: x + variable.get(), fullgraph=True, backend="eager")
    with pytest.raises(torch._dynamo.exc.Unsupported, match="ContextVar"):
        program(torch.ones(1))


def test_each_quirk_has_a_test():
    assert {f"test_{name}" for name in QUIRKS} < globals().keys()


@pytest.mark.parametrize("replaced", [False, True], ids=["the process's", "a dict"])
def test_a_variable_is_read_when_it_is_asked_for(monkeypatch, replaced):
    read = reader_of(NAME)
    if replaced:
        monkeypatch.setattr(os, "environ", dict(os.environ))
    assert read() is None
    monkeypatch.setitem(os.environ, NAME, "ü")
    assert read() == "ü"
    monkeypatch.delitem(os.environ, NAME)
    assert read() is None
