"""Attention for every array library: one function, one written meaning, backends by name."""

import importlib

_MODULES = ("conformance", "dialects", "export", "masks", "nn", "parallel", "plot", "scores")


def __dir__() -> list[str]:
    return sorted({*_MODULES, "__version__"}.union(__getattr__("__all__")))


def __getattr__(name: str):
    """Import a part of the package, or else all public names, when one is first used."""
    if name in _MODULES:
        return importlib.import_module(f"polyattn.{name}")
    if name == "__version__":  # of the last tag, which the installed metadata has
        globals()[name] = importlib.import_module("importlib.metadata").version("polyattn")
    elif name == "__all__" or not name.startswith("_"):
        public = importlib.import_module("polyattn._public")
        globals().update((one, getattr(public, one)) for one in ("__all__", *public.__all__))
    if name not in globals():
        raise AttributeError(f"module 'polyattn' has no attribute {name!r}")
    return globals()[name]
