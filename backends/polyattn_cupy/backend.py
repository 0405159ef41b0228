"""CuPy's devices and primitives.

Arrays of other libraries on a CUDA device are imported by DLPack, without a copy; all others
through NumPy. Only `fetch` and `synchronize` wait for a device.
"""

from __future__ import annotations

import sys
from typing import Any

import array_api_compat.cupy as xp
import cupy
import numpy as np

from polyattn.plugin import Array, Backend, Operands, Problem, native
from polyattn_cupy.arrays import empty_result, zeroed
from polyattn_cupy.fused_kernel import Fused

ON_CUDA = (2, 13)  # kDLCUDA and kDLCUDAManaged of DLPack


class CupyBackend(Backend):
    """CuPy arrays on CUDA devices."""

    kernels = (Fused(),)

    def __init__(self) -> None:
        super().__init__(xp)
        count, cause = 0, ""
        try:
            count = cupy.cuda.runtime.getDeviceCount()
        except cupy.cuda.runtime.CUDARuntimeError as error:
            cause = f" ({error})"
        if not count:
            raise RuntimeError(
                f"CUDA finds no device{cause}: CuPy needs an NVIDIA GPU and its driver"
            )
        self._devices = [f"cuda:{number}" for number in range(count)]

    def devices(self) -> list[str]:
        return list(self._devices)

    def hardware(self, device: str) -> dict[str, str | int]:
        properties = cupy.cuda.runtime.getDeviceProperties(_number(device))
        return {
            "name": properties["name"].decode(),
            "memory": int(properties["totalGlobalMem"]),
            "compute_capability": f"{properties['major']}.{properties['minor']}",
        }

    def engines(self) -> dict[str, str]:
        """Return the version of CUDA."""
        version = cupy.cuda.runtime.runtimeGetVersion()
        return {"cuda": f"{version // 1000}.{version % 1000 // 10}"}

    def place(self, array: Array, device: str | None) -> Array:
        """Return `array` as a CuPy array on `device`, without a copy if it is there already."""
        if not isinstance(array, cupy.ndarray):
            array = _import(array, 0 if device is None else _number(device))
        if device is None or array.device.id == _number(device):
            return array
        with cupy.cuda.Device(_number(device)):
            return array.copy()

    def fetch(self, array: Array) -> Any:
        return cupy.asnumpy(array)

    def synchronize(self, device: str | None = None) -> None:
        cupy.cuda.Device(None if device is None else _number(device)).synchronize()

    def matmul(self, a: Array, b: Array) -> Array:
        return cupy.matmul(a, b)

    def zeroed(self, array: Array, keep: Array) -> Array:
        return zeroed(array, keep)

    def softmax(self, scores: Array) -> tuple[Array, Array, Array]:
        """Return the softmax before its division, in one array as large as the scores."""
        maximum = scores.max(axis=-1, keepdims=True)
        weights = scores - cupy.where(maximum == -cupy.inf, 0, maximum)
        cupy.exp(weights, out=weights)
        return weights, maximum, weights.sum(axis=-1, keepdims=True)

    def empty_result(self, problem: Problem, like: Array) -> tuple[Array, Array | None]:
        return empty_result(problem, like.dtype)

    def is_eager(self, array: Array) -> bool:
        """Return False, since reading a value would wait for the device."""
        return False

    def shield(self, problem: Problem, operands: Operands) -> Any:
        """Return the device of the query as a context, whatever the current device is."""
        return operands.query.device


def _number(device: str) -> int:
    return int(device.partition(":")[2] or 0)


def _import(array: Array, device: int) -> Array:
    """Return another library's array as a CuPy array, on its own CUDA device or on `device`."""
    if not isinstance(array, np.ndarray | np.generic):
        kind, number = map(int, array.__dlpack_device__())
        if kind in ON_CUDA:
            with cupy.cuda.Device(number):
                return cupy.from_dlpack(array)
        array = _as_numpy(array)
    array = native(array)
    with cupy.cuda.Device(device):
        return cupy.asarray(array)


def _as_numpy(array: Array) -> Any:
    """Return an array in the host's memory as a NumPy array."""
    torch = sys.modules.get("torch")
    if torch is not None and getattr(array, "dtype", None) is torch.bfloat16:
        import ml_dtypes

        # NumPy does not import bfloat16, a dtype of another package, by DLPack.
        return array.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
    try:
        return np.from_dlpack(array)
    except (AttributeError, BufferError, RuntimeError, TypeError):
        return np.asarray(array)
