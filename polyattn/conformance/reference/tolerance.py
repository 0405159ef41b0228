"""Measure the error of a result against the limit that the textbook formula sets.

For 16-bit inputs the semantics require scores, softmax and sums in float32, so the textbook also
computes in float32 and rounds its result once.

No tolerance is chosen by hand. The unit of error is eps(dtype) times the condition of the
element, sum_j w_ij |v_j|: the effect of a relative error of eps in each weight. It is at least the
spacing of the dtype near 0. The limit of an element is twice the largest error of the textbook
formula in the case, plus a measured floor. The floor is the sum of half a unit for storing the
result, the error of storing the oracle's result, the effect of rounding the scores on this element,
and the largest change of the textbook's result in another order of evaluation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from polyattn.conformance.cases.case import Case, finfo
from polyattn.conformance.reference.oracle import Array, Oracle, lift, oracle
from polyattn.conformance.reference.textbook import ORDERS, textbook

#: The oracle uses more digits for a float64 case with at most this many products.
MOST_PRODUCTS = 40_000


class Yardstick(NamedTuple):
    """The exact result of one quantity, its unit of error, and the limit in those units."""

    exact: Array
    unit: Array
    textbook: float
    floor: Array
    or_nan: Any = False  # where NaN is accepted
    rows: tuple[int, ...] | None = None  # the query rows of `exact`; None for all
    length: int = 0  # L
    axis: int = -1  # the axis of the query rows
    times: int = 1  # how many times the limit is allowed

    @property
    def limit(self) -> Array:
        """The limit of the error of each element, in units."""
        limit: Array = self.times * (2 * self.textbook + self.floor)
        return limit

    @property
    def allowed(self) -> Array:
        """The largest error of each element; 0 where a result must be exact or is not finite."""
        is_finite = np.isfinite(self.exact) & np.isfinite(self.unit)
        return np.where(is_finite, self.limit, 0) * np.where(is_finite, self.unit, 0)

    def of(self, result: Array) -> Array:
        """Return the rows of a result to check; all of it if its length is wrong."""
        if self.rows is None or result.shape[self.axis :][:1] != (self.length,):
            return result
        return np.take(result, self.rows, self.axis)


class Deviation(NamedTuple):
    """The distance of a result from the exact one.

    Attributes
    ----------
    units : float
        The largest error of an element, in units of eps · Σ w|v|; infinite if an element must be
        exact and is not.
    share : float
        The largest error of an element as a share of its limit.
    fault : str or None
        A description of the worst element beyond its limit; None if there is none.
    """

    units: float
    share: float
    fault: str | None


def assert_accurate(actual_output: Any, case: Case, actual_lse: Any = None) -> None:
    """Check a result against the limits of its case.

    Parameters
    ----------
    actual_output : array_like
        The output.
    case : Case
        The call.
    actual_lse : array_like, optional
        The logsumexp.

    Raises
    ------
    AssertionError
        If the error of an element exceeds its limit.
    """
    yards = {"output": (actual_output, output_yardstick(case))}
    if actual_lse is not None:
        yards["logsumexp"] = (actual_lse, logsumexp_yardstick(case))
    for what, (actual, yard) in yards.items():
        fault = deviation(actual, yard, f"{case}: {what}").fault
        if fault is not None:
            raise AssertionError(fault)


@np.errstate(invalid="ignore")
def deviation(actual: Any, yard: Yardstick, what: str) -> Deviation:
    """Compare a result with the exact one: shape, NaN, infinities, zeros and errors.

    Parameters
    ----------
    actual : array_like
        A result.
    yard : Yardstick
        The exact result, the unit and the limit.
    what : str
        The name of the result in a fault.

    Returns
    -------
    Deviation
        The error, and a fault if it exceeds a limit.
    """
    actual = yard.of(lift(actual))
    if actual.shape != yard.exact.shape:
        return Deviation(math.inf, math.inf, f"{what}: {actual.shape} is not {yard.exact.shape}")
    must_equal = (yard.unit == 0) | ~np.isfinite(yard.exact + yard.unit + actual)
    same = (actual == yard.exact) | (np.isnan(actual) & (np.isnan(yard.exact) | yard.or_nan))
    for index in np.argwhere(must_equal & ~same).tolist():
        at = tuple(index)
        fault = f"{what}{index} is {actual[at]:.6g}, must be {yard.exact[at]:.6g}"
        return Deviation(math.inf, math.inf, fault)
    units = in_units(actual, yard.exact, yard.unit)
    shares = units / yard.limit
    worst, share = (float(np.max(x, initial=0)) for x in (units, shares))
    if share <= 1:
        return Deviation(worst, share, None)
    at = tuple(map(int, np.unravel_index(np.argmax(shares), shares.shape)))
    parts = f"2 × textbook {yard.textbook:.4g} + floor {yard.floor[at]:.4g}"
    parts = parts if yard.times == 1 else f"{yard.times} × ({parts})"
    found = f"{what}{list(at)} is {actual[at]:.6g}, exact {yard.exact[at]:.6g}"
    error = f"error {units[at]:.4g} units, limit {yard.limit[at]:.4g} ({parts})"
    return Deviation(worst, share, f"{found}: {error}")


@cache
def output_yardstick(case: Case, dtype: str | None = None) -> Yardstick:
    """Return the yardstick of the output; `dtype` overrides the dtype of the textbook."""
    dtype = dtype or accumulation_dtype(case.dtype)
    output, _, condition, sensitivity, _ = exact(case)
    results = [output for output, _ in evaluations(case, dtype)]
    by_scores = float(finfo(dtype).eps) * sensitivity
    # A visible infinity gives infinity, or NaN if its weight underflows to 0.
    infinite = np.isinf(output)
    yard = yardstick(output, condition, by_scores, results, case.dtype)
    axis = -3 if case.layout == "...LHD" else -2
    return yard._replace(or_nan=infinite, rows=case.rows, length=case.L, axis=axis)


@cache
def logsumexp_yardstick(case: Case, dtype: str | None = None) -> Yardstick:
    """Return the yardstick of the logsumexp, in the dtype of its accumulation or another."""
    dtype = dtype or accumulation_dtype(case.dtype)
    _, logsumexp, _, _, condition = exact(case)
    results = [logsumexp for _, logsumexp in evaluations(case, dtype)]
    yard = yardstick(logsumexp, condition, 0, results, dtype)
    axis = -2 if case.layout == "...LHD" else -1
    return yard._replace(rows=case.rows, length=case.L, axis=axis)


def yardstick(
    exact: Array,
    condition: Array,
    by_scores: Any,
    results: Sequence[Any],
    dtype: str,
    stored: str | None = None,
) -> Yardstick:
    """Return a yardstick from the exact result and the textbook's, in its plain order first.

    With `stored`, errors are those of sums in `dtype` and of one rounding to `stored`: half a step
    of the result, and not of the unit, which may be far above it.
    """
    info = finfo(dtype)
    unit = np.maximum(float(info.eps) * condition, spacing(dtype))
    unit = np.where(condition == 0, 0, unit)
    plain, *others = (lift(np.asarray(x).astype(dtype)) for x in results)
    orders = max(np.max(in_units(x, plain, unit), initial=0) for x in others)
    storing: Any = 0.5 + 0.5 * float(np.finfo(exact.dtype).eps / info.eps)
    if stored is not None:
        step = np.maximum(float(finfo(stored).eps) * np.abs(exact), spacing(stored))
        # The result that is rounded has an error before, and so a step that is a little larger.
        storing = in_units(0.51 * step, 0, unit)
    floor = storing + 0.5 * in_units(by_scores, 0, unit) + orders
    return Yardstick(exact, unit, np.max(in_units(plain, exact, unit), initial=0), floor)


def spacing(dtype: str) -> float:
    """Return the distance of numbers near 0: the smallest unit of error."""
    info = finfo(dtype)
    # Subnormals count only in float16: in other dtypes XLA, CUDA's fast exp and bfloat16 products
    # of processors treat them as 0.
    step = float(info.eps) if dtype == "float16" else 1.0
    return step * float(info.smallest_normal)


@np.errstate(all="ignore")
def in_units(actual: Any, exact: Any, unit: Array) -> Array:
    """Return |actual - exact| in units, and 0 where that is not finite."""
    units = np.abs(actual - exact) / unit
    return np.where(np.isfinite(units), units, 0)


@cache
def exact(case: Case) -> Oracle:
    """Return the oracle's results of a case."""
    arrays, options = case.arguments()
    extended = wants_extended(case, options)
    return oracle(*arrays, **options, rows=case.rows, extended=extended)


def wants_extended(case: Case, options: dict[str, Any]) -> bool:
    """Return whether a case needs and supports an oracle with more digits than float64."""
    is_supported = case.poison is None and options.get("score_mod") is None
    is_small = math.prod(case.score_shape) * (case.D + 1) <= MOST_PRODUCTS
    return case.dtype == "float64" and is_supported and is_small


@cache
def evaluations(case: Case, dtype: str) -> list[tuple[Any, Any]]:
    """Return the textbook's results in a dtype, in the plain order first and then the others.

    They are without poison, which the formula does not support.
    """
    arrays, options = case.arguments(poisoned=False)
    cast = [x.astype(dtype) for x in arrays]
    orders: list[dict[str, Any]] = [{}, *(dict.fromkeys(order, True) for order in ORDERS)]
    with np.errstate(all="ignore"):
        return [textbook(*cast, **(options | order), rows=case.rows) for order in orders]


def accumulation_dtype(dtype: str) -> str:
    """Return the dtype of scores, sums and logsumexp for inputs of `dtype`."""
    return "float64" if dtype == "float64" else "float32"
