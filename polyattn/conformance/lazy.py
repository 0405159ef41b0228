"""Whether a call stays lazy: nothing is computed while it is traced or its graph is built.

The module that `array_api_extra.testing` patches holds one function: under JAX it is jitted, under
dask it may not compute.
"""

from __future__ import annotations

import importlib
import sys
from types import SimpleNamespace
from typing import Any

from array_api_extra.testing import lazy_xp_function, patch_lazy_xp_functions

from polyattn import attention
from polyattn.arrays import library_of
from polyattn.conformance.cases import Case
from polyattn.conformance.subject import Checked, Subject
from polyattn.conformance.tolerance import deviation, output_yardstick

__all__ = ["check_laziness", "is_lazy"]

LAZY = ("jax", "dask")


def is_lazy(subject: Subject) -> bool:
    """Whether the subject's library can evaluate lazily, as far as this module knows."""
    return subject.library.partition(".")[0] in LAZY


def attend(arrays: list[Any], options: dict[str, Any]) -> Any:
    """Call attention; a function of its own, for the module is patched and not its callers'."""
    return attention(*arrays, **options)


lazy_xp_function(attend)


def check_laziness(subject: Subject, checked: Checked, case: Case) -> None:
    """Hold a call to giving the right result without computing anything on the way.

    Parameters
    ----------
    subject : Subject
        The backend, on arrays of JAX or dask.
    checked : Checked
        Its kernel.
    case : Case
        The call; one that the kernel takes.
    """
    arrays, options = subject.arguments(case)
    options |= {"backend": subject.backend, "kernel": checked.for_case(case)}
    here: Any = sys.modules[__name__]
    request: Any = SimpleNamespace(module=here)
    xp = importlib.import_module(library_of(arrays[0]).xp.__name__)
    with patch_lazy_xp_functions(request, xp=xp):
        output = here.attend(arrays, options)
    fault = deviation(
        subject.back(output), output_yardstick(case, case.dtype), f"{case}: lazily"
    ).fault
    assert fault is None, fault
