"""Differentiate the textbook by differences: by every argument, and in one direction at a time.

This holds for every step of the formula. It is exact to about 12 digits, so that it judges float64
results; `gradients` judges the others, each element by itself.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from typing import Any

import numpy as np

from polyattn._core.call.options import GRADIENT_ARRAYS, GRADIENT_EXPRESSIONS, GRADIENT_NUMBERS
from polyattn._core.call.parts import arrays_in
from polyattn._core.expressions.replacements import ScaleRule
from polyattn.conformance.cases.case import Case, with_arrays
from polyattn.conformance.reference.gradients import cotangent
from polyattn.conformance.reference.oracle import Array, factor_of
from polyattn.conformance.reference.textbook import textbook
from polyattn.conformance.reference.tolerance import accumulation_dtype

#: How exact the differences are, with a margin: relative to the sum of what is compared.
TOLERANCE = 1e-9

#: Errors in its fourth power and of rounding are below 1e-12, even if longdouble is float64. It is
#: small, since a distance or sparsemax is not smooth at some points.
STEP = 2.0**-17


def logsumexp_cotangent(case: Case) -> Array:
    """Return the gradient of the loss by the logsumexp."""
    rng = np.random.default_rng(zlib.crc32(f"{case.name} logsumexp".encode()))
    drawn = rng.normal(size=cotangent(case).shape[:-1])
    result: Array = drawn.astype(accumulation_dtype(case.dtype))
    return result


def arguments(case: Case) -> dict[str, Any]:
    """Return all arguments of a case by name, with the scale as a number unless a rule gives it."""
    arrays, options = case.arguments(poisoned=False)
    named = dict(zip(("query", "key", "value"), arrays, strict=True)) | options
    if not isinstance(options.get("scale"), ScaleRule):
        named["scale"] = factor_of(options.get("scale"), options.get("similarity"), case.D, case.S)
    return named


@cache
def direction(case: Case) -> Mapping[str, list[Array]]:
    """Return a direction for each argument that has a gradient, as a list of arrays."""
    rng = np.random.default_rng(zlib.crc32(f"{case.name} direction".encode()))
    along = {}
    for name, argument in arguments(case).items():
        if name in GRADIENT_NUMBERS and not isinstance(argument, ScaleRule):
            along[name] = [np.ones(())]
        elif name in (*GRADIENT_ARRAYS, *GRADIENT_EXPRESSIONS) and arrays_in(argument):
            arrays = arrays_in(argument)
            along[name] = [rng.normal(size=x.shape).astype(x.dtype) for x in arrays]
    return along


@cache
def slopes(case: Case) -> Mapping[str, float]:
    """Return the derivative of the loss in the direction of each argument.

    The loss is the sum of the results times `cotangent` and `logsumexp_cotangent`; a logsumexp of
    -inf, of a row without keys, is left out.
    """
    cotangents = cotangent(case), logsumexp_cotangent(case)

    def loss_at(name: str, step: float) -> Any:
        return sum(
            np.sum(np.where(np.isfinite(x), x, 0) * g)
            for x, g in zip(at(case, step, (name,)), cotangents, strict=True)
        )

    return {name: float(np.asarray(derivative(partial(loss_at, name)))) for name in direction(case)}


@cache
def tangent(case: Case) -> Array:
    """Return the derivative of the output, in the direction of all arrays at once."""
    result: Array = derivative(lambda step: at(case, step, GRADIENT_ARRAYS)[0])
    return result


def _shifted(step: float, rest: Iterator[Any], x: Any) -> Any:
    return x.astype(np.longdouble) + step * next(rest)


def at(case: Case, step: float, names: tuple[str, ...]) -> tuple[Array, Array]:
    """Return the textbook's results with some arguments shifted in their directions."""
    shifted = arguments(case)
    for name, along in direction(case).items():
        rest: Iterator[Any] = iter(along if name in names else [0] * len(along))
        if name in GRADIENT_NUMBERS:
            shifted[name] = shifted[name] + step * float(next(rest))
        else:
            shifted[name] = with_arrays(shifted[name], partial(_shifted, step, rest))
    with np.errstate(all="ignore"):
        results: tuple[Array, Array] = textbook(**shifted)
    return results


def derivative(function: Callable[[float], Any]) -> Any:
    """Return the derivative at 0 by central differences, whose errors in step² cancel."""
    near, far = (function(n * STEP) - function(-n * STEP) for n in (1, 2))
    return (8 * near - far) / (12 * STEP)
