"""The specs of plugins: the facts that are known before an array library is imported."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass, field

from polyattn._core.call.features import DTYPES
from polyattn.plugin.backend import Backend, Kernel

#: The version of the contract: of `polyattn.plugin`, and of what polyattn asks of a plugin.
CONTRACT_VERSION = 5


def _check_version(version: object) -> None:
    if type(version) is not int:
        raise TypeError(f"contract_version must be a number, such as 5; got {version!r}")


@dataclass(frozen=True)
class BackendSpec:
    """The facts of a backend that are known before its array library is imported.

    Parameters
    ----------
    name : str
        Its name in ``backend=``.
    namespaces : tuple of str
        The array libraries whose arrays it takes as they are, by the name of the module that
        ``array.__array_namespace__()`` returns, such as ``"cupy"``; ``"jax"``, ``"dask"`` and
        ``"mlx"`` are short for ``jax.numpy``, ``dask.array`` and ``mlx.core``. The first
        is the library of its own arrays.
    implementation : str
        The import path of its `Backend` subclass, ``"module:Class"``, called without arguments.
    requires : tuple of str
        Modules without which it cannot run.
    install : str
        The command that installs them.
    contract_version : int
        The `CONTRACT_VERSION` of the polyattn that it was written for, as a number: a polyattn with
        another version does not run it.
    devices : tuple of str
        Kinds of device it can run on: the text of ``array.device``, up to a colon.
    dtypes : tuple of str
        The dtypes it takes, of float16, bfloat16, float32 and float64.
    accepts : tuple of str
        Further libraries whose arrays may be options of a call on arrays of `namespaces`, such as a
        mask: they are passed as they are.
    only_on_request : bool
        Whether it runs only if a call names it, and never because the arrays are of its library.

    Raises
    ------
    TypeError
        If a field that must be a tuple of strings is not.
    ValueError
        If attention does not support a dtype.
    """

    name: str
    namespaces: tuple[str, ...]
    implementation: str
    requires: tuple[str, ...]
    install: str
    contract_version: int
    devices: tuple[str, ...] = ("cpu",)
    dtypes: tuple[str, ...] = DTYPES
    accepts: tuple[str, ...] = ()
    only_on_request: bool = False

    def __post_init__(self) -> None:
        _check_version(self.contract_version)
        for name in ("namespaces", "requires", "devices", "dtypes", "accepts"):
            value = getattr(self, name)
            if not isinstance(value, tuple) or not all(isinstance(item, str) for item in value):
                raise TypeError(f"{name} must be a tuple of strings; got {value!r}")
        for dtype in self.dtypes:
            if dtype not in DTYPES:
                raise ValueError(f"dtypes may hold {', '.join(DTYPES)}; got {dtype!r}")

    def load(self) -> Backend:
        """Import the implementation, and return a new instance of it."""
        module, _, name = self.implementation.partition(":")
        backend: Backend = getattr(importlib.import_module(module), name)()
        return backend


@dataclass(frozen=True)
class KernelSpec:
    """Kernels that join the lists of other distributions' backends, before they are imported.

    Parameters
    ----------
    name : str
        Its name. In the environment, ``POLYATTN_<NAME>=1`` allows the kernels to run unnamed, and 0
        leaves them out.
    kernels : mapping of str to str or tuple of str
        For each backend, by name, the import path of a `Kernel` subclass, ``"module:Class"``,
        called without arguments when the backend is loaded; or those of several, best first.
    requires : tuple of str
        Modules without which they cannot run.
    install : str
        The command that installs them.
    contract_version : int
        The `CONTRACT_VERSION` of the polyattn that it was written for, as a number: a polyattn with
        another version does not run it.
    before : mapping of str to str
        For a backend, by name, the kernel of its list before which they stand, by default the
        first: one of its own, or the first array-API kernel to stand after all of its own.

    Raises
    ------
    TypeError
        If a field has another type.
    ValueError
        If `before` names a backend that `kernels` does not.
    """

    name: str
    kernels: Mapping[str, str | tuple[str, ...]]
    requires: tuple[str, ...]
    install: str
    contract_version: int
    before: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_version(self.contract_version)
        if not isinstance(self.requires, tuple):
            raise TypeError(f"requires must be a tuple of strings; got {self.requires!r}")
        for name in ("kernels", "before"):
            if not isinstance(getattr(self, name), Mapping):
                raise TypeError(f"{name} must map backends, by name; got {getattr(self, name)!r}")
        for backend in self.before:
            if backend not in self.kernels:
                raise ValueError(f"before names {backend!r}, for which there are no kernels")

    def load(self, backend: str) -> tuple[Kernel, ...]:
        """Import the kernels for a backend, and return new instances of them."""
        paths = self.kernels[backend]
        listed = (paths,) if isinstance(paths, str) else paths
        return tuple(pkgutil.resolve_name(path)() for path in listed)
