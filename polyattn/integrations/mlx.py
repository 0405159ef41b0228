"""Give MLX's namespace what it lacks of the array API standard.

Importing this module is not needed: the first array of MLX that polyattn meets imports it.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from polyattn._base.arrays import Library
from polyattn.integrations import with_names


def _arange(
    start: int, stop: int | None = None, step: int = 1, dtype: mx.Dtype = mx.int64
) -> mx.array:
    """Return indices of 64 bits, so that they can be compared with any offset."""
    start, stop = (0, start) if stop is None else (start, stop)
    return mx.arange(start, stop, step, dtype)


def _exp(x: mx.array) -> mx.array:
    """Return the exponential, of float64 as a power of e, because MLX's exp computes in float32."""
    # The rounding of e is an error of x · eps at most, and of a weight exp(x) far less than eps.
    return mx.power(mx.array(math.e, x.dtype), x) if x.dtype == mx.float64 else mx.exp(x)


def _argsort(
    x: mx.array, axis: int = -1, descending: bool = False, stable: bool = True
) -> mx.array:
    """Return the indices that sort an array; NaN comes last in both orders."""
    x = mx.negative(x) if descending else x
    order, length = mx.argsort(x, axis=axis), x.shape[axis]
    if not stable or length < 2:
        return order
    # MLX promises no order of equal numbers, so that their indices are sorted once more.
    ranked = mx.moveaxis(mx.take_along_axis(x, order, axis=axis), axis, -1)
    differs = (ranked[..., 1:] != ranked[..., :-1]).astype(mx.int64) * length
    first = mx.zeros_like(differs[..., :1])
    runs = mx.moveaxis(mx.concatenate([first, mx.cumsum(differs, axis=-1)], axis=-1), -1, axis)
    return mx.sort(runs + order.astype(mx.int64), axis=axis) % length


def _of_any(name: str) -> Callable[..., mx.array]:
    """Return a reduction for arrays of any lengths."""

    def reduced(x: mx.array, axis: Any = None, keepdims: bool = False) -> mx.array:
        # Of an array of NumPy without entries MLX 0.32 reads other memory, in some runs for ever.
        x = x if x.size else mx.zeros(x.shape, x.dtype)
        return getattr(mx, name)(x, axis=axis, keepdims=keepdims)  # type: ignore[no-any-return]

    return reduced


def _iinfo(dtype: Any) -> Any:
    """Return the limits of an integer dtype, and its bits."""
    known = mx.iinfo(dtype)
    return types.SimpleNamespace(min=known.min, max=known.max, bits=8 * dtype.size)


_xp = with_names(
    mx, arange=_arange, argsort=_argsort, bool=mx.bool_, exp=_exp, iinfo=_iinfo,
    **{name: _of_any(name) for name in ("all", "any", "sum")},
)  # fmt: skip
# Traced: an array does not tell whether mx.grad or mx.compile records its operations.
LIBRARY = Library("mlx", _xp, traced=True)
