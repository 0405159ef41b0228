"""Compute the limits for the error of gradients, from the textbook's in the same dtype.

The gradients are of sum(output · cotangent), by the formula and without autograd. In
`numpy.longdouble` they are the exact result; in the accumulator's dtype, rounded once, they are the
textbook's, whose error is the yardstick as in `tolerance`. The unit is eps(dtype) times the
condition of the element: the same formula of absolute values, with the effect of errors in the
scores on each weight. `differences` has the gradients that this formula leaves out.
"""

# ruff: noqa: N806 -- the letters are those of the semantics

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from polyattn._core.expressions.scores import Chain, Softcap
from polyattn.conformance.cases.case import Case
from polyattn.conformance.reference.expressions import CallRows, plainly
from polyattn.conformance.reference.oracle import Array, as_called, factor_of, heads_first, lift
from polyattn.conformance.reference.philox import keep_mask
from polyattn.conformance.reference.textbook import hidden_keys, product_of
from polyattn.conformance.reference.tolerance import Yardstick, accumulation_dtype, yardstick

#: The features that `gradients` leaves out.
LEFT_OUT = frozenset({"normalizer", "score_norm", "similarity"})


class Order(NamedTuple):
    """Choices of the order of evaluation: they change only the rounding."""

    reversed_sums: bool = False
    sums_in_turn: bool = False
    scale_first: bool = False
    divide_last: bool = False
    delta_of_output: bool = False
    through_maxima: bool = False

    def product(self, a: Array, b: Array) -> Array:
        """Return the matrix product, summed in this order."""
        if self.reversed_sums:
            a, b = a[..., ::-1], b[..., ::-1, :]
        result: Array = product_of(a, b, self.sums_in_turn)
        return result


#: The options of `gradients` that change only the order of evaluation.
ORDERS = Order._fields


class Steps(NamedTuple):
    """The factors of the gradients, heads first, with keys repeated for each query head.

    A sink is an additional last key, with key and value 0.
    """

    query: Array
    key: Array
    value: Array
    cotangent: Array
    scale: Any
    weights: Array  # times `total`
    total: Array
    kept: Array  # what dropout multiplies a weight by
    slope: Array  # the derivative of the score by scale · q·k
    condition: Array  # of the score: the c_ij of `Oracle`
    bend: Array  # the condition of the slope


def cotangent(case: Case) -> Array:
    """Return the gradient of the loss by the output."""
    rng = np.random.default_rng(zlib.crc32(f"{case.name} cotangent".encode()))
    drawn = rng.normal(size=(*case.score_shape[:-1], case.value_size)).astype(case.dtype)
    return np.swapaxes(drawn, -3, -2).copy() if case.layout == "...LHD" else drawn


def has_formula(case: Case) -> bool:
    """Return whether `gradients` supports a case."""
    return not case.features & LEFT_OUT


@np.errstate(all="ignore")
def gradients(case: Case, dtype: Any, **order: bool) -> dict[str, Array]:
    """Differentiate sum(output · cotangent) by the formula, with all intermediates in a dtype.

    The result has the gradients by query, key, value, and bias and sinks if there are any. Poison
    is left out.
    """
    how = Order(**order)
    x = steps(case, np.dtype(dtype), how)
    products = how.product(x.cotangent, x.value.mT) * x.kept
    if how.delta_of_output or how.through_maxima:
        output = how.product(x.weights * x.kept, x.value) / x.total
        delta = row_sums(how, x.cotangent * output)
    else:
        delta = row_sums(how, x.weights * products) / x.total
    logits = x.weights * (products - delta)
    if how.through_maxima:
        half = logits.shape[-1] // 2
        halves = (np.s_[..., :half], np.s_[..., half:])
        logits = logits + np.concatenate([residue(x, logits, delta, at) for at in halves], axis=-1)
    return summed(case, x, (x.weights * x.kept, logits, logits * x.slope), how)


@np.errstate(all="ignore")
def conditions(case: Case) -> dict[str, Array]:
    """Return the effect of relative errors of 1 in each step on the gradients."""
    how = Order()
    x = steps(case, np.dtype(np.longdouble), how)
    # A weight depends on its own score, and on all scores of the row by the denominator.
    spread = x.weights * (1 + x.condition)
    errors = spread + x.weights * row_sums(how, spread)
    # An error of a weight is multiplied by the difference of a product from the mean of its row:
    # what the products have in common cancels exactly. Their own rounding errors do not.
    products = x.cotangent @ x.value.mT * x.kept
    from_mean = np.abs(products - row_sums(how, x.weights * products))
    sizes = np.abs(x.cotangent) @ np.abs(x.value.mT) * x.kept
    sizes = sizes + row_sums(how, x.weights * sizes)
    logits = errors * from_mean + x.weights * (row_sums(how, spread * from_mean) + sizes)
    scores = logits * np.abs(x.slope) + x.weights * from_mean * x.bend
    factors = ("query", "key", "cotangent", "scale")
    x = x._replace(**{name: np.abs(getattr(x, name)) for name in factors})
    return summed(case, x, (errors * x.kept, logits, scores), how)


def residue(x: Steps, logits: Array, delta: Array, keys: Any) -> Array:
    """Return the gradient by the maximum that is subtracted from the scores of some keys.

    It is 0 except for rounding, which goes to the key with the maximum. Automatic differentiation
    has this term once for a plain softmax, and for each tile of an online softmax.
    """
    how, weights = Order(), x.weights[keys]
    output = how.product(weights * x.kept[keys], x.value.mT[keys].mT)
    undivided = row_sums(how, x.cotangent * output) - delta * row_sums(how, weights)
    highest = weights == np.max(weights, axis=-1, keepdims=True, initial=0)
    ties = row_sums(how, highest.astype(weights.dtype))
    return np.where(highest, (undivided - row_sums(how, logits[keys])) / ties, 0)


def steps(case: Case, dtype: Any, how: Order) -> Steps:
    """Evaluate the formula up to the weights."""
    arrays, options = case.arguments(poisoned=False)

    def rounded(x: Any) -> Any:
        return np.asarray(x).astype(dtype)

    q, k, v, g = (heads_first(rounded(x), case.layout) for x in (*arrays, cotangent(case)))
    (H, L, D), (G, S) = q.shape[-3:], k.shape[-3:-1]
    k, v = (np.repeat(x, H // G, axis=-3) for x in (k, v))
    batch = g.shape[:-3]
    ends = np.asarray(options.get("key_lengths", S))
    offset = options.get("query_offset", ends - L)
    rows = CallRows(batch, (H, L, S), offset)
    mask, _ = plainly(options.get("mask"), None, rows)
    b = np.arange(math.prod(batch)).reshape(*batch, 1, 1, 1)
    h, i, j = (np.arange(n).reshape(at) for n, at in ((H, (-1, 1, 1)), (L, (-1, 1)), (S, (-1,))))

    scale = rounded(
        factor_of(options.get("scale"), None, D, S, lambda n: np.sqrt(np.longdouble(n)))
    )
    s = how.product(q * scale, k.mT) if how.scale_first else how.product(q, k.mT) * scale
    c = np.abs(q) @ np.abs(k.mT) * np.abs(scale)
    slope, bend = np.ones_like(s), np.zeros_like(s)
    for part in score_steps(options):
        _, mod = plainly(None, part, rows)
        own, change = _slope(part, mod, s, c, (b, h, i, j))
        slope, bend = slope * own, bend * np.abs(own) + np.abs(slope) * change
        s = rounded(mod(s, b, h, i, j))
        c = c * np.abs(own) + np.abs(s)
    if "bias" in options:
        bias = rounded(options["bias"])
        s, c = s + bias, c + np.abs(bias)

    band = options.get("is_causal"), options.get("window")
    hidden = hidden_keys(mask, *band, offset, ends, (b, h, i, j)) | np.isneginf(s)
    s, c, slope, bend = (
        np.where(hidden, rounded(x), np.broadcast_to(y, (*batch, H, L, S)))
        for x, y in ((-np.inf, s), (0, c), (0, slope), (0, bend))
    )
    rate, seed, *start = options.get("dropout", (0, 0))
    kept = np.ones_like(s)
    if rate:
        kept = keep_mask(rate, int(seed), batch, (H, L, S), None, *start) / rounded(1 - rate)
    if "sinks" in options:
        sink = rounded(options["sinks"])[:, None]
        at_sink = (sink, np.where(np.isneginf(sink), rounded(0), np.abs(sink)), 0, 0, 1)
        s, c, slope, bend, kept = (
            np.append(x, np.broadcast_to(rounded(y)[..., None], (*batch, H, L, 1)), -1)
            for x, y in zip((s, c, slope, bend, kept), at_sink, strict=True)
        )
        k, v = (np.append(x, np.zeros((*x.shape[:-2], 1, x.shape[-1]), dtype), -2) for x in (k, v))

    highest = np.max(s, axis=-1, keepdims=True, initial=-np.inf)
    weights = np.exp(s - np.where(np.isneginf(highest), rounded(0), highest))
    total = row_sums(how, weights)
    total = np.where(total == 0, rounded(1), total)
    if how.divide_last:
        g = g / total
    else:
        weights, total = weights / total, np.ones_like(total)
    return Steps(q, k, v, g, scale, weights, total, kept, slope, c, bend)


def _slope(part: Any, mod: Any, s: Any, c: Any, indices: tuple[Any, ...]) -> tuple[Any, Any]:
    """Return the slope of a step at scores `s` of condition `c`, and how much it moves."""
    if isinstance(part, Softcap):
        # The slope is usually computed from the result, with cancellation where it is near 1.
        cap = s.dtype.type(part.cap)
        t = np.tanh(s / cap)
        own = 1 - t * t
        return own, 1 + t * t + 2 * np.abs(t) * own * c / cap
    own = derivative(mod, s, *indices)
    nearby = np.sqrt(np.finfo(s.dtype).eps)
    return own, np.abs(own) + np.abs(derivative(mod, s + nearby * c, *indices) - own) / nearby


def score_steps(options: dict[str, Any]) -> list[Any]:
    """Return the steps that change the scores before the bias, as `plainly` takes them."""
    parts = [Softcap(options["softcap"])] if "softcap" in options else []
    mod = options.get("score_mod", Chain(()))
    return [*parts, *(mod.parts if isinstance(mod, Chain) else [mod])]


def derivative(mod: Callable[..., Any], s: Array, *indices: Any) -> Array:
    """Return the derivative of a score function by the score, by a complex step.

    No difference is computed, so nothing cancels: it is as exact as the function itself.
    """
    # Small enough to change no score, large enough that its square does not underflow.
    step = np.sqrt(np.finfo(s.dtype).smallest_normal)
    result: Array = (np.imag(mod(s + 1j * step, *indices)) / step).astype(s.dtype)
    return result


def row_sums(how: Order, x: Array) -> Array:
    """Return the sums over the last axis, keeping the axis."""
    return how.product(x, np.ones_like(x, shape=(x.shape[-1], 1)))


def summed(case: Case, x: Steps, terms: tuple[Array, Array, Array], how: Order) -> dict[str, Array]:
    """Return the gradients, each summed to its argument's shape, from those of three terms.

    They are the weights, the logits and scale · q·k.
    """
    arrays, options = case.arguments(poisoned=False)
    before, after = (x.scale, 1) if how.scale_first else (1, x.scale)
    (weights, logits, scores), S = terms, case.S
    scores = scores * before
    gradients = {
        "query": how.product(scores, x.key) * after,
        "key": (how.product(scores.mT, x.query) * after)[..., :S, :],
        "value": how.product(weights.mT, x.cotangent)[..., :S, :],
    }
    for (name, gradient), array in zip(gradients.items(), arrays, strict=True):
        like = heads_first(array, case.layout)
        *batch, heads, rows, size = gradient.shape
        G = like.shape[-3]
        groups = gradient.reshape(*batch, G, heads // G, rows, size)
        whole = sum_to(like.shape, groups.sum(axis=-3))
        gradients[name] = as_called(whole, array.ndim, case.layout)
    if "bias" in options:
        gradients["bias"] = sum_to(options["bias"].shape, logits[..., :S])
    if "sinks" in options:
        gradients["sinks"] = sum_to(options["sinks"].shape, logits[..., S].sum(axis=-1))
    return gradients


def sum_to(shape: Sequence[int], x: Array) -> Array:
    """Sum over the axes along which an array of this shape was broadcast."""
    x = x.sum(axis=tuple(range(x.ndim - len(shape))))
    broadcast = tuple(n for n, length in enumerate(shape) if length == 1)
    return np.asarray(x.sum(axis=broadcast, keepdims=True))


@cache
def exact_and_conditions(case: Case) -> tuple[dict[str, Array], dict[str, Array]]:
    """Return the exact gradients and their conditions."""
    return gradients(case, np.longdouble), conditions(case)


@cache
def evaluations(case: Case) -> list[dict[str, Array]]:
    """Return the textbook's gradients, in the plain order first and then the others."""
    dtype = accumulation_dtype(case.dtype)
    return [gradients(case, dtype, **order) for order in [{}, *({o: True} for o in ORDERS)]]


@cache
def gradient_yardsticks(case: Case) -> dict[str, Yardstick]:
    """Return the yardsticks of the gradients of a case, by argument.

    If `numpy.longdouble` is no wider than the dtype of the case, the measured error of the textbook
    is 0, and only the other orders of evaluation set the limit. A case that checks a sample of its
    rows has the gradients of the query only.
    """
    (right, condition), results = exact_and_conditions(case), evaluations(case)
    dtype, stored = case.dtype, None
    if case.rounded_once:
        dtype, stored = accumulation_dtype(case.dtype), case.dtype
    yards = {
        name: yardstick(right[name], condition[name], 0, [x[name] for x in results], dtype, stored)
        for name in right
    }
    if case.rows is None:
        return yards
    axis, yard = (-3 if case.layout == "...LHD" else -2), yards["query"]
    exact, unit, floor = (np.take(x, case.rows, axis) for x in (yard.exact, yard.unit, yard.floor))
    yard = yard._replace(exact=exact, unit=unit, floor=floor)
    return {"query": yard._replace(rows=case.rows, length=case.L, axis=axis)}


def adjoint_yardstick(case: Case, along: dict[str, Array]) -> Yardstick:
    """Return the yardstick of sum(tangent of the output · cotangent) in a direction.

    It is the sum of the gradients times the direction: the derivative is a linear map, and the
    gradients are by its transpose. The errors of so many elements add up as the root of their
    squares.
    """

    def terms(x: dict[str, Array]) -> Array:
        return np.concatenate([np.ravel(x[name] * lift(t)) for name, t in along.items()])

    exact, condition = exact_and_conditions(case)
    size = np.sqrt(np.sum(terms(condition) ** 2))
    results = [np.sum(terms(x)) for x in evaluations(case)]
    return yardstick(np.sum(terms(exact)), size, 0, results, case.dtype)
