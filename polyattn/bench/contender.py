"""A backend on a device, ready to be given the call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from polyattn.api.attention import attention, explain
from polyattn.bench.workload import Workload
from polyattn.dispatch import registry
from polyattn.dispatch.errors import BackendUnavailableError
from polyattn.dispatch.request import parse
from polyattn.plugin import Array, Backend

__all__ = ["Contender", "Running", "contenders", "everything_here"]


@dataclass(frozen=True)
class Contender:
    """A backend on a device.

    Attributes
    ----------
    name : str
        What the table calls it: ``numpy``, ``torch:cuda``, the same on every machine.
    stem : str
        What ``backend=`` calls it.
    library : str
        Whose arrays it is given.
    device : str or None
        Where they are, as the library names it; None where its plugin names no devices.
    hardware : str
        The same by a name that all libraries share: there is one ``cpu``.
    backend : Backend
        Its plugin, or what runs the core's kernels on NumPy arrays.
    """

    name: str
    stem: str
    library: str
    device: str | None
    hardware: str
    backend: Backend

    def refusal(self, workload: Workload, length: int) -> str | None:
        """Return why it cannot take the call, or None; nothing is computed."""
        query, key = workload.shapes(length)
        decision = explain(
            query,
            key,
            key,
            **workload.options(),
            dtype=workload.dtype,
            library=self.library,
            device=self.device,
            backend=self.stem,
        )
        return None if decision.chosen else str(decision)

    def start(self, workload: Workload, arrays: Iterable[Any]) -> Running:
        """Bring the arrays to it and return the call on them."""
        placed = [self.backend.place(array, self.device) for array in arrays]
        options = {**workload.options(), "backend": self.stem}

        def call(query: Array, key: Array, value: Array) -> Array:
            return attention(query, key, value, **options)

        def look(query: Array, key: Array, value: Array) -> Array:
            kernels.append(explain(query, key, value, **options).chosen)
            return query

        kernels: list[Any] = []
        # Compiled as the call is, so that both are decided from the same facts.
        self.backend.compile(look)(*placed)
        return Running(self, self.backend.compile(call), placed, kernels[0].kernel)


@dataclass(frozen=True)
class Running:
    """The call on a contender's own arrays.

    Attributes
    ----------
    contender : Contender
        Whose it is.
    function : callable
        The call, of query, key and value.
    arrays : list of Array
        Those.
    kernel : str
        The kernel that runs.
    """

    contender: Contender
    function: Callable[..., Array]
    arrays: list[Array]
    kernel: str

    def __call__(self) -> Array:
        """Return the output, once it is there."""
        output = self.function(*self.arrays)
        self.contender.backend.synchronize(self.contender.device)
        return output

    def fetched(self, output: Array) -> Any:
        """Return an output as a NumPy array."""
        return np.asarray(self.contender.backend.fetch(output))


def everything_here() -> list[str]:
    """Return the names of all backends that can be loaded here."""
    return [name for name in registry.names() if registry.load(name) is None]


def contenders(names: str | Iterable[str]) -> list[Contender]:
    """Return the backends of these names, one without a device on each kind that it has."""
    given = parse(names if isinstance(names, str) else list(names), "--backends ")
    found = {one.name: one for name in given for one in _named(name)}
    return list(found.values())


def _named(name: str) -> Iterator[Contender]:
    stem, _, wanted = name.partition(":")
    if stem == "auto":
        raise ValueError(
            "auto follows the arrays of a call, and here there are none: name backends"
        )
    shape = (1, 2)
    explain(shape, shape, shape, backend=stem)  # refuses a name that nobody has
    if stem == registry.ARRAY_API:
        if wanted:
            raise ValueError(f"array-api runs on NumPy arrays and takes no device; got {name!r}")
        yield Contender(stem, stem, "numpy", "cpu", "cpu", registry.array_api_backend(np.zeros(0)))
        return
    failure = registry.load(stem)
    if failure is not None:
        raise BackendUnavailableError(f"the backend {stem!r} cannot be used: {failure}")
    spec, devices = registry.spec_of(stem), registry.devices_of(stem)
    library, backend = spec.namespaces[0], registry.loaded(stem)
    if not devices and not wanted:
        yield Contender(stem, stem, library, None, spec.devices[0], backend)
        return
    firsts = {_kind(device): device for device in reversed(devices)}
    chosen: list[str] = [device for device in devices if device == firsts[_kind(device)]]
    if wanted:
        found = registry.device_of(stem, wanted)
        if found is None:
            here = ", ".join(devices) or "none that it can name"
            raise BackendUnavailableError(
                f"the backend {stem!r} has no device {wanted!r} here; it has {here}"
            )
        chosen = [found]
    for device in chosen:
        kind = _kind(device)
        label = kind if device == firsts[kind] else device
        # A backend of one kind of device is called by its name alone, on every machine.
        title = stem if spec.devices == (label,) else f"{stem}:{label}"
        hardware = "cpu" if kind == "cpu" else device
        yield Contender(title, stem, library, device, hardware, backend)


def _kind(device: str) -> str:
    return device.partition(":")[0]
