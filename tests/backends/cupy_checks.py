"""What CuPy's kernels are held to beside the suite, on the host or a GPU: the formula."""

from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from polyattn import Gradients, Partial, attention_backward, attention_partial


class Place(NamedTuple):
    """Where a kernel runs, and how arrays come there and back."""

    backend: str | None = "host"
    to: Callable[[Any], Any] = np.asarray
    back: Callable[[Any], Any] = np.asarray
    unit: float = 0.0  # errors of this size are the device's

    def options(self, kernel, options):
        there = {n: self.to(x) if isinstance(x, np.ndarray) else x for n, x in options.items()}
        return {"backend": self.backend, "kernel": kernel, **there}


HOST = Place()


def agree(kernel, *arrays, place=HOST, **options):
    """Hold output and logsumexp of a kernel against the formula, and return them."""
    given = place.options(kernel, options)
    mine = attention_partial(*map(place.to, arrays), **given)
    formula = attention_partial(*map(_wide, arrays), kernel="dense", **options)
    eps, real = _units(arrays)
    units = eps, max(eps / 128, float(np.finfo(real).eps), place.unit)
    for one, other, unit in zip(mine, formula, units, strict=True):
        one = place.back(one).astype("float64")
        np.testing.assert_allclose(one, other, rtol=8 * unit, atol=8 * unit)
    return mine


def gradients_agree(kernel, *arrays, logsumexp=True, place=HOST, **options):
    """Hold the gradients of a kernel against those of the formula, and return them."""
    formula = attention_partial(*map(_wide, arrays), kernel="dense", **options)
    (eps, real), dtype, rng = _units(arrays), arrays[0].dtype, np.random.default_rng(1)
    along = rng.standard_normal(formula.output.shape).astype(dtype)
    rows = rng.standard_normal(formula.logsumexp.shape).astype(real) if logsumexp else None
    partial = Partial(
        place.to(formula.output.astype(dtype)), place.to(formula.logsumexp.astype(real))
    )
    mine = attention_backward(
        *map(place.to, arrays), partial, place.to(along), into=Gradients(),
        logsumexp_gradient=None if rows is None else place.to(rows),
        **place.options(kernel, options),
    )  # fmt: skip
    expected = attention_backward(
        *map(_wide, arrays), formula, _wide(along), kernel="dense", **options,
        logsumexp_gradient=None if rows is None else _wide(rows),
    )  # fmt: skip
    for name, one, other in zip(Gradients._fields, mine, expected, strict=True):
        assert (one is None) == (other is None), name
        if one is None:
            continue
        one = place.back(one)
        assert (one.dtype, one.shape) == (real, np.shape(other)), name
        # The gradient of the scale is a sum over all scores, of which most cancel out.
        terms = _wide(arrays[0]) * place.back(mine.query) if name == "scale" else None
        size = np.abs(other).max(initial=0) if terms is None else np.abs(terms).sum()
        # That of the softcap is such a sum too, of terms that nobody returns.
        size = 2 * size if name == "softcap" else size
        atol = (4 if dtype.itemsize == 2 else 32) * max(eps, place.unit) * max(1, size)
        np.testing.assert_allclose(one, other, rtol=0, atol=atol, err_msg=name)
    return mine


def _wide(array):
    return array.astype("float64")


def _units(arrays):
    """Return the unit of rounding, and the dtype of sums."""
    dtype = arrays[0].dtype
    real = "float64" if dtype == "float64" else "float32"
    return float(ml_dtypes.finfo(dtype).eps), real
