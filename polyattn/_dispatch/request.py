"""The backends that a call requests, by argument, context or environment, and its kernels.

The argument wins over the innermost context, which wins over the variable, read at call time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from polyattn._base.arguments import did_you_mean
from polyattn._base.arrays import Array
from polyattn._base.quirks import TracedValue, reader_of
from polyattn._base.same_bits import keeps_bits
from polyattn._base.settings import Context
from polyattn._dispatch import registry
from polyattn._dispatch.contract import flaw
from polyattn._dispatch.errors import UnknownBackendError
from polyattn.plugin import Kernel

AUTO = "auto"
VARIABLE = "POLYATTN_BACKEND"
# A program of torch.compile would look at all of the environment.
_variable = TracedValue(reader_of(VARIABLE))

Names = tuple[str, ...]
Kernels = Names | Kernel  # the names of those that may run, in order, or the only one


class Request(NamedTuple):
    """The requested backends in order, and the channel; no names if nothing is requested."""

    names: Names
    channel: str = "arrays"
    same_bits: bool = False  #: whether only kernels that declare ``cut_invariant`` may run

    @property
    def may_move(self) -> bool:
        """Whether a backend is named, so that arrays may move to it."""
        return any(name != AUTO for name in self.names)

    def __str__(self) -> str:
        names = ",".join(self.names)
        source = {
            "argument": f"backend={names!r}",
            "context": f"use_backend({names!r})",
            "environment": f"{VARIABLE}={names}",
            "arrays": "the arrays' own library",
        }[self.channel]
        return f"{source}, in same_bits()" if self.same_bits else source


_NOTHING = Request(())
_NOTHING_BUT_BITS = Request((), same_bits=True)
_context: Context[Names] = Context("polyattn_backend")
_here = TracedValue(lambda: _context.get() or ())


@contextmanager
def use_backend(*names: str) -> Iterator[None]:
    """Choose the backend for all calls that this thread or task makes inside the block.

    It works around the call of a function compiled by torch.compile, in the same thread or task.
    Inside such a function, pass ``backend=`` instead.

    Parameters
    ----------
    *names : str
        Backends in order, as ``name`` or ``name:device``; one string may hold several with commas.
        ``auto`` is the arrays' own library, which is the default.

    Yields
    ------
    None
        Nothing; the choice ends with the block.

    Raises
    ------
    UnknownBackendError
        If no plugin has one of the names.

    Examples
    --------
    >>> import numpy as np
    >>> import polyattn
    >>> x = np.ones((2, 5, 8), dtype=np.float32)
    >>> with polyattn.use_backend("numpy"):
    ...     polyattn.attention(x, x, x).shape
    (2, 5, 8)
    """
    parsed = parse(names, "use_backend")
    check_known(Request(parsed, "context"))
    with _context.block(parsed):
        yield


def request(backend: str | Sequence[str] | None, query: Array | None = None) -> Request:
    """Return what is requested by argument, context or environment, and by `same_bits`."""
    same = keeps_bits(query)
    if backend is not None:
        return Request(parse(backend), "argument", same)
    if _context.is_open_anywhere:
        names = _here.value
        if names:
            return Request(names, "context", same)
    variable = _variable.value
    if variable:
        return Request(parse(variable, f"{VARIABLE}="), "environment", same)
    return _NOTHING_BUT_BITS if same else _NOTHING


def parse(
    choice: str | Sequence[str],
    source: str = "backend=",
    what: str = "a backend is named by a string such as 'numpy' or 'torch:cuda'",
) -> Names:
    """Split a choice into names; errors refer to it as `source`, and say what is named how."""
    items = [choice] if isinstance(choice, str) else choice
    if not isinstance(items, Sequence) or not all(isinstance(item, str) for item in items):
        raise TypeError(f"{what}; got {choice!r}")
    names = tuple(name.strip() for item in items for name in item.split(","))
    if not names or not all(names):
        raise ValueError(f"a name is missing in {source}{choice!r}")
    return names


def parse_kernel(kernel: str | Sequence[str] | Kernel | None) -> Kernels:
    """Return the kernels that may run a call."""
    if isinstance(kernel, Kernel):
        reason = flaw(kernel)
        if reason is not None:
            raise TypeError(f"the kernel in kernel= {reason}")
        return kernel
    what = "a kernel is named by a string such as 'dense', or is an instance of Kernel"
    return (AUTO,) if kernel is None else parse(kernel, "kernel=", what)


def is_open(kernels: Kernels) -> bool:
    """Return whether more than one kernel may run."""
    return not isinstance(kernels, Kernel) and (len(kernels) > 1 or kernels[0] == AUTO)


def check_known(requested: Request) -> None:
    """Raise if no plugin has one of the requested names."""
    if not requested.names:
        return
    known = (*registry.names(), registry.ARRAY_API, AUTO)
    for name in requested.names:
        stem, _, device = name.partition(":")
        if stem == AUTO and device:
            raise UnknownBackendError(
                f"{AUTO} leaves the arrays where they are and takes no device; got {name!r}"
            )
        if stem not in known:
            hint = did_you_mean(stem, known) or "."
            # The backends that support this kind of device and others.
            on_it = [s for s in registry.specs() if stem in s.devices and len(s.devices) > 1]
            if on_it:
                examples = " or ".join(f"{spec.name}:{stem}" for spec in on_it)
                hint = f": it is a kind of device, as in {examples}."
            raise UnknownBackendError(
                f"no plugin provides the backend {stem!r}{hint} The names here are"
                f" {', '.join(known)}; `polyattn backends` shows what each needs"
                + (f" (asked for by {requested})" if requested.channel == "environment" else "")
            )
