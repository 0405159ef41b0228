"""Number of threads of a call: by `use_threads`, the variable, the machine."""

import os

import numpy as np
import pytest

import polyattn
from polyattn import attention
from polyattn._base.threads import _quota, granted, thread_count


def test_a_block_wins_over_the_variable_over_the_machine(monkeypatch):
    monkeypatch.delenv("POLYATTN_NUM_THREADS", raising=False)
    assert thread_count(lambda: 1) == 1
    monkeypatch.setenv("POLYATTN_NUM_THREADS", "")
    assert thread_count() == granted(os.getpid())
    monkeypatch.setenv("POLYATTN_NUM_THREADS", "5")
    assert thread_count(lambda: 1) == 5
    with polyattn.use_threads(3):
        with polyattn.use_threads(np.int64(2)):
            assert thread_count() == 2
            assert type(thread_count()) is int
        assert thread_count() == 3
    assert thread_count() == 5


@pytest.mark.parametrize(
    ("text", "length"),  # dense, tiled in one task, on threads
    [("0", 3), ("two", 30), (" ", 700)],
)
def test_a_variable_that_is_not_a_count_is_refused(monkeypatch, text, length):
    monkeypatch.setenv("POLYATTN_NUM_THREADS", text)
    x = np.ones((8, length, 4), np.float32)
    with pytest.raises(ValueError, match=f"POLYATTN_NUM_THREADS must be .*{text!r}"):
        attention(x, x, x)


@pytest.mark.parametrize(
    ("count", "error"),
    [
        (0, ValueError), (np.int64(-2), ValueError), (1.5, TypeError), (np.True_, TypeError),
    ],
)  # fmt: skip
def test_use_threads_refuses_other_values(count, error):
    with pytest.raises(error, match="use_threads takes"), polyattn.use_threads(count):
        pass


@pytest.mark.parametrize(
    ("files", "most"),
    [
        ({}, None),
        ({"cpu.max": "150000 100000\n"}, 2),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "100000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 1),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
    ],
)
def test_a_control_group_limits(files, most, tmp_path):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert _quota(tmp_path) == most if most else _quota(tmp_path) > 10**6


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs affinity")
def test_affinity_limits(run_python):
    said = run_python("""
import os
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
from polyattn._base.threads import thread_count
print(thread_count())
""")
    assert said.split() == ["1"]
