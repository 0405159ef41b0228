"""Compute the exact GELU by the error function, which the array API standard lacks.

A library's own function is used where its namespace has one, otherwise polynomials for the upper
tail Q(x) = erfc(x / √2) / 2, whose error is a few roundings of Q and of x² however small Q is.
"""

from __future__ import annotations

import math
import sys

from polyattn._base.arrays import Array, library_of

_ROOT = math.sqrt(0.5)
#: From here on Q is 0 in every dtype.
_LARGEST = 40.0

# A rate r, and Q(x) exp(x² / 2) as a polynomial of t = 1 / (1 + r x), from the highest power to t.
# For float32 by least squares, to 2e-7 of it.
_NARROW = 0.3, (
    0.0354238593, -0.1561589154, 0.2045575691, -0.0520346839, 0.1276920944, 0.1001758595,
    0.1207121488, 0.1196320065,
)  # fmt: skip
# For float64 by Chebyshev's polynomials, to 2e-16.
_WIDE = 0.25, (
    -0.0017715164204238016, 0.020156483031405235, -0.10512491027233087, 0.3314854124876158,
    -0.7019421316874268, 1.050156501342202, -1.1430896824664627, 0.9299047476865977,
    -0.5863640251798071, 0.2933871277649596, -0.1105443804908088, 0.03411040777362681,
    -0.013399222724594779, -0.00503931132901408, -0.0032889720552448883, 0.007208957533896182,
    0.023397785403859596, 0.043244838578832524, 0.06350350304551569, 0.08103515080901758,
    0.09350209696786303, 0.09973557010036384, 0.09973557010035816,
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
    return xp.maximum(x, 0.0) - size * _tail(size)


def _tail(x: Array) -> Array:
    """Return Q(x) of numbers from 0 to `_LARGEST`."""
    xp = library_of(x).xp
    rate, (first, *rest) = _WIDE if x.dtype == xp.float64 else _NARROW
    place = 1 / (x * rate + 1)
    total = place * first
    for coefficient in rest:
        # In place where the library can: this halves NumPy's time.
        total += coefficient
        total *= place
    total *= xp.exp(x * x * -0.5)
    return total
