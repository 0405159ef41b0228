"""List the backends: installed versions, devices, kernels, and how to install what is missing."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version

from polyattn._base.arguments import did_you_mean
from polyattn._base.text_table import paragraph, table
from polyattn._dispatch import extensions, registry
from polyattn._dispatch.entries import RESERVED, not_allowed, variable_of


def described(hardware: Mapping[str, str | int]) -> str:
    """Return the facts of a device as text: its name, its memory, and the others."""
    others = {name: value for name, value in hardware.items() if name not in ("name", "memory")}
    parts = [str(hardware.get("name", ""))]
    if "memory" in hardware:
        parts.append(f"{int(hardware['memory']) / 2**30:.0f} GiB")
    parts += [f"{name.replace('_', ' ')} {value}" for name, value in others.items()]
    return ", ".join(filter(None, parts))


@dataclass(frozen=True)
class BackendInfo:
    """One backend on this machine."""

    name: str
    available: bool
    versions: dict[str, str]  # of the modules that it needs and the engines that it calls
    devices: tuple[str, ...]  # the default first
    hardware: dict[str, dict[str, str | int]]  # per device: name, memory, compute capability
    kernels: tuple[str, ...]  # the preferred one first
    reason: str | None  # why it is not available, and how to install it
    #: Of each kernel that joined the backend, the distribution that it comes from.
    origins: dict[str, str] = field(default_factory=dict)
    faults: tuple[str, ...] = ()  # those of its library that its kernels avoid
    waiting: tuple[str, ...] = ()  # its kernels that run only if named, each with why

    def device(self, name: str) -> str:
        """Return a device's name and its hardware, as the table shows them."""
        details = described(self.hardware.get(name, {}))
        return f"{name} ({details})" if details else name

    def kernel(self, name: str) -> str:
        """Return a kernel's name and the distribution that it comes from, as the table shows it."""
        return f"{name} ({self.origins[name]})" if name in self.origins else name


class BackendTable(tuple[BackendInfo, ...]):
    """All backends, one `BackendInfo` per backend; it prints as a table.

    Kernels that did not join a backend have one too, as backends that are not available.
    """

    __slots__ = ()

    def __str__(self) -> str:
        head = ("backend", "library", "devices", "kernels")
        faults = [paragraph(f"  {one}", "    ") for x in self for one in x.faults]
        said = ["", "Known faults of these libraries:", *itertools.chain(*faults)] if faults else []
        return "\n".join([*table([head, *map(self._row, self)]), *said])

    def __repr__(self) -> str:
        here = [info.name for info in self if info.available]
        missing = [info.name for info in self if not info.available]
        lacking = f"; not available: {', '.join(missing)}" if missing else ""
        return f"<BackendTable: {', '.join(here)}{lacking}>"

    def _row(self, info: BackendInfo) -> tuple[str, ...]:
        if not info.available:
            return info.name, "-", "-", info.reason or ""
        return (
            info.name,
            ", ".join(f"{k} {v}" for k, v in info.versions.items()) or "-",
            ", ".join(map(info.device, info.devices)) or "the arrays' own",
            "; ".join([", ".join(map(info.kernel, info.kernels)), *info.waiting]),
        )

    def as_dicts(self) -> list[dict[str, object]]:
        """Return the rows in plain types, for JSON."""
        return [asdict(info) for info in self]


def list_backends() -> BackendTable:
    """Return all registered backends, whether they can be used on this machine or not.

    This loads the installed backends, which imports their array libraries.

    Returns
    -------
    BackendTable
        One `BackendInfo` per backend; it prints as a table.

    Examples
    --------
    >>> import polyattn
    >>> [info.name for info in polyattn.list_backends() if info.name in ("array-api", "numpy")]
    ['numpy', 'array-api']
    """
    return BackendTable(_rows())


def _rows() -> Iterator[BackendInfo]:
    yield from map(_row, registry.names())
    closing = tuple(kernel.name for kernel in registry.kernels_of(None))
    core = versions(("array-api-compat",))
    yield BackendInfo(registry.ARRAY_API, True, core, (), {}, closing, None)
    for title, reason in extensions.failures():
        yield BackendInfo(title, False, {}, (), {}, (), reason)


def _row(name: str) -> BackendInfo:
    reason = registry.load(name)
    if reason is None:
        try:
            return _available(name)
        except Exception as error:  # in one plugin, which must not hide the others
            reason = f"its devices cannot be listed: {type(error).__name__}: {error}"
    return BackendInfo(name, False, {}, (), {}, (), reason)


def _available(name: str) -> BackendInfo:
    backend = registry.loaded(name)
    kernels = tuple(kernel.name for kernel in registry.kernels_of(backend))
    libraries = versions(registry.spec_of(name).requires) | backend.engines()
    devices = registry.devices_of(name)
    hardware = {device: backend.hardware(device) for device in devices}
    origins = extensions.origins(name)
    faults = backend.faults()
    serves = name in registry.serving(registry.spec_of(name).namespaces[0])
    waiting = {name: not_allowed(name)} if serves and not registry.is_allowed(name) else {}
    waiting |= dict(extensions.withheld(name))
    return BackendInfo(
        name, True, libraries, devices, hardware, kernels, None, origins, faults,
        tuple(f"{kernel}: {reason}" for kernel, reason in waiting.items()),
    )  # fmt: skip


def unknown_variables() -> list[str]:
    """Return a message for each environment variable that is named as ours, and is not."""
    plugins = (*registry.names(), *extensions.names(), "native")  # ours, installed or not
    known = [*RESERVED, *map(variable_of, plugins)]
    given = [name for name in os.environ if name.startswith("POLYATTN_") and name not in known]
    return [f"nothing reads the variable {name}{did_you_mean(name, known)}" for name in given]


def versions(modules: Iterable[str]) -> dict[str, str]:
    """Return the versions of those modules that are installed."""
    found = {}
    for module in modules:
        try:
            found[module] = version(module)
        except PackageNotFoundError:  # the package has another name, such as cupy-cuda12x
            imported = getattr(sys.modules.get(module), "__version__", None)
            if imported is not None:
                found[module] = imported
    return found
