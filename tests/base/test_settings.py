"""`polyattn._base.settings`: a variable is read at call time, however os.environ stores it."""

import os

import pytest

from polyattn._base.settings import reader_of

NAME = "POLYATTN_TEST_VARIABLE"


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
