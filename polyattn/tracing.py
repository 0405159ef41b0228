"""Whether torch traces or transforms the code that asks, without importing torch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = [
    "constant_when_traced",
    "is_compiling",
    "is_transformed",
    "know_torch",
    "torch_transforms",
]

_F = TypeVar("_F", bound=Callable[..., Any])
#: Torch, once a tensor was seen.
_modules: dict[str, Any] = {}


def constant_when_traced(function: _F) -> _F:
    """Let torch.compile call `function` while it traces, and keep the result as a constant.

    Arguments and results must be constant in a program: names, classes, dtypes.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def is_compiling() -> bool:
    """Return whether torch.compile is tracing the caller."""
    torch = _torch()
    return torch is not None and bool(torch.compiler.is_compiling())


@constant_when_traced
def know_torch() -> bool:
    """Let `is_compiling` answer before the first tensor is seen, and return whether it can."""
    torch = sys.modules.get("torch")
    if hasattr(torch, "compiler"):  # another thread may still be importing torch
        _modules["torch"] = torch
    return "torch" in _modules


def _torch() -> Any:
    # Not from sys.modules: another thread may still be importing torch, and torch.compile cannot
    # trace a dict that grows. `_modules` has torch from the first tensor on.
    return _modules.get("torch")


def is_transformed() -> bool:
    """Return whether torch.compile traces the caller, or torch.func transforms it."""
    torch = _modules.get("torch")
    if torch is None:
        return False
    return torch.compiler.is_compiling() or _in_forward_mode(torch) or bool(_interpreters(torch))


def torch_transforms() -> frozenset[str]:
    """Return which of torch.func's ``vmap``, ``grad`` and ``jvp`` are transforming the caller.

    The result is empty if a version of torch keeps this elsewhere; torch itself then refuses
    kernels without a rule for them.
    """
    torch = _torch()
    if torch is None or torch.compiler.is_compiling():
        return frozenset()
    transforms = frozenset([one.key().name.lower() for one in _interpreters(torch)])
    return transforms | {"jvp"} if _in_forward_mode(torch) else transforms


def _interpreters(torch: Any) -> Any:
    functorch = getattr(torch._C, "_functorch", None)
    return getattr(functorch, "get_interpreter_stack", tuple)() or ()


def _in_forward_mode(torch: Any) -> bool:
    return getattr(torch.autograd.forward_ad, "_current_level", -1) >= 0
