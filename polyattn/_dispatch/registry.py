"""Find plugins by their entry points, and load each when it is first needed.

Finding them imports no array library. A plugin that cannot be loaded does not affect the others;
its reason is kept for messages. All functions are safe under threads.
"""

from __future__ import annotations

import warnings
from typing import Any

from polyattn._base.arrays import is_namespace
from polyattn._base.forks import forkable_lock, hold_during_forks
from polyattn._base.tracing import constant_when_traced
from polyattn._dispatch import extensions
from polyattn._dispatch.contract import Plugin, flaw_of, read, unusable
from polyattn._dispatch.entries import BACKENDS, KERNELS, OURS, Entry, entries
from polyattn._dispatch.errors import BackendUnavailableError
from polyattn._dispatch.standard import StandardBackend
from polyattn._kernels.dense_kernel import Dense
from polyattn._kernels.gathered import Gathered
from polyattn._kernels.tiled import Tiled
from polyattn.plugin import Backend, BackendSpec, Kernel

#: The backend that runs the core's kernels on the library of the arrays.
ARRAY_API = "array-api"

_TILED = Tiled()
_ARRAY_API_KERNELS: tuple[Kernel, ...] = (_TILED, Dense(), Gathered())


_lock = forkable_lock()
hold_during_forks(_lock)
# Filled once under the lock, and read without it: torch.compile cannot trace a lock.
_plugins: dict[str, Plugin[BackendSpec]] = {}
_array_api: dict[str, Backend] = {}
_warned: set[str] = set()


def _find() -> dict[str, Plugin[BackendSpec]]:
    if not _plugins:
        # polyattn's plugins first, so that no other can take their names; broken entries last.
        listed = sorted(entries(), key=_rank)
        own = [entry for entry in listed if entry.group == BACKENDS]
        plugins = read(own, BackendSpec, {ARRAY_API: "polyattn"})
        extensions.find([entry for entry in listed if entry.group == KERNELS], plugins)
        _plugins.update(plugins)  # at once: an interrupt leaves all or nothing
    return _plugins


def _rank(entry: Entry) -> tuple[bool, bool, str]:
    return entry.distribution not in OURS, entry.flaw is not None, entry.name


@constant_when_traced
def names() -> tuple[str, ...]:
    """Return the names of all plugins, whether they can be loaded or not."""
    with _lock:
        return tuple(sorted(_find()))


@constant_when_traced
def is_allowed(name: str) -> bool:
    """Return whether a backend, by its name in `names`, may run unnamed."""
    return name == ARRAY_API or _find()[name].allowed


@constant_when_traced
def serving(library: str) -> tuple[str, ...]:
    """Return the plugins that serve this library's arrays unnamed: polyattn's, or else others."""
    with _lock:
        specs = [(p, p.spec) for p in _find().values() if p.spec and not p.spec.only_on_request]
    serving = [plugin for plugin, spec in specs if library in spec.namespaces]
    ours = tuple(p.name for p in serving if p.distribution == "polyattn")
    return ours or tuple(p.name for p in serving)


def first_serving(library: str) -> Backend | None:
    """Return the first backend that serves this library and can be loaded, if there is one."""
    return next((loaded(name) for name in serving(library) if load(name) is None), None)


def specs() -> tuple[BackendSpec, ...]:
    """Return the specs of all plugins that have one, whether they can be loaded or not."""
    with _lock:
        return tuple(p.spec for p in _find().values() if p.spec is not None)


@constant_when_traced
def load(name: str) -> str | None:
    """Load a plugin by its name in `names`; return the reason if that fails, or None."""
    with _lock:
        plugin = _find()[name]
        if plugin.backend is None and plugin.failure is None and plugin.spec is not None:
            try:
                plugin.failure = unusable(plugin.spec, plugin.distribution)
                if plugin.failure is None:
                    backend = plugin.spec.load()
                    plugin.failure = flaw_of(backend.kernels) or _unmatched(plugin.spec, backend)
                if plugin.failure is None:
                    backend.tiled = _TILED
                    extensions.join(name, backend, [kernel.name for kernel in _ARRAY_API_KERNELS])
                    plugin.backend = backend
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # SystemExit and others, as in `read_spec`
                plugin.failure = f"it cannot be loaded: {type(error).__name__}: {error}"
        return plugin.failure


@constant_when_traced
def warn_once(source: str, reason: str, kernel: str) -> None:
    """Warn once that the default plugin of the arrays failed, and name the kernel that runs."""
    text = f"{source} cannot be used: {reason}. The kernel {kernel} runs, which may be much slower"
    if source not in _warned:
        _warned.add(source)
        warnings.warn(text, RuntimeWarning, stacklevel=2)


def _unmatched(spec: BackendSpec, backend: Backend) -> str | None:
    """Return the reason if no array can be of the first library that a spec names, or None."""
    # The first is that of the backend's own arrays; the others may be missing on this machine.
    first, *_ = (*spec.namespaces, "")
    if is_namespace(first):
        return None
    meant = backend.xp.__name__.removeprefix("array_api_compat.")
    return (
        f"its namespaces begin with {first!r}, which is not a namespace of arrays: name the module"
        f" that array.__array_namespace__() returns; did you mean {meant!r}?"
    )


@constant_when_traced
def accepted(name: str) -> tuple[str, ...]:
    """Return the libraries whose arrays may be options of a call, by a plugin that has a spec."""
    spec, allowed = _plugins[name].spec, _plugins[name].allowed
    return spec.accepts if spec is not None and allowed else ()


def usable(name: str, wanted: str = "") -> tuple[Backend, str | None]:
    """Load a plugin; return its backend and the device wanted, if one is, or raise."""
    failure = load(name)
    if failure is not None:
        raise BackendUnavailableError(f"the backend {name!r} cannot be used: {failure}")
    device = device_of(name, wanted) if wanted else None
    if wanted and device is None:
        devices = ", ".join(devices_of(name)) or "no device with a name"
        raise BackendUnavailableError(
            f"the backend {name!r} has no device {wanted!r} here; it has {devices}"
        )
    return loaded(name), device


def loaded(name: str) -> Backend:
    """Return the backend of a loaded plugin."""
    backend = _plugins[name].backend
    assert backend is not None
    return backend


def spec_of(name: str) -> BackendSpec:
    """Return the spec of a loaded plugin."""
    spec = _plugins[name].spec
    assert spec is not None
    return spec


def array_api_backend(xp: Any) -> Backend:
    """Return the backend that runs the core's kernels on the arrays of a namespace."""
    backend = _array_api.get(xp.__name__)
    if backend is None:
        backend = _array_api[xp.__name__] = StandardBackend(xp)
    return backend


def kernels_of(backend: Backend | None) -> tuple[Kernel, ...]:
    """Return a backend's kernels, and then the array-API kernels whose names they do not take."""
    kernels = () if backend is None else backend.kernels
    names = {kernel.name for kernel in kernels}
    return (*kernels, *(kernel for kernel in _ARRAY_API_KERNELS if kernel.name not in names))


@constant_when_traced
def devices_of(name: str) -> tuple[str, ...]:
    """Return the available devices of a loaded backend, the default first."""
    return tuple(loaded(name).devices())


@constant_when_traced
def device_of(name: str, wanted: str) -> str | None:
    """Return the device whose name, kind or number is `wanted`, or None."""
    for device in devices_of(name):
        kind, _, number = device.partition(":")
        if wanted in (device, kind, number):
            return device
    return None
