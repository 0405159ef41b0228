"""Compute the exact GELU by the error function, which the array API standard lacks.

A library's own function is used where its namespace has one, otherwise formulas for the upper tail
Q(x) = erfc(x / √2) / 2, whose error is a few roundings of Q however small it is.

References
----------
.. [1] Cody, "Rational Chebyshev Approximations for the Error Function", 1969.
"""

from __future__ import annotations

import math
import sys
from typing import Any

from polyattn._base.arrays import Array, library_of

_ROOT = math.sqrt(0.5)
#: From here on Q is 0 in every dtype.
_LARGEST = 40.0

Polynomials = tuple[tuple[float, ...], ...]

# For float32: Q(x) exp(x²/2) to 2e-7 of it, a polynomial of 1 / (1 + 0.3 x) by least squares.
_NARROW = (
    0.0354238593, -0.1561589154, 0.2045575691, -0.0520346839, 0.1276920944, 0.1001758595,
    0.1207121488, 0.1196320065, 0.0,
)  # fmt: skip
# For float64, Cody's functions: of x² near 0, of x up to 4, of 1 / x² beyond.
_NEAR = (
    (1.85777706184603153e-1, 3.16112374387056560e0, 1.13864154151050156e2, 3.77485237685302021e2,
     3.20937758913846947e3),
    (1.0, 2.36012909523441209e1, 2.44024637934444173e2, 1.28261652607737228e3,
     2.84423683343917062e3),
)  # fmt: skip
_MIDDLE = (
    (2.15311535474403846e-8, 5.64188496988670089e-1, 8.88314979438837594e0, 6.61191906371416295e1,
     2.98635138197400131e2, 8.81952221241769090e2, 1.71204761263407058e3, 2.05107837782607147e3,
     1.23033935479799725e3),
    (1.0, 1.57449261107098347e1, 1.17693950891312499e2, 5.37181101862009858e2,
     1.62138957456669019e3, 3.29079923573345963e3, 4.36261909014324716e3, 3.43936767414372164e3,
     1.23033935480374942e3),
)  # fmt: skip
_FAR = (
    (1.63153871373020978e-2, 3.05326634961232344e-1, 3.60344899949804439e-1, 1.25781726111229246e-1,
     1.60837851487422766e-2, 6.58749161529837803e-4),
    (1.0, 2.56852019228982242e0, 1.87295284992346725e0, 5.27905102951428412e-1,
     6.05183413124413191e-2, 2.33520497626869185e-3),
)  # fmt: skip


def gelu(x: Array) -> Array:
    """Return x · Φ(x) of each number, where Φ = 1 − Q, of an array in float32 or float64."""
    library = library_of(x)
    # If an array of JAX exists, JAX has been imported.
    own = sys.modules["jax"].lax if library.name == "jax" else library.xp
    if hasattr(own, "erfc"):
        return x * (own.erfc(x * -_ROOT) / 2)
    if hasattr(own, "erf"):  # MLX and ONNX: the sum has the error of a rounding of 1
        return x * ((own.erf(x * _ROOT) + 1) / 2)
    xp = library.xp
    size = xp.minimum(xp.abs(x), _LARGEST)
    return xp.maximum(x, 0.0) - size * _tail(size, xp)


def erfc(x: Array) -> Array:
    """Return 1 less the error function of each number, of an array in float32 or float64."""
    xp = library_of(x).xp
    found = 2 * _tail(xp.minimum(xp.abs(x) / _ROOT, _LARGEST), xp)
    return xp.where(x < 0, 2 - found, found)


def _tail(x: Array, xp: Any) -> Array:
    """Return Q(x) of numbers from 0 to `_LARGEST`."""
    return _wide(x * _ROOT, xp) / 2 if x.dtype == xp.float64 else _narrow(x, xp)


def _narrow(x: Array, xp: Any) -> Array:
    found = _polynomial(_NARROW, 1 / (x * 0.3 + 1))
    found *= xp.exp(x * x * -0.5)
    return found


def _wide(x: Array, xp: Any) -> Array:
    """Return erfc(x)."""
    small = xp.clip(x, 0.0, 0.46875)
    near = small * _ratio(_NEAR, small * small)
    middle = xp.clip(x, 0.46875, 4.0)
    far = xp.clip(x, 4.0, _LARGEST)
    inverse = 1 / (far * far)
    tail = (1 / math.sqrt(math.pi) - inverse * _ratio(_FAR, inverse)) / far
    beyond = xp.where(
        x > 4, tail * xp.exp(-far * far), _ratio(_MIDDLE, middle) * xp.exp(-middle * middle)
    )
    found = xp.where(x <= 0.46875, 1 - near, beyond)
    return xp.where(xp.isnan(x), x, found)


def _ratio(polynomials: Polynomials, x: Array) -> Array:
    """Return the ratio of two polynomials, whose coefficients begin with the highest power."""
    numerator, denominator = (_polynomial(coefficients, x) for coefficients in polynomials)
    numerator /= denominator
    return numerator


def _polynomial(coefficients: tuple[float, ...], x: Array) -> Array:
    first, second, *rest = coefficients
    total = x * first
    total += second
    for coefficient in rest:
        # In place where the library can: this halves NumPy's time.
        total *= x
        total += coefficient
    return total
