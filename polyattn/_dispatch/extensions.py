"""Join the kernels of other distributions to the lists of backends.

A `KernelSpec` is read with those of the backends. Its kernels for a backend are imported when that
backend is loaded. What is wrong with them affects nothing else; the reason is kept for messages.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from polyattn._base.arguments import did_you_mean
from polyattn._base.settings import reader_of
from polyattn._base.tracing import constant_when_traced
from polyattn._dispatch.contract import flaw_of, read_spec, taken, unusable
from polyattn._dispatch.entries import Entry
from polyattn.plugin import Backend, Kernel, KernelSpec

# Variables that have a meaning of their own.
_RESERVED = ("POLYATTN_BACKEND", "POLYATTN_NUM_THREADS")


@dataclass
class Extension:
    """Kernels for backends, by their spec, or the reason why there is none."""

    name: str
    distribution: str
    spec: KernelSpec | None = None
    failure: str | None = None
    joined: dict[str, tuple[str, ...]] = field(default_factory=dict)  # kernels, by the backend
    absent: dict[str, str] = field(default_factory=dict)  # why they did not join, by the backend


_extensions: list[Extension] = []


def find(entries: Iterable[Entry], backends: Collection[str]) -> None:
    """Read the specs at these entry points, of which the first has a name that two have."""
    found: dict[str, Extension] = {}
    for entry in entries:
        extension = Extension(entry.name, entry.distribution)
        if entry.name in found:
            extension.name = f"{entry.name} ({entry.distribution})"
            extension.failure = taken(entry, found[entry.name].distribution)
        else:
            extension.failure = _reason_against(entry.name)
        spec = extension.failure or read_spec(entry, KernelSpec)
        if isinstance(spec, KernelSpec):
            extension.spec = spec
            extension.absent = {
                name: f"no plugin provides the backend {name!r}{did_you_mean(name, backends)}"
                for name in spec.kernels
                if name not in backends
            }
        else:
            extension.failure = spec
        found.setdefault(extension.name, extension)
    _extensions[:] = found.values()


def _reason_against(name: str) -> str | None:
    """Return the reason if the environment leaves out an extension, before it is imported."""
    variable = "POLYATTN_" + re.sub(r"\W", "_", name).upper()
    if variable in _RESERVED:
        return f"{variable} would leave it out, and means something else: rename it"
    value = reader_of(variable)()
    if value not in (None, "", "0", "1"):
        raise ValueError(
            f"{variable} must be 0, which leaves the kernels of {name} out, or 1, or not be set; it"
            f" is {value!r}"
        )
    return f"{variable}=0 leaves it out" if value == "0" else None


def join(name: str, backend: Backend, closing: Sequence[str]) -> None:
    """Put the kernels that are for a backend at their places in its list, when it is loaded.

    `closing` are the names of the array-API kernels, which follow the list.
    """
    own = [kernel.name for kernel in backend.kernels]
    places = [*own, *[other for other in closing if other not in own][:1]]
    for extension in _extensions:
        spec = extension.spec
        if spec is None or name not in spec.kernels:
            continue
        try:
            reason = unusable(spec, extension.distribution) or _misplaced(spec, name, places)
            kernels = () if reason else spec.load(name)
            names = [kernel.name for kernel in backend.kernels]
            reason = reason or flaw_of(kernels) or _clash(kernels, (*names, *closing))
            if reason is None:
                place = spec.before.get(name, places[0])
                at = names.index(place) if place in names else len(names)
                backend.kernels = (*backend.kernels[:at], *kernels, *backend.kernels[at:])
                extension.joined[name] = tuple(kernel.name for kernel in kernels)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # SystemExit and others, as for a backend
            reason = f"its kernels cannot be loaded: {type(error).__name__}: {error}"
        if reason is not None:
            extension.absent[name] = reason


def _misplaced(spec: KernelSpec, backend: str, places: Sequence[str]) -> str | None:
    before = spec.before.get(backend, places[0])
    if before in places:
        return None
    return f"{backend} has no place before {before!r}: name one of {', '.join(places)}"


def _clash(kernels: tuple[Kernel, ...], others: Sequence[str]) -> str | None:
    names = [kernel.name for kernel in kernels]
    for name in names:
        if name in others or names.count(name) > 1:
            return f"the backend has a kernel {name!r} already: rename it"
    return None


def origins(backend: str) -> dict[str, str]:
    """Return the kernels that joined a backend, each with its distribution."""
    return {
        kernel: one.distribution for one in _extensions for kernel in one.joined.get(backend, ())
    }


@constant_when_traced
def absent(backend: str, kernel: str | None) -> tuple[tuple[str, str], ...]:
    """Return the extensions whose kernels did not join a backend, each with the reason.

    Of those without a spec nobody knows whether they are for it: only the one that is named.
    """
    reasons = [
        (one.name, one.absent.get(backend) or (one.failure if kernel == one.name else None))
        for one in _extensions
        if kernel in (None, one.name)
    ]
    return tuple((name, reason) for name, reason in reasons if reason is not None)


def failures() -> Iterator[tuple[str, str]]:
    """Yield all that did not join, as a title and the reason."""
    for one in _extensions:
        if one.failure is not None:
            yield f"kernels {one.name}", one.failure
        for backend, reason in one.absent.items():
            yield f"kernels {one.name} for {backend}", reason
