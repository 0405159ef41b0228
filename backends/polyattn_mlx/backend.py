"""MLX's devices, and how its arrays are made and evaluated.

Computations have a device, arrays do not. Only `fetch` and `synchronize` evaluate.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import numpy as np

from polyattn._base.arrays import library_of
from polyattn._core.tiles.online_softmax import or_zero
from polyattn.plugin import Array, Backend, Operands, Problem
from polyattn_mlx.fast import Fast


class MlxBackend(Backend):
    """MLX's arrays, on its default device or on the one that a call names."""

    kernels = (Fast(),)

    def __init__(self) -> None:
        super().__init__(library_of(mx.array(0)).xp)

    def devices(self) -> list[str]:
        """Return the kinds of device that this build of MLX has, its default first."""
        default = mx.default_device().type
        kinds = [default, *{mx.cpu, mx.gpu} - {default}]
        return [kind.name for kind in kinds if mx.is_available(kind)]

    def lacks(self, dtype: str) -> str | None:
        """Refuse float64 on a GPU, where MLX computes nothing in it."""
        if dtype != "float64" or mx.default_device().type == mx.cpu:
            return None
        return "MLX has float64 on the CPU only: call mx.set_default_device(mx.cpu)"

    def place(self, array: Array, device: str | None) -> mx.array:
        """Return `array` as an array of MLX, whose memory belongs to no device."""
        return array if isinstance(array, mx.array) else _import(array)

    def fetch(self, array: Array) -> Any:
        """Evaluate an array, and return it as a NumPy array."""
        if array.dtype == mx.bfloat16:
            try:
                import ml_dtypes
            except ImportError:
                raise ImportError(
                    "NumPy has bfloat16 only through ml_dtypes: pip install ml_dtypes"
                ) from None
            return np.array(array.view(mx.uint16)).view(ml_dtypes.bfloat16)
        return np.array(array)

    def synchronize(self, device: str | None = None) -> None:
        mx.synchronize()

    def compile(self, function: Callable[..., Array]) -> Callable[..., Array]:
        """Return the function under mx.compile, which evaluates its result."""
        compiled = mx.compile(function)

        def evaluated(*arrays: Array) -> Array:
            result = compiled(*arrays)
            mx.eval(result)
            return result

        return evaluated

    def softmax(self, scores: Array) -> tuple[Array, Array, Array]:
        """Return the softmax before its division, the maximum a constant to a gradient."""
        # The result does not depend on it, and the gradient of a maximum would add the rounding of
        # a whole row to one key.
        maximum = mx.stop_gradient(mx.max(scores, axis=-1, keepdims=True))
        weights = self.xp.exp(scores - or_zero(mx, maximum))
        return weights, maximum, mx.sum(weights, axis=-1, keepdims=True)

    def pullback(self, function: Callable[[Array], Array], array: Array, gradient: Array) -> Array:
        return mx.vjp(function, [array], [gradient])[1][0]

    @contextlib.contextmanager
    def shield(self, problem: Problem, operands: Operands) -> Iterator[None]:
        """Run kernels on the device of the problem."""
        device, silence = problem.device, super().shield(problem, operands)
        with silence, mx.stream(getattr(mx, device)) if device else contextlib.nullcontext():
            yield


def _import(array: Array) -> mx.array:
    """Import an array of another library in its dtype."""
    if not isinstance(array, (np.ndarray, np.generic)):
        return mx.from_dlpack(array)
    array = np.asarray(array, array.dtype.newbyteorder("="), order="C")
    # Without a dtype MLX would convert NumPy's float64 to float32.
    return mx.array(array, mx.float64) if array.dtype == np.float64 else mx.array(array)
