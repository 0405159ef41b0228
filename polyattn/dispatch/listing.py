"""Which backends there are: what is installed, on which devices, and how to get what is missing."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version

from polyattn.dispatch import registry
from polyattn.text_table import table

__all__ = ["BackendInfo", "BackendTable", "list_backends"]


@dataclass(frozen=True)
class BackendInfo:
    """One backend as it stands on this machine.

    Attributes
    ----------
    name : str
        What ``backend=`` calls it.
    available : bool
        Whether it can be used here.
    versions : dict of str to str
        The versions of the modules that it needs and of the engines that it calls.
    devices : tuple of str
        The devices at hand, the default first.
    hardware : dict of str to dict
        What is known of each device: its name, memory in bytes, compute capability.
    kernels : tuple of str
        Its kernels, best first.
    reason : str or None
        Why it cannot be used, and what would mend that.
    """

    name: str
    available: bool
    versions: dict[str, str]
    devices: tuple[str, ...]
    hardware: dict[str, dict[str, str | int]]
    kernels: tuple[str, ...]
    reason: str | None

    def device(self, name: str) -> str:
        """Return a device's name with what is known of it, as the table shows it."""
        known = dict(self.hardware.get(name, {}))
        memory, capability = known.pop("memory", None), known.pop("compute_capability", None)
        said = [str(value) for value in known.values()]
        if memory is not None:
            said.append(f"{int(memory) / 2**30:.0f} GiB")
        if capability is not None:
            said.append(f"compute capability {capability}")
        return f"{name} ({', '.join(said)})" if said else name


class BackendTable(tuple[BackendInfo, ...]):
    """All backends, one `BackendInfo` each; it prints as a table."""

    __slots__ = ()

    def __str__(self) -> str:
        rows = [("backend", "library", "devices", "kernels")]
        rows += [
            (
                info.name,
                ", ".join(f"{k} {v}" for k, v in info.versions.items()) or "-",
                ", ".join(map(info.device, info.devices)) or "the arrays' own",
                ", ".join(info.kernels),
            )
            if info.available
            else (info.name, "-", "-", info.reason or "")
            for info in self
        ]
        return "\n".join(table(rows))

    def as_dicts(self) -> list[dict[str, object]]:
        """Return the rows in plain types, for JSON."""
        return [asdict(info) for info in self]


def list_backends() -> BackendTable:
    """Return all backends that are registered, whether they can be used here or not.

    It loads those that are installed, which imports their array libraries.

    Returns
    -------
    BackendTable
        One `BackendInfo` each; it prints as a table.

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
    versions = _versions(("array-api-compat",))
    yield BackendInfo(registry.ARRAY_API, True, versions, (), {}, closing, None)


def _row(name: str) -> BackendInfo:
    reason = registry.load(name)
    if reason is None:
        try:
            return _available(name)
        except Exception as error:  # in the plugin, which must not hide the others
            reason = f"it cannot tell what is here: {type(error).__name__}: {error}"
    return BackendInfo(name, False, {}, (), {}, (), reason)


def _available(name: str) -> BackendInfo:
    backend = registry.loaded(name)
    kernels = tuple(kernel.name for kernel in registry.kernels_of(backend))
    versions = _versions(registry.spec_of(name).requires) | backend.engines()
    devices = registry.devices_of(name)
    hardware = {device: backend.hardware(device) for device in devices}
    return BackendInfo(name, True, versions, devices, hardware, kernels, None)


def _versions(modules: tuple[str, ...]) -> dict[str, str]:
    found = {}
    for module in modules:
        try:
            found[module] = version(module)
        except PackageNotFoundError:  # the package has another name, as CuPy's for each CUDA has
            said = getattr(sys.modules.get(module), "__version__", None)
            found |= {} if said is None else {module: said}
    return found
