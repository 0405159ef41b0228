"""How wrong a result may be: as wrong as the textbook formula in the same dtype, and no more.

No tolerance is chosen by hand. The unit of error is eps(dtype) times the condition of the
element, sum_j w_ij |v_j|: what a relative error of eps in each weight can do; it stops shrinking
where the dtype's own spacing does. The limit of a case is twice the largest error of the textbook
formula plus a floor, and the floor is measured: half a unit, because any result must be stored,
and the most by which another order of evaluation changes what the textbook formula gives.
"""

from functools import cache
from typing import NamedTuple

import ml_dtypes
import numpy as np
from oracle import Oracle, lift, oracle, textbook

ORDERS = ("keys_reversed", "keys_in_turn", "scale_first", "divide_last")


class Yardstick(NamedTuple):
    """The exact result of one quantity, its unit of error, and the limit in those units."""

    exact: np.ndarray
    unit: np.ndarray
    textbook: float
    floor: float

    @property
    def limit(self):
        return 2 * self.textbook + self.floor


@cache
def exact(case) -> Oracle:
    arrays, options = case.arguments()
    return oracle(*arrays, **options)


@cache
def evaluations(case, dtype):
    """What the textbook formula gives in a dtype, in the plain order and in the others.

    The poison is left out: the formula cannot bear it, and it moves no exact result but to NaN.
    """
    arrays, options = case.arguments(poisoned=False)
    arrays = [x.astype(dtype) for x in arrays]
    orders = ({}, *({order: True} for order in ORDERS))
    with np.errstate(all="ignore"):
        return [textbook(*arrays, **options, **order) for order in orders]


def output_yardstick(case, dtype=None):
    """The yardstick of the output; `dtype` is that of the textbook's intermediates."""
    results = [output for output, _ in evaluations(case, np.dtype(dtype or case.dtype))]
    return yardstick(exact(case).output, exact(case).condition, results, case.dtype)


def logsumexp_yardstick(case):
    """The same for logsumexp, whose dtype is that of the accumulation."""
    dtype = accumulation_dtype(case.dtype)
    results = [logsumexp for _, logsumexp in evaluations(case, dtype)]
    return yardstick(exact(case).logsumexp, exact(case).logsumexp_condition, results, dtype)


def accumulation_dtype(dtype):
    return np.dtype("float64" if dtype == "float64" else "float32")


def yardstick(exact, condition, results, dtype):
    info = ml_dtypes.finfo(dtype)
    unit = float(info.eps) * np.maximum(condition, float(info.smallest_normal))
    unit = np.where(condition == 0, 0, unit)
    plain, *others = (lift(np.asarray(x).astype(dtype)) for x in results)
    floor = 0.5 + max(worst(x, plain, unit)[0] for x in others)
    return Yardstick(exact, unit, worst(plain, exact, unit)[0], floor)


def worst(actual, exact, unit):
    """The largest error in units and where it is, of the elements that have a finite error."""
    with np.errstate(all="ignore"):
        units = np.abs(actual - exact) / unit
    units = np.where(np.isfinite(units), units, 0)
    if not units.size:
        return 0.0, ()
    at = np.unravel_index(np.argmax(units), units.shape)
    return float(units[at]), tuple(map(int, at))


def assert_accurate(actual_output, case, actual_lse=None, dtype=None):
    """Hold a result against the limits of its case.

    `dtype` asks for more than the rule of the inputs' dtype: the accuracy of the textbook formula
    evaluated in that wider dtype and rounded once.
    """
    check(actual_output, output_yardstick(case, dtype), f"{case.name}: output")
    if actual_lse is not None:
        check(actual_lse, logsumexp_yardstick(case), f"{case.name}: logsumexp")


def check(actual, yard, what):
    """Shape, NaN and infinities as in the exact result, exact zeros exact, errors within limit."""
    actual = lift(actual)
    assert actual.shape == yard.exact.shape, f"{what}: {actual.shape} is not {yard.exact.shape}"
    must_equal = (yard.unit == 0) | ~np.isfinite(yard.exact) | ~np.isfinite(actual)
    same = (actual == yard.exact) | (np.isnan(actual) & np.isnan(yard.exact))
    for at in np.argwhere(must_equal & ~same)[:1]:
        at = tuple(map(int, at))
        raise AssertionError(f"{what}{list(at)} is {actual[at]}, must be {yard.exact[at]}")
    units, at = worst(actual, yard.exact, yard.unit)
    assert units <= yard.limit, (
        f"{what}{list(at)} is {actual[at]!r}, exact {yard.exact[at]!r}: error {units:.4g} units, "
        f"limit {yard.limit:.4g} (2 × textbook {yard.textbook:.4g} + floor {yard.floor:.4g})"
    )
