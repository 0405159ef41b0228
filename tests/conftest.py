"""What all tests share: no choice of backend leaks in from outside, and no core is kept busy."""

import os
import subprocess
import sys

import pytest

# A thread that waits must not spin: each process of a run has as many threads as there are cores.
# OpenMP and OpenBLAS read this when torch and NumPy are imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")


@pytest.fixture(autouse=True)
def _no_backend_from_outside(monkeypatch):
    monkeypatch.delenv("POLYATTN_BACKEND", raising=False)


@pytest.fixture
def run_python():
    """Return a function that runs code in a new interpreter, where a warning is an error."""

    def run(code, *options):
        done = subprocess.run(
            [sys.executable, "-W", "error", *options, "-c", code],
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run
