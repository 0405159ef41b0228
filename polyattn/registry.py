"""Finds plugins by entry point and loads one when it is first needed.

Finding imports no array library. A plugin that cannot be loaded never stops another: the reason is
kept, to be told when somebody asks for it. Safe under threads, first use included.
"""

from __future__ import annotations

import functools
import importlib.util
import threading
from importlib.metadata import EntryPoint, entry_points
from typing import NamedTuple

from polyattn.arrays import constant_when_traced, library_of
from polyattn.kernels import Dense, Tiled
from polyattn.plugin import API_VERSION, Array, Backend, BackendSpec, Kernel

__all__ = [
    "ARRAY_API",
    "GROUP",
    "Registered",
    "array_api_backend",
    "device_of",
    "devices_of",
    "kernels_of",
    "load",
    "loaded",
    "names",
    "registered",
    "serving",
    "spec_of",
]

GROUP = "polyattn.backends"
#: The name of the core's own kernels on the arrays' own library.
ARRAY_API = "array-api"

_CLOSING_KERNELS: tuple[Kernel, ...] = (Tiled(), Dense())


class Registered(NamedTuple):
    """A plugin as found: its spec, or why there is none."""

    name: str
    distribution: str
    spec: BackendSpec | None
    problem: str | None


_lock = threading.RLock()
# Read without the lock, which torch.compile cannot trace: an entry is set once and never changes.
_backends: dict[str, Backend] = {}
_specs: dict[str, BackendSpec] = {}
_failures: dict[str, str] = {}
_array_api: dict[str, Backend] = {}


@functools.lru_cache(maxsize=1)
def _found() -> dict[str, Registered]:
    found: dict[str, Registered] = {}
    # polyattn's own first, so that no other plugin can take one of its names.
    for entry in sorted(entry_points(group=GROUP), key=lambda e: (_owner(e) != "polyattn", e.name)):
        if entry.name in found or entry.name == ARRAY_API:
            continue
        found[entry.name] = _read(entry)
    return found


def _owner(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist is not None else ""


def _read(entry: EntryPoint) -> Registered:
    try:
        spec = entry.load()
    except Exception as error:
        return Registered(
            entry.name, _owner(entry), None, f"its plugin cannot be imported: {error!r}"
        )
    problem = None
    if not isinstance(spec, BackendSpec):
        problem = f"its entry point {entry.value} is no BackendSpec"
    elif spec.api_version != API_VERSION:
        problem = (
            f"it was written for version {spec.api_version} of the plugin contract and this is"
            f" version {API_VERSION}: install releases that fit together"
        )
    elif spec.name != entry.name:
        problem = f"its spec is named {spec.name!r} and its entry point {entry.name!r}"
    return Registered(entry.name, _owner(entry), None if problem else spec, problem)


@constant_when_traced
def names() -> tuple[str, ...]:
    """Return the names of all plugins, whether they can be loaded or not."""
    with _lock:
        return tuple(sorted(_found()))


def registered(name: str) -> Registered:
    """Return what was found under a name that `names` lists."""
    with _lock:
        return _found()[name]


@constant_when_traced
def serving(library: str) -> tuple[str, ...]:
    """Return the plugins that take this library's arrays: polyattn's own, or else all others."""
    with _lock:
        found = [r for r in _found().values() if r.spec and library in r.spec.namespaces]
    own = tuple(r.name for r in found if r.distribution == "polyattn")
    return own or tuple(r.name for r in found)


@constant_when_traced
def load(name: str) -> str | None:
    """Load a plugin's implementation for `loaded` to return; return why it cannot be, or None."""
    with _lock:
        if name in _backends:
            return None
        if name not in _failures:
            failure = _load(registered(name))
            if failure is None:
                return None
            _failures[name] = failure
        return _failures[name]


def _load(found: Registered) -> str | None:
    if found.spec is None:
        return found.problem
    missing = [module for module in found.spec.requires if not _is_installed(module)]
    if missing:
        return f"{', '.join(missing)} is not installed: {found.spec.install}"
    try:
        backend = found.spec.load()
    except Exception as error:
        return f"it cannot be loaded: {error!r}"
    _specs[found.name], _backends[found.name] = found.spec, backend
    return None


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def loaded(name: str) -> Backend:
    """Return a backend that `load` has loaded."""
    return _backends[name]


def array_api_backend(array: Array) -> Backend:
    """Return the backend that runs the core's kernels on the library of `array`."""
    library = library_of(array)
    backend = _array_api.get(library.name)
    if backend is None:
        backend = _array_api[library.name] = Backend(library.xp)
    return backend


def kernels_of(backend: Backend | None) -> tuple[Kernel, ...]:
    """Return a backend's own kernels, and the array-API kernels that close every list."""
    return _CLOSING_KERNELS if backend is None else (*backend.kernels, *_CLOSING_KERNELS)


def spec_of(name: str) -> BackendSpec:
    """Return the spec of a backend that `load` has loaded."""
    return _specs[name]


@constant_when_traced
def devices_of(name: str) -> tuple[str, ...]:
    """Return the devices at hand of a backend that has been loaded, the default first."""
    return tuple(_backends[name].devices())


@constant_when_traced
def device_of(name: str, wanted: str) -> str | None:
    """Return the device that `wanted` means: its whole name, its kind, or its number."""
    for device in devices_of(name):
        kind, _, number = device.partition(":")
        if wanted in (device, kind, number):
            return device
    return None
