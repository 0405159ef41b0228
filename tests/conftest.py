"""What all tests share: no choice of backend leaks in from outside."""

import subprocess
import sys

import pytest


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
