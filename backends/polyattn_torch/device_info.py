"""What is asked of the runtime before a call: versions and the device, never a tensor.

A machine without the device is described too, with None where only the device could tell.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

__all__ = ["Facts", "facts_of"]


class Facts(NamedTuple):
    """A device and the versions that run it.

    Attributes
    ----------
    device : str
        ``cpu``, ``cuda``, ``hip`` for AMD's under that name, ``mps``, ``xpu`` or ``meta``.
    torch : tuple of int
        The release of torch, as (2, 13).
    cudnn : tuple of int or None
        The release of cuDNN, as (9, 20, 0).
    capability : tuple of int or None
        The compute capability of a CUDA device, as (9, 0).
    """

    device: str
    torch: tuple[int, int]
    cudnn: tuple[int, int, int] | None = None
    capability: tuple[int, int] | None = None

    @property
    def prefers_cudnn(self) -> bool:
        """Whether scaled_dot_product_attention asks cuDNN first: on Hopper and Blackwell."""
        major = (self.capability or (0, 0))[0]
        return major in (9, 10) and (self.cudnn or (0, 0, 0)) > (9, 15, 0)


# torch.compile is to take the answer as it is, rather than trace how it is found.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def facts_of(device: str) -> Facts:
    """Return the facts of a device.

    Parameters
    ----------
    device : str
        Its name, as ``cuda:0``.

    Returns
    -------
    Facts
        The same object at every call.
    """
    return _facts_of(device)


@functools.cache
def _facts_of(device: str) -> Facts:
    kind = device.partition(":")[0]
    if kind == "cuda" and torch.version.hip is not None:
        kind = "hip"
    major, minor = torch.__version__.split(".")[:2]
    cudnn = capability = None
    if kind == "cuda" and torch.cuda.is_available():
        number = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
        cudnn = None if number is None else (number // 10000, number // 100 % 100, number % 100)
        capability = torch.cuda.get_device_capability(device)
    return Facts(kind, (int(major), int(minor)), cudnn, capability)
