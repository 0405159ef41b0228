"""Prepare a backend on a device for the call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from polyattn._api.attention import attention
from polyattn._api.explain import explain
from polyattn._base.arrays import library_of
from polyattn._dispatch import extensions, registry
from polyattn._dispatch.errors import UnsupportedError
from polyattn._dispatch.explanation import Explanation
from polyattn._dispatch.request import AUTO, parse
from polyattn.bench.workload import Workload
from polyattn.plugin import Array, Backend


@dataclass(frozen=True)
class Contender:
    """A backend on a device."""

    name: str  # in the table: numpy, torch:cuda; the same on every machine
    stem: str  # for backend=
    library: str  # that makes the arrays
    device: str | None  # as the library names it; None if the plugin names no devices
    hardware: str  # the device by the name that all libraries share
    backend: Backend  # the plugin, or one that runs the core's kernels on NumPy arrays
    kernel: str | None = None  # one of several of a backend, each a contender

    def each_kernel(self, workload: Workload, length: int) -> list[Contender]:
        """Return a contender for each kernel of the backend that supports the call."""
        kernels = [c.kernel for c in self._explain(workload, length).candidates if not c.reasons]
        return [replace(self, name=f"{self.name}/{name}", kernel=name) for name in kernels]

    def refusal(self, workload: Workload, length: int) -> str | None:
        """Return why the backend refuses the call, or None; nothing is computed."""
        decision = self._explain(workload, length)
        return None if decision.chosen else str(decision)

    def _explain(self, workload: Workload, length: int) -> Explanation:
        query, key = workload.shapes(length)
        how = self._options(workload) | {"library": self.library, "device": self.device}
        return explain(query, key, key, dtype=workload.dtype, **how)

    def _options(self, workload: Workload) -> dict[str, Any]:
        options = {**workload.options(), "backend": self.stem}
        return options | ({"kernel": self.kernel} if self.kernel else {})

    def start(self, workload: Workload, arrays: Iterable[Any]) -> Running:
        """Move the arrays to the backend and return the call on them."""
        placed = [self.backend.place(array, self.device) for array in arrays]
        options = self._options(workload)

        def call(query: Array, key: Array, value: Array) -> Array:
            return attention(query, key, value, **options)

        def look(query: Array, key: Array, value: Array) -> Array:
            kernels.append(explain(query, key, value, **options).chosen)
            return query

        kernels: list[Any] = []
        # Compiled like the call, so that both choose a kernel from the same facts.
        self.backend.compile(look)(*placed)
        kernel = kernels[0].kernel
        origin = extensions.origins(self.stem).get(kernel)
        return Running(self, self.backend.compile(call), placed, kernel, origin)


@dataclass(frozen=True)
class Running:
    """The call on arrays of a contender."""

    contender: Contender
    function: Callable[..., Array]  # of query, key and value
    arrays: list[Array]
    kernel: str
    origin: str | None  # the distribution of a kernel that joined several backends

    def __call__(self) -> Array:
        """Return the output once it is computed."""
        output = self.function(*self.arrays)
        self.contender.backend.synchronize(self.contender.device)
        return output


def everything_here() -> list[str]:
    """Return the names of all backends that can be loaded and compute, NumPy's first."""
    names = sorted(registry.names(), key=lambda name: name != "numpy")
    loaded = [name for name in names if registry.load(name) is None]
    return [name for name in loaded if registry.loaded(name).computes]


def contenders(names: str | Iterable[str]) -> list[Contender]:
    """Return the backends with these names; a name without a device means each kind it has."""
    parsed = parse(names if isinstance(names, str) else list(names), "--backends ")
    by_name = {contender.name: contender for name in parsed for contender in _named(name)}
    return list(by_name.values())


def _named(name: str) -> Iterator[Contender]:
    stem, _, wanted = name.partition(":")
    if stem == AUTO:
        raise ValueError(f"{stem} is of a call on arrays, and there are none here: name backends")
    shape = (1, 2)
    explain(shape, shape, shape, backend=stem)  # refuses an unknown name
    if stem == registry.ARRAY_API:
        if wanted:
            raise ValueError(
                f"array-api runs on NumPy arrays: name it without a device; got {name!r}"
            )
        core = registry.array_api_backend(library_of(np.zeros(0)).xp)
        yield Contender(stem, stem, "numpy", "cpu", "cpu", core)
        return
    backend, named = registry.usable(stem, wanted)
    spec, devices = registry.spec_of(stem), registry.devices_of(stem)
    library = spec.namespaces[0]
    if not backend.computes:
        raise UnsupportedError(
            f"the backend {stem!r} cannot be timed: it makes a graph, which another program runs"
        )
    if not devices and not wanted:
        yield Contender(stem, stem, library, None, spec.devices[0], backend)
        return
    firsts = {_kind(device): device for device in reversed(devices)}
    for device in [x for x in devices if x == (named or firsts[_kind(x)])]:
        kind = _kind(device)
        label = kind if device == firsts[kind] else device
        # A backend with one kind of device has a name without the device, on every machine.
        title = stem if spec.devices == (label,) else f"{stem}:{label}"
        hardware = "cpu" if kind == "cpu" else device
        yield Contender(title, stem, library, device, hardware, backend)


def _kind(device: str) -> str:
    return device.partition(":")[0]
