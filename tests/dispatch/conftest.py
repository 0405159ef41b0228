"""Plugins that are registered for the length of a test."""

import pytest

from polyattn._dispatch import cache, registry


class _Entry:
    """An entry point of a plugin that is not installed."""

    value, distribution, flaw = "acme:SPEC", "acme", None

    def __init__(self, name, spec):
        self.name, self._spec = name, spec

    def load(self):
        if isinstance(self._spec, BaseException):
            raise self._spec
        return self._spec


@pytest.fixture
def plugins(monkeypatch):
    """Return a function that registers specs as plugins for the length of a test."""
    installed = registry.entries

    def register(**specs):
        more = [_Entry(name, spec) for name, spec in specs.items()]
        monkeypatch.setattr(registry, "entries", lambda: [*more, *installed()])
        monkeypatch.setattr(registry, "_plugins", {})
        cache.forget()

    yield register
    cache.forget()
