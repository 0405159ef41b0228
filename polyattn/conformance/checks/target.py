"""The target of a check: a backend, on the arrays of one library, and each of its kernels.

NumPy arrays are converted to the library and back bit for bit, so that every target gets the same
numbers and is compared with the same results.
"""

from __future__ import annotations

import copy
import importlib
import math
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any, NamedTuple

import ml_dtypes  # noqa: F401 -- NumPy has bfloat16 by name once this is imported
import numpy as np

from polyattn import attention, explain
from polyattn._base.arrays import facts_of
from polyattn._core.call.features import DTYPES
from polyattn._core.call.parts import arrays_in
from polyattn._dispatch import extensions, registry
from polyattn._dispatch.explanation import Explanation
from polyattn._dispatch.request import AUTO
from polyattn.conformance.cases.case import Case, with_arrays
from polyattn.plugin import Kernel

CALLS_REMEMBERED = 100
#: Query, key and value, and the options of a call.
Arguments = tuple[list[Any], dict[str, Any]]


class KernelVariant(NamedTuple):
    """A kernel, with its own tiles or with tiles so small that short arrays have many.

    Attributes
    ----------
    kernel : Kernel
        The kernel.
    small_tiles : bool
        Whether its tiles are small.
    """

    kernel: Kernel
    small_tiles: bool = False

    def __str__(self) -> str:
        return f"{self.kernel.name}, small tiles" if self.small_tiles else self.kernel.name

    def for_case(self, case: Case) -> Kernel:
        """Return the kernel to run a case with: a copy whose tiles are small, if they are to be."""
        if not self.small_tiles:
            return self.kernel
        small = copy.copy(self.kernel)
        small.tile = math.prod(case.score_shape) // 12 + 1
        return small


class Target:
    """A backend on the arrays of a library.

    Parameters
    ----------
    backend : str
        The value of ``backend=``: ``name`` or ``name:device``.
    library : str, optional
        The module that makes the arrays, such as ``"jax.numpy"``. By default the backend's own
        library, and NumPy for ``array-api``.
    transform : callable, optional
        A wrapper of every call, such as ``jax.jit``: it takes and returns a function of a list and
        a dictionary of arrays.

    Raises
    ------
    UnknownBackendError
        If no plugin has the name.
    BackendUnavailableError
        If the backend cannot be loaded here; the message says why and how to fix it.
    """

    def __init__(
        self,
        backend: str,
        library: str | None = None,
        transform: Callable[..., Any] | None = None,
    ) -> None:
        stem, _, device = backend.partition(":")
        if "," in backend or stem == AUTO:
            raise ValueError(f"one backend is checked at a time, by its name; got {backend!r}")
        shape = (1, 2)
        explain(shape, shape, shape, backend=stem)  # refuses an unknown name
        self.backend, self.transform, self.device, self._stem = backend, transform, None, stem
        if stem == registry.ARRAY_API:
            self._plugin, default = None, "numpy"
        else:
            self._plugin, self.device = registry.usable(stem, device)
            default = registry.spec_of(stem).namespaces[0]
        self.library = library or default
        self._known: dict[str, bool] = {}
        self._calls = 0
        self.mover: Any = registry.first_serving(self.library)
        if self.mover is None:
            self._asarray = _maker(self.library)

    def __str__(self) -> str:
        own = self._plugin is not None and self.library in registry.spec_of(self._stem).namespaces
        name = self.backend if own else f"{self.backend} on {self.library}"
        transform = getattr(self.transform, "__name__", None)
        return f"{name}, {transform}" if transform else name

    def to(self, array: Any) -> Any:
        """Convert a NumPy array to the library, on the checked device."""
        if self.mover is None:
            return self._asarray(array)
        return self.mover.place(array, self.device)

    def back(self, array: Any) -> Any:
        """Convert an array of the library to NumPy."""
        return np.asarray(array if self.mover is None else self.mover.fetch(array))

    @cached_property
    def dtypes(self) -> tuple[str, ...]:
        """The dtypes that the library has and the backend supports."""
        taken = DTYPES if self._plugin is None else registry.spec_of(self._stem).dtypes
        return tuple(dtype for dtype in taken if self.has(dtype))

    def has(self, dtype: str) -> bool:
        """Return whether an array keeps a dtype when it is converted to the library."""
        if dtype not in self._known:
            try:
                self._known[dtype] = facts_of(self.to(np.ones((1, 2), dtype))).dtype == dtype
            except Exception:  # libraries refuse unknown dtypes in many ways, such as warnings
                self._known[dtype] = False
        return self._known[dtype]

    @cached_property
    def kernels(self) -> tuple[KernelVariant, ...]:
        """The kernels of the backend, and the tiled ones once more with small tiles."""
        kernels = [k for k in registry.kernels_of(self._plugin) if k not in self.elsewhere]
        small = [KernelVariant(kernel, True) for kernel in kernels if kernel.tile is not None]
        return (*map(KernelVariant, kernels), *small)

    def variants(self, names: Iterable[str] = ()) -> tuple[KernelVariant, ...]:
        """Return the kernels of some names, or all; raise for a name that no kernel has."""
        known = dict.fromkeys(variant.kernel.name for variant in self.kernels)
        for name in names:
            if name not in known:
                raise ValueError(f"{self} has no kernel {name!r}; it has {', '.join(known)}")
        return tuple(v for v in self.kernels if not names or v.kernel.name in names)

    @cached_property
    def elsewhere(self) -> tuple[Kernel, ...]:
        """The kernels of the backend that cannot run on the devices of this machine."""
        kernels = (k for k in self.own if k.devices is not None)
        return tuple(k for k in kernels if not (k.devices or frozenset()) & self.kinds)

    @property
    def own(self) -> tuple[Kernel, ...]:
        """The kernels of the plugin and those that joined it, without the core's."""
        return () if self._plugin is None else self._plugin.kernels

    @property
    def origins(self) -> dict[str, str]:
        """The kernels that joined the backend, each with the distribution that it comes from."""
        return extensions.origins(self._stem)

    @cached_property
    def kinds(self) -> frozenset[str]:
        """The kinds of device that are checked; empty where they have no names."""
        if self._plugin is None:
            return frozenset()
        at_hand = [self.device] if self.device else registry.devices_of(self._stem)
        return frozenset(device.partition(":")[0] for device in at_hand)

    def declared(self, kernel: Kernel) -> frozenset[str]:
        """Return the features and derivatives that a kernel declares for the checked devices."""
        elsewhere = {f for f, kinds in kernel.only_on.items() if not kinds & self.kinds}
        return (kernel.features | kernel.differentiates.keys()) - elsewhere

    def arguments(self, case: Case) -> Arguments:
        """Make query, key and value of a case, and its options, in the library."""
        return self.placed(case.arguments())

    def placed(self, arguments: tuple[Iterable[Any], dict[str, Any]]) -> Arguments:
        """Convert query, key and value and options to the library."""
        arrays, options = arguments
        placed = {name: with_arrays(option, self.to) for name, option in options.items()}
        return [self.to(x) for x in arrays], placed

    def explain(
        self,
        case: Case,
        kernel: Kernel,
        arguments: Arguments | None = None,
        *,
        logsumexp: bool = False,
    ) -> Explanation:
        """Explain the call of a case that requires a kernel, of these arguments or new ones."""
        arrays, options = arguments or self.arguments(case)
        return explain(*arrays, **options, backend=self.backend, kernel=kernel, logsumexp=logsumexp)

    def call(
        self,
        case: Case,
        kernel: Kernel,
        function: Callable[..., Any] = attention,
        arguments: Arguments | None = None,
    ) -> Any:
        """Make the call of a case by a function with the signature of `attention`."""
        self._forget_compiled()
        arrays, options = arguments or self.arguments(case)
        traced = {name: inner for name, x in options.items() if (inner := arrays_in(x))}

        def run(arrays: Any, traced: Any) -> Any:
            replaced = {name: _around(options[name], inner) for name, inner in traced.items()}
            return function(*arrays, **options | replaced, backend=self.backend, kernel=kernel)

        return (self.transform or (lambda f: f))(run)(arrays, traced)

    def _forget_compiled(self) -> None:
        """Clear the caches of JAX now and then: a process may have only so many memory maps."""
        self._calls += 1
        if self._calls % CALLS_REMEMBERED == 0 and self.library.partition(".")[0] == "jax":
            importlib.import_module("jax").clear_caches()


def _around(option: Any, arrays: Iterable[Any]) -> Any:
    """Return an option with its arrays replaced by those of a transform, in order."""
    others = iter(arrays)
    return with_arrays(option, lambda _: next(others))


def _maker(library: str) -> Callable[[Any], Any]:
    """Return the function that makes arrays of a library."""
    try:
        module: Any = importlib.import_module(library)
    except ImportError as error:
        raise ValueError(f"there is no module {library!r} to make arrays: {error}") from error
    make = getattr(module, "asarray", None)
    if make is None:
        raise ValueError(f"the module {library!r} makes no arrays: it has no asarray")
    return make  # type: ignore[no-any-return]
