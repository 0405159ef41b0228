"""Whether torch traces or transforms the code that asks, without importing torch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, TypeVar

__all__ = [
    "constant_when_traced",
    "is_compiling",
    "is_transformed",
    "know_torch",
    "torch_transforms",
]

_F = TypeVar("_F", bound=Callable[..., Any])
#: Torch and what is asked of it in each call, once a tensor was seen.
_torch_parts: dict[str, Any] = {}


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
    torch: Any = sys.modules.get("torch")
    if hasattr(torch, "compiler"):  # another thread may still be importing torch
        functorch = getattr(torch._C, "_functorch", None)
        interpreters = getattr(functorch, "get_interpreter_stack", tuple)
        forward_ad: Any = torch.autograd.forward_ad
        if not hasattr(forward_ad, "_current_level"):  # a version of torch keeps it elsewhere
            forward_ad = SimpleNamespace(_current_level=-1)
        _torch_parts.update(torch=torch, forward_ad=forward_ad, interpreters=interpreters)
    return "torch" in _torch_parts


def _torch() -> Any:
    # Not from sys.modules: another thread may still be importing torch, and torch.compile cannot
    # trace a dict that grows.
    return _torch_parts.get("torch")


def is_transformed() -> bool:
    """Return whether torch.compile traces the caller, or torch.func transforms it."""
    parts = _torch_parts
    if not parts:
        return False
    # Written out, because each call of `attention` asks it.
    return (
        parts["torch"].compiler.is_compiling()
        or parts["forward_ad"]._current_level >= 0
        or bool(parts["interpreters"]())
    )


def torch_transforms() -> frozenset[str]:
    """Return which of torch.func's ``vmap``, ``grad`` and ``jvp`` are transforming the caller.

    The result is empty if a version of torch keeps this elsewhere; torch itself then refuses
    kernels without a rule for them.
    """
    torch = _torch()
    if torch is None or torch.compiler.is_compiling():
        return frozenset()
    interpreters = _torch_parts["interpreters"]() or ()
    transforms = frozenset([one.key().name.lower() for one in interpreters])
    return transforms | {"jvp"} if _torch_parts["forward_ad"]._current_level >= 0 else transforms
