"""Compute the error function, which the array API standard lacks, and Φ for the exact GELU.

A library's own function is used where its namespace has one, otherwise rational functions with an
error of a few roundings in float32 and float64.

References
----------
.. [1] Cody, "Rational Chebyshev Approximations for the Error Function", 1969.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

from polyattn.arrays import Array, Library, cast, library_of

__all__ = ["erf", "normal_cdf"]

Polynomials = tuple[tuple[float, ...], ...]

# For float32, a function of x² to be multiplied by x, as in Eigen and XLA.
_NARROW = (
    (-2.72614225801306e-10, 2.77068142495902e-08, -2.10102402082508e-06, -5.69250639462346e-05,
     -7.34990630326855e-04, -2.95459980854025e-03, -1.60960333262415e-02),
    (-1.45660718464996e-05, -2.13374055278905e-04, -1.68282697438203e-03, -7.37332916720468e-03,
     -1.42647390514189e-02),
)  # fmt: skip
# The same for Φ − ½, with both constant factors, 1/√2 and ½, in the coefficients.
_NARROW_CDF = tuple(
    tuple(
        coefficient * factor / 2**power
        for power, coefficient in zip(reversed(range(len(function))), function, strict=True)
    )
    for function, factor in zip(_NARROW, (0.5 / math.sqrt(2), 1.0), strict=True)
)
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


def erf(x: Array) -> Array:
    """Return the error function of each number, in the dtype of `x`."""
    library = library_of(x)
    xp = library.xp
    own = _own_erf(library)
    if own is not None:
        return own(x)
    if x.dtype == xp.float64:
        return _wide(x, xp)
    return cast(xp, _narrow(_NARROW, 4.0, cast(xp, x, xp.float32), xp), x.dtype)


def normal_cdf(x: Array) -> Array:
    """Return Φ(x) = (1 + erf(x / √2)) / 2 of each number, in the dtype of `x`."""
    library = library_of(x)
    xp = library.xp
    if x.dtype == xp.float64 or _own_erf(library) is not None:
        return (erf(x / math.sqrt(2)) + 1) / 2
    # NumPy takes a third less time for it than for erf and the steps around it.
    result = _narrow(_NARROW_CDF, 4.0 * math.sqrt(2), cast(xp, x, xp.float32), xp)
    result += 0.5
    # Far below 0 it is −6e-8, which a large x would multiply.
    return cast(xp, xp.maximum(result, 0.0), x.dtype)


def _own_erf(library: Library) -> Callable[[Array], Array] | None:
    # If an array of JAX exists, JAX has been imported.
    functions = sys.modules["jax"].lax if library.name == "jax" else library.xp
    return getattr(functions, "erf", None)


def _narrow(functions: Polynomials, bound: float, x: Array, xp: Any) -> Array:
    x = xp.minimum(xp.maximum(x, -bound), bound)
    result = _ratio(functions, x * x)
    result *= x
    return result


def _wide(x: Array, xp: Any) -> Array:
    size = xp.abs(x)
    small = xp.clip(size, 0.0, 0.46875)
    near = small * _ratio(_NEAR, small * small)
    middle = xp.clip(size, 0.46875, 4.0)
    # Beyond 6 the complement is less than half a rounding of 1.
    far = xp.clip(size, 4.0, 6.0)
    inverse = 1 / (far * far)
    tail = (1 / math.sqrt(math.pi) - inverse * _ratio(_FAR, inverse)) / far
    beyond = xp.where(
        size > 4, tail * xp.exp(-far * far), _ratio(_MIDDLE, middle) * xp.exp(-middle * middle)
    )
    result = xp.where(size <= 0.46875, near, 1 - beyond)
    result = xp.where(x < 0, -result, result)
    return xp.where(xp.isnan(x), x, result)


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
