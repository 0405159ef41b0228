"""Make calls that fail if anything is computed while they are traced or their graph is built.

`array_api_extra.testing` patches functions of a module: it jits them under JAX and forbids
computing under dask. This module has one function for it to patch.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from array_api_extra.testing import lazy_xp_function, patch_lazy_xp_functions

from polyattn._base.arrays import library_of
from polyattn.conformance.checks.target import Target

LAZY = ("jax", "dask")


def is_lazy(target: Target) -> bool:
    """Return whether the library of the target is known to evaluate lazily."""
    return target.library.partition(".")[0] in LAZY


def lazily(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of arrays that fails if it computes anything; a transform for `Target`."""
    module: Any = sys.modules[__name__]
    request: Any = SimpleNamespace(module=module)

    def run(arrays: list[Any], options: dict[str, Any]) -> Any:
        xp = importlib.import_module(library_of(arrays[0]).xp.__name__)
        with patch_lazy_xp_functions(request, xp=xp):
            return module.call(function, arrays, options)

    return run


def call(function: Callable[..., Any], arrays: list[Any], options: dict[str, Any]) -> Any:
    """Call the function; `lazy_xp_function` patches this one."""
    return function(arrays, options)


lazy_xp_function(call)
