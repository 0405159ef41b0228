"""Keep the caller's backend and terminal, and the order of tests, out of all tests."""

import subprocess
import sys
import threading

import numpy as np
import pytest

_begun = {}


@pytest.fixture(autouse=True)
def _nothing_from_outside(monkeypatch):
    monkeypatch.delenv("POLYATTN_BACKEND", raising=False)
    monkeypatch.setenv("COLUMNS", "10000")  # as wide as a file: tables are not narrowed


@pytest.fixture(autouse=True)
def _same_numbers_in_any_order(request):
    """Let a module's random numbers begin anew in each test."""
    rng = getattr(request.module, "RNG", None)
    if isinstance(rng, np.random.Generator):
        start = _begun.setdefault(request.module.__name__, rng.bit_generator.state)
        rng.bit_generator.state = start


@pytest.fixture
def meet():
    """Return a function in which threads wait until a second one has come, and their names."""
    seen, both = set(), threading.Event()

    def meet():
        seen.add(threading.current_thread().name)
        if len(seen) > 1:
            both.set()
        assert both.wait(60)

    meet.seen = seen
    return meet


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


@pytest.fixture
def drawn_by():
    """Return a function that has a script draw: it saves one picture, of which each takes long."""

    def drawn_by(script, folder, smallest):
        figures, save = {}, script.save

        def save_some(figure, file):
            if not figures:
                save(figure, file)
                assert file.stat().st_size > smallest
            figures[file.relative_to(folder).as_posix()] = figure

        script.save = save_some
        try:
            script.main(folder)
        finally:
            script.save = save
        assert all(figure.axes for figure in figures.values())
        return set(figures)

    return drawn_by
