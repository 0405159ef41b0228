"""A device of torch that is not the CPU, `far:0`: the CPU computes on it, and the host cannot read.

Its tensors are ordinary ones, with strides and memory of their own. As on a GPU, tensors of the
host may not meet them. To read one, which a GPU would wait for, is an error.
"""

import contextlib
import ctypes
import dataclasses

import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from polyattn._dispatch import registry

KIND, DEVICE = "far", "far:0"
#: The types of devices in DLPack.
_CPU, _EXTENSION = 1, 12
#: The operators that ran there, by name; a test clears it.
ran = []
_reads = []

_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)


def _as_on(kind, tensor):
    """Return a tensor of the same memory that is said to be on another type of device."""
    capsule = torch._C._to_dlpack(tensor.detach())
    # A DLTensor begins with a pointer to its numbers; the type of its device is next.
    ctypes.c_int32.from_address(_pointer(capsule, b"dltensor") + 8).value = kind
    return torch._C._from_dlpack(capsule)


def _near(x):
    if isinstance(x, torch.Tensor):
        if x.device.type == KIND:
            return _as_on(_CPU, x)
        if x.ndim:
            raise RuntimeError(f"a tensor on {x.device} is beside those on {DEVICE}")
    if isinstance(x, (list, tuple)):
        return [_near(one) for one in x]
    return torch.device("cpu") if isinstance(x, torch.device) else x


def _far(x):
    if isinstance(x, (list, tuple)):
        return type(x)(map(_far, x))
    return _as_on(_EXTENSION, x) if isinstance(x, torch.Tensor) else x


#: Numbers come in the place of tensors without axes.
_NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64}


def _stands_for_tensor(x, argument):
    return type(x) in _NUMBERS and str(argument.type) == "Tensor"


#: Operators whose result, or its shape, the host has to know.
_WAITING = {
    "_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "unique_dim",
    "repeat_interleave.Tensor",
}  # fmt: skip


@contextlib.contextmanager
def reading():
    """Let the host read, in this block."""
    _reads.append(True)
    try:
        yield
    finally:
        _reads.pop()


def _check_read(operator):
    if not _reads:
        raise RuntimeError(f"the host reads from {DEVICE}, by {operator}")


def _compute(operator, *args, **options):
    """Run an operator that has no kernel there on the memory of its tensors."""
    name = operator.__name__.removesuffix(".default")
    ran.append(name)
    if _WAITING & {name, name.partition(".")[0]}:
        _check_read(name)
    given = operator._schema.arguments
    args = [
        torch.tensor(x, dtype=_NUMBERS[type(x)]) if _stands_for_tensor(x, one) else _near(x)
        for x, one in zip(args, given, strict=False)
    ]
    # Memory of another library cannot grow, as that of an output without numbers has to.
    empty = {x.name: options[x.name] for x in given if x.is_out and not options[x.name].numel()}
    grown = {key: torch.empty(0, dtype=x.dtype) for key, x in empty.items()}
    found = operator(*args, **{key: _near(x) for key, x in options.items()} | grown)
    for key, x in empty.items():
        x.data = _far(grown[key])
    return _far(found)


def _copy_from(source, target, non_blocking=False):
    if target.device.type == "cpu":
        _check_read("a copy")
    pair = [_as_on(_CPU, x) if x.device.type == KIND else x for x in (target, source)]
    pair[0].copy_(pair[1])
    return target


# Before the first backward pass, for which torch starts a thread for each device.
_setup_privateuseone_for_python_backend(KIND)
# What torch's compiler asks under autocast.
getattr(torch, KIND).get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
_others = torch.library.Library("_", "IMPL", "PrivateUse1")
_others.fallback(_compute)
_own = torch.library.Library("aten", "IMPL", "PrivateUse1")
_own.impl("_copy_from", _copy_from)

_torch = registry._find()["torch"]
_torch.spec = dataclasses.replace(_torch.spec, devices=(*_torch.spec.devices, KIND))


def far(tensor):
    """Return a tensor copied to the device."""
    return tensor.to(DEVICE)


def near(tensor):
    """Return a tensor that must be on the device, copied to the host."""
    assert tensor.device == torch.device(DEVICE), f"it is on {tensor.device}"
    with reading():
        return tensor.cpu()
