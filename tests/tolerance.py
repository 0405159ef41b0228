"""How wrong a result may be: as wrong as the textbook formula in the same dtype, and no more.

No tolerance is chosen by hand. The unit of error is eps(dtype) times the condition of the
element, sum_j w_ij |v_j|: what a relative error of eps in each weight can do; it stops shrinking
where the dtype's own spacing does. The limit of an element is twice the largest error of the
textbook formula anywhere in the case, plus a floor, and the floor is measured: half a unit, because
any result must be stored, and in float64 the oracle's must be, too; what it does to this element
that any score must be rounded; and the most by which another order of evaluation changes what the
textbook formula gives.
"""

from functools import cache
from typing import NamedTuple

import ml_dtypes
import numpy as np
from oracle import Oracle, lift, oracle, textbook

ORDERS = ("coordinates_in_turn", "keys_reversed", "keys_in_turn", "scale_first", "divide_last")


class Yardstick(NamedTuple):
    """The exact result of one quantity, its unit of error, and the limit in those units."""

    exact: np.ndarray
    unit: np.ndarray
    textbook: float
    floor: np.ndarray

    @property
    def limit(self):
        return 2 * self.textbook + self.floor


def assert_accurate(actual_output, case, actual_lse=None, dtype=None):
    """Hold a result against the limits of its case.

    `dtype` asks for more than the rule of the inputs' dtype: the accuracy of the textbook formula
    evaluated in that wider dtype and rounded once.
    """
    check(actual_output, output_yardstick(case, dtype or case.dtype), f"{case}: output")
    if actual_lse is not None:
        check(actual_lse, logsumexp_yardstick(case), f"{case}: logsumexp")


def check(actual, yard, what):
    """Shape, NaN and infinities as in the exact result, exact zeros exact, errors within limit."""
    actual = lift(actual)
    assert actual.shape == yard.exact.shape, f"{what}: {actual.shape} is not {yard.exact.shape}"
    must_equal = (yard.unit == 0) | ~np.isfinite(yard.exact) | ~np.isfinite(actual)
    same = (actual == yard.exact) | (np.isnan(actual) & np.isnan(yard.exact))
    for at in map(tuple, np.argwhere(must_equal & ~same).tolist()):
        raise AssertionError(f"{what}{list(at)} is {actual[at]}, must be {yard.exact[at]}")
    units = in_units(actual, yard.exact, yard.unit)
    if np.any(units > yard.limit):
        at = np.unravel_index(np.argmax(units - yard.limit), units.shape)
        raise AssertionError(
            f"{what}{list(map(int, at))} is {actual[at]}, exact {yard.exact[at]}: "
            f"error {units[at]:.4g} units, limit {yard.limit[at]:.4g} "
            f"(2 × textbook {yard.textbook:.4g} + floor {yard.floor[at]:.4g})"
        )


@cache
def output_yardstick(case, dtype):
    """The yardstick of the output; `dtype` is that of the textbook's intermediates."""
    output, _, condition, sensitivity, _ = exact(case)
    results = [output for output, _ in evaluations(case, dtype)]
    moved = float(ml_dtypes.finfo(dtype).eps) * sensitivity
    return yardstick(output, condition, moved, results, case.dtype)


@cache
def logsumexp_yardstick(case):
    """The same for logsumexp, in the dtype that it is accumulated and returned in."""
    dtype = accumulation_dtype(case.dtype)
    _, logsumexp, _, _, condition = exact(case)
    results = [logsumexp for _, logsumexp in evaluations(case, dtype)]
    return yardstick(logsumexp, condition, 0, results, dtype)


def yardstick(exact, condition, moved_by_scores, results, dtype):
    info = ml_dtypes.finfo(dtype)
    unit = float(info.eps) * np.maximum(condition, float(info.smallest_normal))
    unit = np.where(condition == 0, 0, unit)
    plain, *others = (lift(np.asarray(x).astype(dtype)) for x in results)
    orders = max(np.max(in_units(x, plain, unit), initial=0) for x in others)
    stored = 0.5 if dtype != "float64" else 1.0
    floor = stored + 0.5 * in_units(moved_by_scores, 0, unit) + orders
    return Yardstick(exact, unit, np.max(in_units(plain, exact, unit), initial=0), floor)


@np.errstate(all="ignore")
def in_units(actual, exact, unit):
    """|actual - exact| in units, and 0 where that is no number."""
    units = np.abs(actual - exact) / unit
    return np.where(np.isfinite(units), units, 0)


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


def accumulation_dtype(dtype):
    return "float64" if dtype == "float64" else "float32"
