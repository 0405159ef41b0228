"""Record the passes that NumPy's kernel makes."""

import pytest

import polyattn_numpy.tiled_kernel as module


@pytest.fixture
def passes(monkeypatch):
    """Return the list of the kinds of pass that were made."""
    kinds = []

    class Watched(module.Sweep):
        def __init__(self, call, task, scratch, kind="fast"):
            kinds.append(kind)
            super().__init__(call, task, scratch, kind)

    monkeypatch.setattr(module, "Sweep", Watched)
    return kinds
