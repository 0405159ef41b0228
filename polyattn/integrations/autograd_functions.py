"""The array API standard's functions on autograd's boxes, each with its derivatives.

autograd knows NumPy's older names. Some of its rules turn float32 into float64, or fail for arrays
of several ranks. The functions here keep the dtype and broadcast as the standard says. Names that
are not here are autograd's, and those that autograd does not wrap are NumPy's.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from autograd import numpy as anp
from autograd.extend import defjvp, defvjp, notrace_primitive, primitive

from polyattn._base.arrays import Array, sum_to
from polyattn.nn.erf import erfc as erfc_of_numbers

F = TypeVar("F", bound=Callable[..., Any])
Axes = int | tuple[int, ...] | None

#: Functions without a derivative, which return plain arrays.
CONSTANT = (
    "all", "any", "argmax", "argmin", "argsort", "count_nonzero", "empty_like", "full_like",
    "isfinite", "isinf", "isnan", "nonzero", "ones_like", "sign", "signbit", "zeros_like",
)  # fmt: skip
globals().update({name: notrace_primitive(getattr(np, name)) for name in CONSTANT})


def __getattr__(name: str) -> Any:
    numpys = getattr(np, name)
    differentiable = callable(numpys) and not isinstance(numpys, type)
    return getattr(anp, name, numpys) if differentiable else numpys


def recorded(function: F) -> F:
    """Return a function of arrays that takes boxes, each call of it one operation."""
    changed: F = primitive(function)
    return changed


# ---- shapes and dtypes -------------------------------------------------------------------------


permute_dims, concat, cumulative_sum = anp.transpose, anp.concatenate, anp.cumsum
broadcast_to, astype, asarray, take, sum, where, tanh = map(
    primitive, (np.broadcast_to, np.astype, np.asarray, np.take, np.sum, np.where, np.tanh)
)
for kept in (broadcast_to, astype, asarray, take, sum):
    defjvp(kept, "same")


def matrix_transpose(x: Array) -> Array:
    """Return the array with its last two axes exchanged."""
    return anp.swapaxes(x, -1, -2)


def _summed_to(x: Array, shape: tuple[int, ...]) -> Array:
    """Return the sum over the axes along which an array of this shape was repeated."""
    return sum_to(sys.modules[__name__], x, shape)


defvjp(broadcast_to, lambda ans, x, shape: lambda g: _summed_to(g, x.shape))
defvjp(astype, lambda ans, x, dtype, copy=True: lambda g: astype(g, x.dtype))
defvjp(asarray, lambda ans, x, dtype=None, **options: lambda g: asarray(g, x.dtype))


@recorded
def _put(g: Array, indices: Array, axis: int, length: int) -> Array:
    """Return zeros to which entries are added along an axis: the transpose of `take`."""
    entries = np.moveaxis(g, axis, 0)
    out = np.zeros((length, *entries.shape[1:]), dtype=g.dtype)
    indices = indices % length  # some may count from the end
    if indices.size:
        # The sums over entries of the same index; `np.add.at` would take them one by one.
        order = np.argsort(indices, kind="stable")
        found, starts = np.unique(indices[order], return_index=True)
        out[found] = np.add.reduceat(entries[order], starts, axis=0)
    return np.moveaxis(out, 0, axis)


defvjp(take, lambda ans, x, indices, axis=0: lambda g: _put(g, indices, axis, x.shape[axis]))
defvjp(_put, lambda ans, g, indices, axis, length: lambda again: take(again, indices, axis))
defjvp(_put, "same")


# ---- reductions --------------------------------------------------------------------------------


def _kept(x: Array, shape: tuple[int, ...], axis: Axes) -> Array:
    """Return a reduced array with its axes kept, at the length 1."""
    axes = range(len(shape)) if axis is None else (axis,) if isinstance(axis, int) else axis
    reduced = {n % len(shape) for n in axes}
    return anp.reshape(x, tuple(1 if n in reduced else m for n, m in enumerate(shape)))


defvjp(
    sum,
    lambda ans, x, axis=None, dtype=None, keepdims=False: (
        lambda g: broadcast_to(astype(_kept(g, x.shape, axis), x.dtype, copy=False), x.shape)
    ),
)


def mean(x: Array, axis: Axes = None, keepdims: bool = False) -> Array:
    """Return the mean over axes."""
    total = sum(x, axis=axis, keepdims=keepdims)
    return total / (math.prod(x.shape) / math.prod(total.shape))


def _extremum(function: Callable[..., Array]) -> Any:
    """Return the largest or smallest over axes; equal ones share the gradient."""

    @recorded
    def reduced(x: Array, axis: Axes = None, keepdims: bool = False) -> Array:
        return function(x, axis=axis, keepdims=keepdims)

    def shares(ans: Array, x: Array, axis: Axes) -> Array:
        equal = astype(x == _kept(ans, x.shape, axis), x.dtype)
        return equal / sum(equal, axis=axis, keepdims=True)

    defvjp(
        reduced,
        lambda ans, x, axis=None, keepdims=False: (
            lambda g: _kept(g, x.shape, axis) * shares(ans, x, axis)
        ),
    )
    defjvp(
        reduced,
        lambda g, ans, x, axis=None, keepdims=False: sum(
            g * shares(ans, x, axis), axis=axis, keepdims=keepdims
        ),
    )
    return reduced


max, min = _extremum(np.max), _extremum(np.min)


# ---- element by element ------------------------------------------------------------------------


def _part(condition: Array, g: Array, of: Any) -> Array:
    return _summed_to(where(condition, g, np.zeros((), dtype=g.dtype)), np.shape(of))


defvjp(
    where,
    None,
    lambda ans, condition, x, y: lambda g: _part(condition, g, x),
    lambda ans, condition, x, y: lambda g: _part(np.logical_not(condition), g, y),
)
defjvp(
    where,
    None,
    lambda g, ans, condition, x, y: where(condition, g, np.zeros(ans.shape, ans.dtype)),
    lambda g, ans, condition, x, y: where(condition, np.zeros(ans.shape, ans.dtype), g),
)


def maximum(x: Array, y: Array) -> Array:
    """Return the larger of two, the first where they are equal."""
    return where(anp.logical_or(x >= y, anp.isnan(x)), x, y)


def minimum(x: Array, y: Array) -> Array:
    """Return the smaller of two, the first where they are equal."""
    return where(anp.logical_or(x <= y, anp.isnan(x)), x, y)


def clip(x: Array, low: float, high: float) -> Array:
    """Return the array within bounds."""
    return minimum(maximum(x, low), high)


defvjp(tanh, lambda ans, x: lambda g: g * (1 - ans * ans))
defjvp(tanh, lambda g, ans, x: g * (1 - ans * ans))


erfc = primitive(erfc_of_numbers)
defvjp(erfc, lambda ans, x: lambda g: g * (-2 / math.sqrt(math.pi)) * anp.exp(-x * x))
defjvp(erfc, lambda g, ans, x: g * (-2 / math.sqrt(math.pi)) * anp.exp(-x * x))


# ---- products ----------------------------------------------------------------------------------


def matmul(a: Array, b: Array) -> Array:
    """Return the product of stacks of matrices, or of vectors."""
    return anp.matmul(a, b) if len(a.shape) < 2 or len(b.shape) < 2 else _product(a, b)


@recorded
def _product(a: Array, b: Array) -> Array:
    if len(b.shape) > 2 or len(a.shape) == 2:
        return np.matmul(a, b)
    # One large product is 4 to 11 times as fast as a stack of small ones.
    return np.matmul(a.reshape(-1, a.shape[-1]), b).reshape(*a.shape[:-1], b.shape[-1])


def _of_first(a: Array, b: Array, g: Array) -> Array:
    return _summed_to(_product(g, matrix_transpose(b)), a.shape)


def _of_second(a: Array, b: Array, g: Array) -> Array:
    if len(b.shape) > 2 or len(a.shape) == 2:
        return _summed_to(_product(matrix_transpose(a), g), b.shape)
    rows, of_rows = (anp.reshape(x, (-1, x.shape[-1])) for x in (a, g))
    return _product(matrix_transpose(rows), of_rows)


defvjp(
    _product,
    # Other functions than these may have made a gradient of float32 numbers one of float64.
    lambda ans, a, b: lambda g: _of_first(a, b, astype(g, ans.dtype, copy=False)),
    lambda ans, a, b: lambda g: _of_second(a, b, astype(g, ans.dtype, copy=False)),
)
defjvp(_product, "same", "same")
