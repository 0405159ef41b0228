"""Versions and hardware of a device, by which torch's engines are chosen.

An absent device is described too; facts that only the device could give are None.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from polyattn._base.tracing import constant_when_traced


class DeviceInfo(NamedTuple):
    """A kind of device and the versions that run it."""

    kind: str  # "cpu", "cuda", "hip" (AMD; torch calls it cuda), "mps", "xpu" or "meta"
    torch: tuple[int, int]  # (2, 13)
    cudnn: tuple[int, int, int] | None = None  # (9, 20, 0)
    capability: tuple[int, int] | None = None  # of a CUDA device: (9, 0)

    @property
    def prefers_cudnn(self) -> bool:
        """Whether scaled_dot_product_attention tries cuDNN first: on Hopper and Blackwell."""
        major = (self.capability or (0, 0))[0]
        # Not >, here and in other versions: torch.compile of torch 2.11 compares tuples by < only.
        return major in (9, 10) and not (self.cudnn or ()) < (9, 15, 1)


@constant_when_traced
def has_autocast(kind: str) -> bool:
    """Return whether torch.autocast knows a kind of device, which torch 2.11 cannot trace."""
    return torch.amp.is_autocast_available(kind)


@constant_when_traced
def describe_device(device: str) -> DeviceInfo:
    """Describe a device such as ``cuda:0``, by the same object at every call."""
    return _describe_device(device)


@functools.cache
def _describe_device(device: str) -> DeviceInfo:
    kind = device.partition(":")[0]
    if kind == "cuda" and torch.version.hip is not None:
        kind = "hip"
    major, minor = torch.__version__.split(".")[:2]
    cudnn = capability = None
    if kind == "cuda" and torch.cuda.is_available():
        number = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
        cudnn = None if number is None else (number // 10000, number // 100 % 100, number % 100)
        capability = torch.cuda.get_device_capability(device)
    return DeviceInfo(kind, (int(major), int(minor)), cudnn, capability)
