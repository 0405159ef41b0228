"""Plugins that are registered for the length of a test."""

import importlib
import sys

import pytest

from polyattn._dispatch import cache, entries, extensions, registry


class _Entry(entries.Entry):
    """An entry point of a plugin that is not installed, and gives its spec as the value."""

    def load(self):
        if isinstance(self.value, BaseException):
            raise self.value
        return self.value


@pytest.fixture
def plugins(monkeypatch):
    """Return a function that registers specs as plugins for the length of a test."""
    installed = registry.entries

    def register(**specs):
        more = [_Entry(name, spec, "acme") for name, spec in specs.items()]
        monkeypatch.setattr(registry, "entries", lambda: [*more, *installed()])
        monkeypatch.setattr(registry, "_plugins", {})
        cache.forget()

    yield register
    cache.forget()


GOOD = """
from polyattn.plugin import CONTRACT_VERSION, BackendSpec
SPEC = BackendSpec(
    "good", ("good",), "good:Backend", ("no_such_library",), "pip install good", CONTRACT_VERSION
)
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Return a function that installs a distribution for the length of a test."""

    def install(distribution, lines, metadata="Name: {}", group=entries.BACKENDS):
        info = tmp_path / f"{distribution}-1.0.dist-info"
        info.mkdir()
        if metadata is not None:
            (info / "METADATA").write_text(metadata.format(distribution))
        text = lines if isinstance(lines, bytes) else "\n".join(lines).encode()
        (info / "entry_points.txt").write_bytes(f"[{group}]\n".encode() + text)
        importlib.invalidate_caches()

    (tmp_path / "good.py").write_text(GOOD)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(registry, "_plugins", {})
    monkeypatch.setattr(extensions, "_extensions", [])
    before = set(sys.modules)
    cache.forget()
    yield install
    cache.forget()
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]
