"""`polyattn._base.progress`: the bar of a long call."""

import sys

import numpy as np
import pytest

import polyattn
from polyattn._base.progress import progress


def test_a_long_call_shows_its_progress_where_that_is_asked(capsys):
    x = np.ones((8, 512, 64), np.float32)
    polyattn.attention(x, x, x, kernel="tiled")
    with polyattn.show_progress(60):
        polyattn.attention(x, x, x, kernel="tiled")
    assert capsys.readouterr().err == ""
    with polyattn.show_progress(0), progress() as show:
        for share in (0.25, 0.5, 1):
            show(share)
    with polyattn.show_progress(0):
        polyattn.attention(x, x, x, kernel="tiled")
    shown = capsys.readouterr().err
    assert "attention   0% |" in shown
    assert shown.count("left") > 1
    for wrong in (-1, float("nan"), "2"):
        with pytest.raises(ValueError, match="show_progress takes seconds of at least 0"):
            polyattn.show_progress(wrong).__enter__()


def test_without_tqdm_a_warning_takes_the_place_of_the_bar(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    x = np.ones((8, 512, 64), np.float32)
    with (
        pytest.warns(RuntimeWarning, match="shows nothing without tqdm: pip install tqdm") as found,
        polyattn.show_progress(0),
    ):
        polyattn.attention(x, x, x, kernel="tiled")
    assert [warning.filename for warning in found] == [__file__]
    assert capsys.readouterr().err == ""
