"""What is checked: a backend, on the arrays of one library, and each of its kernels.

NumPy arrays go to the library and come back bit for bit, so that every subject is given the same
numbers and is held to the same results.
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
from polyattn.arrays import facts_of
from polyattn.call.features import DTYPES
from polyattn.conformance.cases.case import Case, arrays_in, with_arrays
from polyattn.dispatch import registry
from polyattn.dispatch.errors import BackendUnavailableError
from polyattn.dispatch.explanation import Explanation
from polyattn.plugin import Kernel

__all__ = ["KernelVariant", "Target"]


CALLS_REMEMBERED = 100


class KernelVariant(NamedTuple):
    """A kernel as it is checked: as it is, or with tiles so small that short arrays have many.

    Attributes
    ----------
    kernel : Kernel
        The kernel.
    small_tiles : bool
        Whether with small tiles.
    """

    kernel: Kernel
    small_tiles: bool = False

    def __str__(self) -> str:
        return f"{self.kernel.name}, small tiles" if self.small_tiles else self.kernel.name

    def for_case(self, case: Case) -> Kernel:
        """Return the kernel to run a case with.

        Parameters
        ----------
        case : Case
            The call.

        Returns
        -------
        Kernel
            The kernel, or a copy of it with tiles of a twelfth of the scores.
        """
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
        What ``backend=`` is to be: ``name`` or ``name:device``.
    library : str, optional
        The module that makes the arrays, such as ``"jax.numpy"``. By default the backend's own
        library, and NumPy for ``array-api``.
    transform : callable, optional
        What every call goes through, such as ``jax.jit``: it takes a function of arrays, and
        dictionaries of arrays, and returns one.

    Raises
    ------
    UnknownBackendError
        If no plugin has the name.
    BackendUnavailableError
        If the backend cannot be loaded here; it says why, and how to mend that.
    """

    def __init__(
        self,
        backend: str,
        library: str | None = None,
        transform: Callable[..., Any] | None = None,
    ) -> None:
        stem, _, device = backend.partition(":")
        if "," in backend or stem == "auto":
            raise ValueError(f"one backend is checked at a time, by its name; got {backend!r}")
        shape = (1, 2)
        explain(shape, shape, shape, backend=stem)  # refuses a name that nobody has
        self.backend, self.transform, self.device = backend, transform, None
        if stem == registry.ARRAY_API:
            self._plugin, own = None, "numpy"
        else:
            failure = registry.load(stem)
            if failure is not None:
                raise BackendUnavailableError(f"the backend {stem!r} cannot be used: {failure}")
            self._plugin, own = registry.loaded(stem), registry.spec_of(stem).namespaces[0]
            self.device = registry.device_of(stem, device) if device else None
            if device and self.device is None:
                here = ", ".join(registry.devices_of(stem)) or "none that it can name"
                raise BackendUnavailableError(
                    f"the backend {stem!r} has no device {device!r} here; it has {here}"
                )
        self.library = library or own
        self._known: dict[str, bool] = {}
        self._calls = 0
        self.mover = self._find_mover()
        if self.mover is None:
            self._asarray = _maker(self.library)

    def __str__(self) -> str:
        own = self._plugin is not None and self.library in registry.spec_of(self._stem).namespaces
        name = self.backend if own else f"{self.backend} on {self.library}"
        transform = getattr(self.transform, "__name__", None)
        return f"{name}, {transform}" if transform else name

    @property
    def _stem(self) -> str:
        return self.backend.partition(":")[0]

    def _find_mover(self) -> Any:
        """The backend whose plugin takes the library's arrays in and out, or None."""
        for name in registry.serving(self.library):
            if registry.load(name) is None:
                return registry.loaded(name)
        return None

    def to(self, array: Any) -> Any:
        """Bring an array to the library.

        Parameters
        ----------
        array : numpy.ndarray
            The array.

        Returns
        -------
        Array
            The same numbers, on the device that is checked.
        """
        if self.mover is None:
            return self._asarray(array)
        return self.mover.place(array, self.device)

    def back(self, array: Any) -> Any:
        """Bring an array back.

        Parameters
        ----------
        array : Array
            One of the library's.

        Returns
        -------
        numpy.ndarray
            The same numbers.
        """
        return np.asarray(array if self.mover is None else self.mover.fetch(array))

    @cached_property
    def dtypes(self) -> tuple[str, ...]:
        """The dtypes that the library has, and the backend takes."""
        taken = DTYPES if self._plugin is None else registry.spec_of(self._stem).dtypes
        return tuple(dtype for dtype in taken if self.has(dtype))

    def has(self, dtype: str) -> bool:
        """Say whether the library has a dtype.

        Parameters
        ----------
        dtype : str
            Its name.

        Returns
        -------
        bool
            Whether an array of it goes there and keeps it.
        """
        if dtype not in self._known:
            self._known[dtype] = self._keeps(dtype)
        return self._known[dtype]

    def _keeps(self, dtype: str) -> bool:
        try:
            there = self.to(np.ones((1, 2), dtype))
        except Exception:
            # A library refuses a dtype that it has not in its own way, a warning turned error
            # among them.
            return False
        return facts_of(there).dtype == dtype

    @cached_property
    def kernels(self) -> tuple[KernelVariant, ...]:
        """The backend's kernels, and those that work in tiles once more, with small ones."""
        kernels = [k for k in registry.kernels_of(self._plugin) if k not in self.elsewhere]
        small = [KernelVariant(kernel, True) for kernel in kernels if kernel.tile is not None]
        return (*map(KernelVariant, kernels), *small)

    @cached_property
    def elsewhere(self) -> tuple[Kernel, ...]:
        """The backend's kernels that run on none of the devices at hand, so cannot be checked."""
        kernels = (k for k in self.own if k.devices is not None)
        return tuple(k for k in kernels if not (k.devices or frozenset()) & self.kinds)

    @property
    def own(self) -> tuple[Kernel, ...]:
        """The kernels that the backend brings itself."""
        return () if self._plugin is None else self._plugin.kernels

    @cached_property
    def kinds(self) -> frozenset[str]:
        """The kinds of device that are checked; none where they cannot be named."""
        if self._plugin is None:
            return frozenset()
        at_hand = [self.device] if self.device else registry.devices_of(self._stem)
        return frozenset(device.partition(":")[0] for device in at_hand)

    def declared(self, kernel: Kernel) -> frozenset[str]:
        """Return the features that a kernel declares for the kinds of device that are checked.

        Parameters
        ----------
        kernel : Kernel
            The kernel.

        Returns
        -------
        frozenset of str
            Those, of `FEATURES`.
        """
        elsewhere = {f for f, kinds in kernel.only_on.items() if not kinds & self.kinds}
        return frozenset(kernel.features) - elsewhere

    def arguments(self, case: Case) -> tuple[list[Any], dict[str, Any]]:
        """Make the arguments of a call, in the library.

        Parameters
        ----------
        case : Case
            The call.

        Returns
        -------
        arrays : list of Array
            Query, key and value.
        options : dict
            The other arguments.
        """
        arrays, options = case.arguments()
        return [self.to(x) for x in arrays], {
            name: with_arrays(option, self.to) for name, option in options.items()
        }

    def explain(self, case: Case, kernel: Kernel, *, logsumexp: bool = False) -> Explanation:
        """Say what would become of a call that insists on a kernel.

        Parameters
        ----------
        case : Case
            The call.
        kernel : Kernel
            The kernel.
        logsumexp : bool
            Whether the logsumexp is asked for, too.

        Returns
        -------
        Explanation
            As of `polyattn.explain`.
        """
        arrays, options = self.arguments(case)
        return explain(*arrays, **options, backend=self.backend, kernel=kernel, logsumexp=logsumexp)

    def call(
        self,
        case: Case,
        kernel: Kernel,
        function: Callable[..., Any] = attention,
        given: tuple[list[Any], dict[str, Any]] | None = None,
    ) -> Any:
        """Make the call of a case.

        Parameters
        ----------
        case : Case
            The call.
        kernel : Kernel
            The kernel to insist on.
        function : callable
            One with the signature of `attention`.
        given : tuple, optional
            The arguments, as of `arguments`, if they are there already.

        Returns
        -------
        Any
            What the function returns.
        """
        self._forget_compiled()
        arrays, options = given or self.arguments(case)
        traced = {name: found for name, x in options.items() if (found := arrays_in(x))}

        def run(arrays: Any, traced: Any) -> Any:
            given = options | {
                name: _around(options[name], found) for name, found in traced.items()
            }
            return function(*arrays, **given, backend=self.backend, kernel=kernel)

        return (self.transform or (lambda f: f))(run)(arrays, traced)

    def _forget_compiled(self) -> None:
        """Let JAX forget what it compiled for calls long ago, each with memory maps of its own.

        A process has no more than so many of those.
        """
        self._calls += 1
        if self._calls % CALLS_REMEMBERED == 0 and self.library.partition(".")[0] == "jax":
            importlib.import_module("jax").clear_caches()


def _around(option: Any, arrays: Iterable[Any]) -> Any:
    """An option with other arrays in place of its own, which a transform has made of them."""
    others = iter(arrays)
    return with_arrays(option, lambda _: next(others))


def _maker(library: str) -> Callable[[Any], Any]:
    """The function that makes a library's arrays."""
    try:
        module: Any = importlib.import_module(library)
    except ImportError as error:
        raise ValueError(f"there is no module {library!r} to make arrays: {error}") from error
    make = getattr(module, "asarray", None)
    if make is None:
        raise ValueError(f"the module {library!r} makes no arrays: it has no asarray")
    return make  # type: ignore[no-any-return]
