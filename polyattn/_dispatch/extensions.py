"""Join the kernels of other distributions to the lists of backends.

A `KernelSpec` is read with those of the backends. Its kernels for a backend are imported when that
backend is loaded. What is wrong with them affects nothing else; the reason is kept for messages.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

from polyattn._base.arguments import did_you_mean
from polyattn._base.tracing import constant_when_traced
from polyattn._dispatch.contract import Plugin, flaw_of, read, unusable
from polyattn._dispatch.entries import Entry, not_allowed
from polyattn.plugin import Backend, Kernel, KernelSpec

_extensions: list[Plugin[KernelSpec]] = []


def find(entries: Iterable[Entry], backends: Collection[str]) -> None:
    """Read the specs at these entry points."""
    _extensions[:] = read(entries, KernelSpec, {}).values()
    for extension in _extensions:
        for name in extension.spec.kernels if extension.spec else ():
            if name not in backends:
                hint = did_you_mean(name, backends)
                extension.absent[name] = f"no plugin provides the backend {name!r}{hint}"


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
        place = spec.before.get(name, places[0])
        reason = unusable(spec, extension.distribution)
        if reason is None and place not in places:
            reason = f"before={place!r} is not a place in {name}: name one of {', '.join(places)}"
        try:
            kernels = () if reason else spec.load(name)
            names = [kernel.name for kernel in backend.kernels]
            reason = reason or flaw_of(kernels) or _clash(kernels, (*names, *closing))
            if reason is None:
                at = names.index(place) if place in names else len(names)
                backend.kernels = (*backend.kernels[:at], *kernels, *backend.kernels[at:])
                extension.joined[name] = tuple(kernel.name for kernel in kernels)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # SystemExit and others, as for a backend
            reason = f"its kernels cannot be loaded: {type(error).__name__}: {error}"
        if reason is not None:
            extension.absent[name] = reason


def _clash(kernels: tuple[Kernel, ...], others: Sequence[str]) -> str | None:
    names = [kernel.name for kernel in kernels]
    for name in names:
        if name in others or names.count(name) > 1:
            return f"the backend has a kernel {name!r} already: rename it"
    return None


def origins(backend: str) -> dict[str, str]:
    """Return the kernels that joined a backend, each with its distribution."""
    return {kernel: x.distribution for x in _extensions for kernel in x.joined.get(backend, ())}


@constant_when_traced
def withheld(backend: str) -> tuple[tuple[str, str], ...]:
    """Return the kernels that joined a backend and do not run unnamed, each with the reason."""
    held = [extension for extension in _extensions if not extension.allowed]
    return tuple([(k, not_allowed(x.name)) for x in held for k in x.joined.get(backend, ())])


@constant_when_traced
def names() -> tuple[str, ...]:
    """Return the names of all that are installed, whether they joined or not."""
    return tuple(one.name for one in _extensions)


@constant_when_traced
def absent(backend: str, kernel: str | None = None) -> tuple[tuple[str, bool, str], ...]:
    """Return the extensions whose kernels did not join a backend: if allowed, and the reason.

    Of those without a spec nobody knows whether they are for it: only the one that is named.
    """
    reasons = [
        (one, one.absent.get(backend) or (one.failure if kernel else None))
        for one in _extensions
        if kernel in (None, one.name)
    ]
    return tuple((one.name, one.allowed, reason) for one, reason in reasons if reason is not None)


def failures() -> Iterator[tuple[str, str]]:
    """Yield all that did not join, as a title and the reason."""
    for one in _extensions:
        if one.failure is not None:
            yield f"kernels {one.name}", one.failure
        for backend, reason in one.absent.items():
            yield f"kernels {one.name} for {backend}", reason
