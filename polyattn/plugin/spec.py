"""The spec of a backend: the facts that are known before its array library is imported."""

from __future__ import annotations

import importlib
from dataclasses import dataclass

from polyattn._core.call.features import DTYPES
from polyattn.plugin.backend import Backend

API_VERSION = 2


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
    devices : tuple of str
        Kinds of device it can run on: the text of ``array.device``, up to a colon.
    dtypes : tuple of str
        The dtypes it takes, of float16, bfloat16, float32 and float64.
    accepts : tuple of str
        Further libraries whose arrays may be options of a call on arrays of `namespaces`, such as a
        mask: they are passed as they are.
    only_on_request : bool
        Whether it runs only if a call names it, and never because the arrays are of its library.
    api_version : int
        The version of this contract that it was written for.

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
    devices: tuple[str, ...] = ("cpu",)
    dtypes: tuple[str, ...] = DTYPES
    accepts: tuple[str, ...] = ()
    only_on_request: bool = False
    api_version: int = API_VERSION

    def __post_init__(self) -> None:
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
