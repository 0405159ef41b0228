"""Whether torch traces or transforms the code that asks, or casts, without importing torch."""

from __future__ import annotations

import contextlib
import operator
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any, TypeVar

_F = TypeVar("_F", bound=Callable[..., Any])
#: Torch and what is asked of it in each call, once a tensor was seen.
_torch_parts: dict[str, Any] = {}
_of_numpy: dict[type, bool] = {}


def constant_when_traced(function: _F) -> _F:
    """Let torch.compile call `function` while it traces, and keep the result as a constant.

    Arguments and results must be constant in a program: names, classes, dtypes.
    """
    # As torch.compiler.assume_constant_result does, which imports all of the compiler for it.
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def is_compiling() -> bool:
    """Return whether torch.compile is tracing the caller."""
    # Written out, because all look-ups of a library ask it.
    return torch_is_imported() and bool(_torch_parts["torch"].compiler.is_compiling())


@constant_when_traced
def torch_is_imported() -> bool:
    """Return whether torch is imported; find the parts of it that `is_compiling` reads."""
    if _torch_parts:
        return True
    torch: Any = sys.modules.get("torch")
    if hasattr(torch, "compiler"):  # another thread may still be importing torch
        functorch = getattr(torch._C, "_functorch", None)
        interpreters = getattr(functorch, "get_interpreter_stack", tuple)
        forward_ad: Any = torch.autograd.forward_ad
        if not hasattr(forward_ad, "_current_level"):  # a version of torch keeps it elsewhere
            forward_ad = SimpleNamespace(_current_level=-1)
        _torch_parts.update(
            torch=torch,
            forward_ad=forward_ad,
            interpreters=interpreters,
            is_autocast_on=torch._C._is_any_autocast_enabled,
            jit_trace=torch._C._get_tracing_state,
            dispatch_modes=torch._C._len_torch_dispatch_stack,
        )
    return bool(_torch_parts)


def _torch() -> Any:
    # torch.compile traces the dict as it is when it first reads it.
    return _torch_parts.get("torch") if torch_is_imported() else None


def traced_tensor(array: Any) -> Any:
    """Return an array of NumPy that torch.compile traces as a tensor, which has a dtype."""
    return _torch().as_tensor(array)


def as_number(name: str, value: Any) -> Any:
    """Return a scalar of NumPy, which torch.compile traces as a tensor, as a Python number.

    Anything else stays as it is. A program is compiled anew for another number.
    """
    if not is_compiling() or not is_of_numpy(type(value)):
        return value
    tensor = traced_tensor(value)
    dtype = _name_of(tensor.dtype)
    if tensor.ndim or dtype in ("float64", "int64"):  # torch reads no other numbers
        return value if tensor.ndim else tensor.item()
    raise TypeError(
        f"{name} is a NumPy scalar of dtype {dtype}, which torch.compile does not read: pass a"
        " scalar of Python"
    )


@constant_when_traced
def is_of_numpy(cls: type) -> bool:
    """Return whether a class is that of NumPy's arrays or numbers."""
    if cls not in _of_numpy:
        own = ("ndarray", "generic")
        _of_numpy[cls] = any(c.__module__ == "numpy" and c.__name__ in own for c in cls.mro())
    return _of_numpy[cls]


def as_index(value: Any) -> int:
    """Return an integer of any type as Python's; that of a program of torch.compile stays open."""
    return value if is_compiling() and isinstance(value, int) else operator.index(value)


def as_constant(number: float) -> float:
    """Specialise torch.compile on a float that may be a SymFloat: a program for each value.

    If the caller computes with the SymFloat too, torch's inductor passes an old value to operators
    that take a number made of it (seen in torch 2.13).
    """
    return float.fromhex(number.hex()) if is_compiling() else number


def shape_text(shape: tuple[int | None, ...]) -> str:
    """Return a shape as text, with None for each length that a program leaves open."""
    if is_compiling():  # torch.compile joins no texts of symbols
        shape = tuple([_as_constant_length(length) for length in shape])
    return f"{shape}"


def _as_constant_length(length: int | None) -> int | None:
    """Return a length; None if it is open. A symbol may have one value only."""
    from torch.fx.experimental.symbolic_shapes import guard_scalar, has_static_value

    is_open = length is None or not has_static_value(length)
    return None if is_open else guard_scalar(length)  # type: ignore[return-value, arg-type]


def comparable_length(length: int) -> int | None:
    """Return a length, or None if a program of torch must not compare it with numbers.

    These are lengths that depend on data, and the open ones of torch.export.
    """
    from torch.fx.experimental import symbolic_shapes as shapes

    if shapes.has_static_value(length):
        return length
    if _torch().compiler.is_exporting():
        return None
    hint = getattr(shapes, "optimization_hint", None)  # which old versions of torch lack
    if hint is None:
        return length
    # One that depends on data has no hint but the fallback.
    return length if hint(length, fallback=0) == hint(length, fallback=2**40) else None


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


def is_recording() -> bool:
    """Return whether torch.jit.trace, or a mode such as that of make_fx, records the caller."""
    parts = _torch_parts
    return bool(parts) and (parts["jit_trace"]() is not None or parts["dispatch_modes"]() > 0)


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


def outside_inference() -> AbstractContextManager[Any]:
    """Let torch make tensors that autograd may save, to keep them, also in inference mode."""
    torch = _torch_parts.get("torch")
    return contextlib.nullcontext() if torch is None else torch.inference_mode(False)


def is_autocast_on() -> bool:
    """Return whether torch.autocast is at work on some kind of device."""
    parts = _torch_parts
    return bool(parts["is_autocast_on"]()) if parts else False


def autocast_dtype(kind: str) -> str | None:
    """Return the dtype that torch.autocast casts to on a kind of device, None where it is off."""
    torch = _torch()
    if torch is None or not has_autocast(kind):
        return None
    return _name_of(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else None


@constant_when_traced
def has_autocast(kind: str) -> bool:
    """Return whether torch.autocast knows a kind of device."""
    # torch.compile of torch 2.11 cannot trace the question.
    return bool(_torch().amp.is_autocast_available(kind))


@constant_when_traced
def _name_of(dtype: Any) -> str:
    return str(dtype).rpartition(".")[2]


def without_autocast(kind: str | None) -> AbstractContextManager[Any]:
    """Turn torch.autocast off on a kind of device: what is to be cast has been cast."""
    if kind is None or autocast_dtype(kind) is None:
        return contextlib.nullcontext()
    context: AbstractContextManager[Any] = _torch().autocast(kind, enabled=False)
    return context
