"""Check what a distribution brings against the contract of plugins."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from polyattn._base.arguments import did_you_mean
from polyattn._core.call.features import DERIVATIVES
from polyattn._dispatch.entries import Entry
from polyattn.plugin import (
    CONTRACT_VERSION,
    FEATURES,
    PROMISES,
    Backend,
    BackendSpec,
    Kernel,
    KernelSpec,
)

_VERSION = f"this polyattn has version {CONTRACT_VERSION} of the plugin contract"
Spec = TypeVar("Spec", BackendSpec, KernelSpec)


@dataclass
class Plugin(Generic[Spec]):
    """The spec that an entry point names, or the reason why there is none, and what it brings."""

    name: str
    distribution: str
    spec: Spec | None = None
    failure: str | None = None
    allowed: bool = False  # to run unnamed
    backend: Backend | None = None  # once loaded
    joined: dict[str, tuple[str, ...]] = field(default_factory=dict)  # kernels, by the backend
    absent: dict[str, str] = field(default_factory=dict)  # why they did not join, by the backend


def read(
    entries: Iterable[Entry], kind: type[Spec], owners: dict[str, str]
) -> dict[str, Plugin[Spec]]:
    """Return the plugins at entry points by name: of two with one name, the first has it.

    `owners` has the names that are taken before, each with its distribution.
    """
    plugins: dict[str, Plugin[Spec]] = {}
    for entry in entries:
        plugin: Plugin[Spec] = Plugin(entry.name, entry.distribution)
        if owner := owners.get(entry.name):
            plugin.name = f"{entry.name} ({entry.distribution})"
            plugin.failure = entry.flaw or (
                f"its name {entry.name!r} is taken already, by {owner}: rename one, or uninstall it"
            )
        else:
            plugin.allowed, left_out = entry.standing()
            spec = left_out or read_spec(entry, kind)
            if isinstance(spec, str):
                plugin.failure = spec
            else:
                plugin.spec = spec
        plugins.setdefault(plugin.name, plugin)
        owners.setdefault(plugin.name, plugin.distribution)
    return plugins


def read_spec(entry: Entry, kind: type[Spec]) -> Spec | str:
    """Return the spec that an entry point names, or the reason why it gives none."""
    if entry.flaw is not None:
        return entry.flaw
    try:
        spec = entry.load()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit, or a panic of an extension module in Rust
        reason = f"its plugin cannot be imported: {type(error).__name__}: {error}"
        # A field of the spec, or a name, that another version has.
        of_contract = any(x in reason for x in (f"{kind.__name__}.__init__()", "polyattn.plugin"))
        return f"{reason}; {_VERSION}" if of_contract else reason
    if not isinstance(spec, kind):
        return f"its entry point {entry.value} is not a {kind.__name__}"
    if spec.name != entry.name:
        return f"its spec is named {spec.name!r} and its entry point {entry.name!r}"
    return spec


def unusable(spec: BackendSpec | KernelSpec, distribution: str) -> str | None:
    """Return why the spec of a plugin says that it cannot run here, and what to do; or None."""
    if spec.contract_version != CONTRACT_VERSION:
        older = distribution if spec.contract_version < CONTRACT_VERSION else "polyattn"
        written = f"it was written for version {spec.contract_version}"
        return f"{written}, and {_VERSION}: upgrade {older}"
    absent = [module for module in spec.requires if not is_installed(module)]
    are = "is" if len(absent) == 1 else "are"
    return f"{', '.join(absent)} {are} not installed: {spec.install}" if absent else None


def is_installed(module: str) -> bool:
    """Return whether a module can be found, without importing it."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def flaw(kernel: Kernel) -> str | None:
    """Return how a kernel breaks the contract, or None."""
    if not isinstance(getattr(kernel, "name", None), str):
        return "has no name"
    of_derivatives = kernel.differentiates
    if not isinstance(of_derivatives, Mapping) or of_derivatives.keys() - DERIVATIVES.keys():
        names = " and ".join(map(repr, DERIVATIVES))
        return f"must map {names} to the features it differentiates; got {of_derivatives!r}"
    of_calls = FEATURES.keys() - DERIVATIVES.keys()
    declared = [("feature", of_calls, x) for x in (kernel.features, *of_derivatives.values())]
    for kind, known, words in (*declared, ("promise", PROMISES.keys(), kernel.promises)):
        if not isinstance(words, Set):
            return f"must declare its {kind}s as a set; got {words!r}"
        for name in sorted(words - known):
            if name in DERIVATIVES:
                return f"must declare {name!r} in differentiates, not in {kind}s"
            return f"declares an unknown {kind} {name!r}{did_you_mean(name, known)}"
    for derivative in of_derivatives:
        method = getattr(kernel, derivative)
        if getattr(method, "__func__", None) is getattr(Kernel, derivative):
            return f"declares {derivative!r} in differentiates, and has no method {derivative}"
    return None


def flaw_of(kernels: object) -> str | None:
    """Return how the kernels of a backend or a spec break the contract, or None."""
    if not isinstance(kernels, tuple):
        return f"its kernels must be a tuple, such as (Fused(),); got {kernels!r}"
    for kernel in kernels:
        if not isinstance(kernel, Kernel):
            return f"its kernels must be instances of Kernel; one is {kernel!r}"
        reason = flaw(kernel)
        if reason is not None:
            return f"its kernel {getattr(kernel, 'name', type(kernel).__name__)} {reason}"
    return None
