"""What attention means, to be believed: the exact result of a call, and how hard it was to get.

It must be right beyond doubt: one loop for each letter of the formula, exactly rounded sums, a
masked key never looked at. It shares no arithmetic with any kernel. Python's floats serve for all
dtypes but float64 itself, which is held against an arithmetic of more digits.
"""

# ruff: noqa: N806 -- the letters are those of the semantics

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import product
from operator import mul
from typing import Any, NamedTuple

import mpmath
import numpy as np

from polyattn.conformance.reference.expressions import Rows, plainly
from polyattn.conformance.reference.philox import keep_mask
from polyattn.expressions.replacements import (
    Additive,
    ByNorm,
    Cosine,
    Distance,
    LongSequence,
    Normalizer,
    ScaleRule,
    Sigmoid,
    Similarity,
    Sparsemax,
)

__all__ = ["Oracle", "oracle"]

Array = np.ndarray[Any, Any]


class Arithmetic(NamedTuple):
    """The numbers that the formula is evaluated in."""

    number: Callable[[float], Any]
    exp: Callable[[Any], Any]
    log: Callable[[Any], Any]
    tanh: Callable[[Any], Any]
    sqrt: Callable[[Any], Any]
    total: Callable[[Iterable[Any]], Any]


def total(terms: Iterable[float]) -> float:
    """The sum, exactly rounded; by IEEE addition where a term is NaN or infinite."""
    terms = list(terms)
    return math.fsum(terms) if all(map(math.isfinite, terms)) else float(sum(terms))


FLOAT = Arithmetic(float, math.exp, math.log, math.tanh, math.sqrt, total)
_digits = mpmath.MPContext()
_digits.prec = 160
EXTENDED = Arithmetic(
    _digits.mpf, _digits.exp, _digits.log, _digits.tanh, _digits.sqrt, _digits.fsum
)


class Oracle(NamedTuple):
    """The exact results, and how far relative errors of 1 on the way could move each of them.

    Attributes
    ----------
    output, logsumexp : numpy.ndarray
        The results, (..., H, L, E) and (..., H, L) in the caller's layout.
    condition : numpy.ndarray
        ``sum_j w_ij |v_je|``: what errors in the weights could do to the output. Here and below,
        the values are what dropout makes of them.
    sensitivity : numpy.ndarray
        ``sum_j w_ij c_ij |v_je - o_ie|``: what errors in the scores could, whose own condition c_ij
        is the sum of ``|scale q_id k_jd|`` and of their size after each further step. By a
        normalizer that is not softmax, what they could do to its weights instead.
    logsumexp_condition : numpy.ndarray
        ``1 + |lse_i| + sum_j w_ij c_ij``, by the same reasoning.
    """

    output: Array
    logsumexp: Array
    condition: Array
    sensitivity: Array
    logsumexp_condition: Array


def oracle(
    query: Any,
    key: Any,
    value: Any,
    *,
    mask: Any = None,
    bias: Any = None,
    is_causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    query_offset: Any = None,
    scale: float | ScaleRule | None = None,
    softcap: float | None = None,
    score_mod: Callable[..., Any] | None = None,
    sinks: Any = None,
    dropout: tuple[float, Any] | None = None,
    similarity: Similarity | None = None,
    normalizer: Normalizer | None = None,
    layout: str = "...HLD",
    rows: tuple[int, ...] | None = None,
    extended: bool = False,
) -> Oracle:
    """Evaluate attention row by row, as `polyattn.attention` defines it.

    Parameters
    ----------
    query, key, value : array_like
        As for `polyattn.attention`, of any dtype that it takes.
    mask, bias, is_causal, window, query_offset, scale, softcap, score_mod, sinks : optional
        As for `polyattn.attention`.
    dropout, similarity, normalizer, layout : optional
        As for `polyattn.attention`; a normalizer has no logsumexp, which is NaN.
    rows : tuple of int, optional
        The query rows to compute; the results have these only. All by default.
    extended : bool
        Whether to compute with 48 digits and return `numpy.longdouble` rather than float64, which
        is slow and takes finite numbers and no `score_mod`.

    Returns
    -------
    Oracle
        Output and logsumexp, and the conditions that errors are measured against.

    Examples
    --------
    >>> import numpy as np
    >>> from polyattn.conformance import oracle
    >>> query, key, value = np.ones((1, 1)), np.array([[0.0], [np.log(3)]]), np.array([[0.0], [4]])
    >>> exact = oracle(query, key, value, scale=1.0)
    >>> exact.output.item(), exact.condition.item()
    (3.0, 3.0)
    """
    a = EXTENDED if extended else FLOAT
    q, k, v = (heads_first(lift(x), layout) for x in (query, key, value))
    batch = np.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])
    q, k, v = (np.broadcast_to(x, batch + x.shape[-3:]) for x in (q, k, v))
    (H, L, D), (G, S, E) = q.shape[-3:], v.shape[-3:]
    sampled = Rows(batch, (H, L, S), query_offset, rows)
    bias = None if bias is None else np.broadcast_to(lift(bias), (*batch, H, L, S))
    mask, score_mod = plainly(mask, score_mod, sampled)
    if mask is not None and not callable(mask):
        mask = lookup(mask, batch, (H, sampled.indices, S))
    offsets = np.broadcast_to(S - L if query_offset is None else query_offset, batch)
    factor = scale_of(a, scale, similarity, D, S)
    left, right = window or (None, None)
    rate, seed = dropout or (0, 0)
    keeps = keep_mask(rate, int(seed), batch, (H, L, S), rows) if rate else None

    def is_shown(b: int, h: int, i: int, j: int, p: int) -> bool:
        return (
            (not is_causal or j <= p)
            and (left is None or p - left <= j)
            and (right is None or j <= p + right)
            and (mask is None or bool(mask(*index(b, h, i, j))))
        )

    def score(s: Any, c: Any, b: int, h: int, i: int, j: int, s_bias: Any) -> tuple[Any, Any]:
        if softcap is not None:
            t = a.tanh(s / softcap)
            s, c = softcap * t, c * (1 - t * t) + abs(softcap * t)
        if score_mod is not None:
            s = a.number(score_mod(np.float64(s), *index(b, h, i, j)))
            c = c + abs(s)
        return s + s_bias, c + abs(s_bias)

    dtype = np.longdouble if extended else np.float64
    length = len(sampled.indices)
    output, condition, sensitivity = np.zeros((3, *batch, H, length, E), dtype)
    logsumexp, logsumexp_condition = np.zeros((2, *batch, H, length, 1), dtype)
    places = product(enumerate(np.ndindex(*batch)), range(H), enumerate(sampled.indices))
    for (b, item), h, (n, i) in places:
        at, g = (*item, h, n), h // (H // G)
        p = i + int(offsets[item])
        q_i, keys, values = (numbers(a, x) for x in (q[item][h, i], k[item][g], v[item][g]))
        biases = [a.number(0.0)] * S if bias is None else numbers(a, bias[item][h, i])
        shown = [j for j in range(S) if is_shown(b, h, i, j, p)]
        products = [scaled(alike(a, similarity, q_i, keys[j]), factor) for j in shown]
        if isinstance(scale, ByNorm):
            products = over_their_norm(a, products, scale.factor)
        scored = [
            (j, score(s, c, b, h, i, j, biases[j]))
            for j, (s, c) in zip(shown, products, strict=True)
            if biases[j] != -math.inf
        ]
        # Where score_mod returns -inf the key is absent, too.
        scored = [(j, (s, c)) for j, (s, c) in scored if s != -math.inf]
        columns = [[values[j][e] for j, _ in scored] for e in range(E)]
        if keeps is not None:
            times = [int(keeps[at][j]) / (1 - a.number(rate)) for j, _ in scored]
            columns = [list(map(mul, column, times)) for column in columns]
        sink = None if sinks is None else a.number(float(sinks[h]))
        found = attend(a, weigh(a, normalizer, [s for _, s in scored], sink), columns)
        row = (rounded(x) if extended else x for x in found)
        output[at], condition[at], sensitivity[at], logsumexp[at], logsumexp_condition[at] = row

    back = partial(as_called, rank=np.ndim(query), layout=layout)
    return Oracle(
        back(output),
        back(logsumexp)[..., 0],
        back(condition),
        back(sensitivity),
        back(logsumexp_condition)[..., 0],
    )


def scale_of(a: Arithmetic, scale: Any, similarity: Any, size: int, keys: int) -> Any:
    """What multiplies the products, before a norm may divide them."""
    usual = 1 / a.sqrt(max(size, 1)) if similarity is None else a.number(1)
    if isinstance(scale, LongSequence):
        return usual / a.sqrt(max(keys, 1))
    return usual if scale is None or isinstance(scale, ByNorm) else a.number(scale)


def scaled(score: tuple[Any, Any], factor: Any) -> tuple[Any, Any]:
    """A score with its condition, multiplied."""
    return factor * score[0], abs(factor) * score[1]


def alike(a: Arithmetic, similarity: Any, x: Any, y: Any) -> tuple[Any, Any]:
    """How alike a query and a key are, and the condition of that."""
    pairs = list(zip(x, y, strict=True))
    if similarity is None:
        terms = [m * n for m, n in pairs]
        return a.total(terms), a.total(map(abs, terms))
    match similarity:
        case Cosine():
            s, c = alike(a, None, x, y)
            lengths = a.sqrt(a.total(m * m for m in x)) * a.sqrt(a.total(n * n for n in y))
            # Of a vector of 0 the product is 0 as well.
            return scaled((s, c + 2 * abs(s)), 1 / (lengths or 1))
        case Distance(1):
            far = a.total(abs(m - n) for m, n in pairs)
            return -far, 2 * far
        case Distance(2):
            far = a.sqrt(a.total((m - n) * (m - n) for m, n in pairs))
            return -far, 2 * far
        case Additive(weight):
            bent = [(w, m + n, a.tanh(m + n)) for w, (m, n) in zip(weight, pairs, strict=True)]
            s = a.total(a.number(float(w)) * t for w, _, t in bent)
            # An error of the sum shrinks by the slope of tanh there.
            c = (abs(float(w)) * (abs(t) + abs(z) * (1 - t * t)) for w, z, t in bent)
            return s, a.total(c)
    raise TypeError(f"nothing says what {similarity!r} means")


def over_their_norm(a: Arithmetic, scores: Sequence[tuple[Any, Any]], factor: float) -> Any:
    """Scores divided by their Euclidean norm, whose condition is that of its squares."""
    square = a.total(s * s for s, _ in scores)
    if square == 0:
        return [scaled(score, factor) for score in scores]
    moved = a.total(abs(s) * c for s, c in scores) / square
    by = factor / a.sqrt(square)
    return [scaled((s, c + abs(s) * (1 + moved)), by) for s, c in scores]


class Weighed(NamedTuple):
    """The weights of one row, and what errors in its scores could do to them.

    Attributes
    ----------
    weights, moved : sequence
        The weights, and by how much relative errors of 1 on the way could move each of them,
        before what all have in common is taken off again.
    common : sequence
        By what share of each value it is: where the weights sum to 1, only what the values differ
        by counts.
    logsumexp : number
        Of softmax's denominator.
    """

    weights: Sequence[Any]
    moved: Sequence[Any]
    common: Sequence[Any]
    logsumexp: Any


def weigh(a: Arithmetic, normalizer: Any, scores: Sequence[tuple[Any, Any]], sink: Any) -> Weighed:
    """What makes weights of the visible scores of a row, given with their conditions."""
    plain, none = [s for s, _ in scores], [a.number(0)] * len(scores)
    nan = a.number(math.nan)
    match normalizer:
        case None:
            weights, lse = softmax(a, plain, sink)
            moved = [w * c for w, (_, c) in zip(weights, scores, strict=True)]
            return Weighed(weights, moved, weights, lse)
        case Sigmoid():
            weights = [sigmoid(a, s) for s in plain]
            moved = [w * (1 - w) * c for w, (_, c) in zip(weights, scores, strict=True)]
            return Weighed(weights, moved, none, nan)
        case Sparsemax():
            weights = sparsemax(a, plain)
            # A difference: errors of the scores, and of the threshold, reach it as they are.
            moved = [(c + 2) * (w != 0) for w, (_, c) in zip(weights, scores, strict=True)]
            return Weighed(weights, moved, none, nan)
    raise TypeError(f"nothing says what {normalizer!r} means")


def attend(a: Arithmetic, weighed: Weighed, columns: Sequence[Sequence[Any]]) -> tuple[Any, ...]:
    """One row of every result, from its weights and its visible values."""
    weights, moved, common, lse = weighed
    output = [a.total(map(mul, weights, column)) for column in columns]
    condition = [a.total(abs(w * v) for w, v in zip(weights, x, strict=True)) for x in columns]
    middle = [a.total(map(mul, common, column)) for column in columns]
    sensitivity = [
        a.total(m * abs(v - o) for m, v in zip(moved, column, strict=True))
        for o, column in zip(middle, columns, strict=True)
    ]
    return output, condition, sensitivity, lse, 1 + abs(lse) + a.total(moved)


def sigmoid(a: Arithmetic, s: Any) -> Any:
    """1 / (1 + exp(-s)), by the exponential that cannot overflow."""
    return 1 / (1 + a.exp(-s)) if s >= 0 else a.exp(s) / (1 + a.exp(s))


def sparsemax(a: Arithmetic, scores: Sequence[Any]) -> Sequence[Any]:
    """The weights of one row: what is left of the scores above a threshold, by which they sum to 1.

    The threshold of all of them is too low for some, which are left out until none is.
    """
    if any(math.isnan(s) for s in scores):
        return [math.nan] * len(scores)
    support, left_out = scores, True
    threshold = a.number(0)
    while support and left_out:
        threshold = (a.total(support) - 1) / len(support)
        left_out = any(s <= threshold for s in support)
        support = [s for s in support if s > threshold]
    return [max(s - threshold, a.number(0)) for s in scores]


def softmax(a: Arithmetic, scores: Sequence[Any], sink: Any = None) -> tuple[Sequence[Any], Any]:
    """The weights of one row, and the logarithm of their common denominator."""
    logits = scores if sink is None else [*scores, sink]
    if any(math.isnan(s) for s in logits):
        return [math.nan] * len(scores), math.nan
    highest = max(logits, default=-math.inf)
    if highest == -math.inf:
        return [a.number(0.0)] * len(scores), a.number(-math.inf)
    denominator = a.total(a.exp(s - highest) for s in logits)
    weights = [a.exp(s - highest) / denominator for s in scores]
    return weights, highest + a.log(denominator)


def numbers(a: Arithmetic, x: Array) -> Any:
    """An array as lists of the numbers that the formula is evaluated in."""
    if a is FLOAT:
        return x.tolist()
    return [numbers(a, y) for y in x] if x.ndim else a.number(float(x))


def rounded(x: Any) -> Any:
    """A number, or a list of them, as `numpy.longdouble`, by way of two floats."""
    if isinstance(x, list):
        return [rounded(y) for y in x]
    high = float(x)
    return np.longdouble(high) + (np.longdouble(float(x - high)) if math.isfinite(high) else 0)


def index(*at: int) -> tuple[Any, ...]:
    """Indices as functions of the caller's are given them: of NumPy, not of Python."""
    return tuple(map(np.int64, at))


def lift(x: Any) -> Any:
    """The same numbers in float64, or wider if they are: exact for every dtype that we take."""
    x = np.asarray(x)
    return x if x.dtype == np.longdouble else x.astype(np.float64)


def heads_first(x: Any, layout: str) -> Any:
    """(..., H, L, D), whatever the layout; an array of rank 2 is one head."""
    if x.ndim == 2:
        return x[None]
    return np.swapaxes(x, -3, -2) if layout == "...LHD" else x


def as_called(x: Any, rank: int, layout: str) -> Any:
    """The inverse of `heads_first`, for a result of a call with arrays of this rank."""
    if rank == 2:
        return x[0]
    return np.swapaxes(x, -3, -2) if layout == "...LHD" else x


def lookup(
    mask: Any, batch: tuple[int, ...], shape: tuple[int, tuple[int, ...], int]
) -> Callable[[int, int, int, int], Any]:
    """Return a mask array, of these rows only, as the function of the indices it stands for."""
    heads, rows, keys = shape
    whole = (heads, len(rows), keys)
    table = np.broadcast_to(np.asarray(mask), batch + whole).reshape(math.prod(batch), *whole)
    place = {i: n for n, i in enumerate(rows)}
    return lambda b, h, i, j: table[b, h, place[int(i)], j]
