"""Compute the exact result of a call, and its condition numbers.

It must be right beyond doubt: one loop for each letter of the formula, exactly rounded sums, and no
arithmetic of a kernel. Python's floats suffice, but for float64, which needs more digits.
"""

# ruff: noqa: N806 -- the letters are those of the semantics

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import product, repeat
from operator import mul, sub
from typing import Any, NamedTuple

import mpmath
import numpy as np

from polyattn._core.expressions import replacements as steps
from polyattn.conformance.reference.expressions import CallRows, gathered, plainly
from polyattn.conformance.reference.philox import keep_mask

Array = np.ndarray[Any, Any]


class Arithmetic(NamedTuple):
    """The arithmetic that the formula is evaluated in."""

    number: Callable[[float], Any]
    exp: Callable[[Any], Any]
    log: Callable[[Any], Any]
    tanh: Callable[[Any], Any]
    sqrt: Callable[[Any], Any]
    total: Callable[[Iterable[Any]], Any]


def total(terms: Iterable[float]) -> float:
    """Return the exactly rounded sum; NaN if a term is, or if infinities of both signs meet."""
    try:
        return math.fsum(terms)
    except ValueError:  # -inf + inf
        return math.nan


FLOAT = Arithmetic(float, math.exp, math.log, math.tanh, math.sqrt, total)
_digits = mpmath.MPContext()
_digits.prec = 160
EXTENDED = Arithmetic(
    _digits.mpf, _digits.exp, _digits.log, _digits.tanh, _digits.sqrt, _digits.fsum
)


class Oracle(NamedTuple):
    """The exact results, and the effect of relative errors of 1 in each step on them.

    Attributes
    ----------
    output, logsumexp : numpy.ndarray
        The results, (..., H, L, E) and (..., H, L) in the caller's layout.
    condition : numpy.ndarray
        ``sum_j w_ij |v_je|``: the effect of errors in the weights on the output. Here and below,
        the values include dropout.
    sensitivity : numpy.ndarray
        ``sum_j w_ij c_ij |v_je - o_ie|``: the effect of errors in the scores. Their condition c_ij
        is the sum of ``|scale q_id k_jd|`` and of their size after each further step. Other
        normalizers than softmax have the effect on their weights instead.
    logsumexp_condition : numpy.ndarray
        ``1 + |lse_i| + sum_j w_ij c_ij``, for the same reason.
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
    key_lengths: Any = None,
    block_table: Any = None,
    scale: float | steps.ScaleRule | None = None,
    softcap: float | None = None,
    score_mod: Callable[..., Any] | None = None,
    sinks: Any = None,
    dropout: tuple[Any, ...] | None = None,
    similarity: steps.Similarity | None = None,
    normalizer: steps.Normalizer | None = None,
    layout: str = "...HLD",
    rows: tuple[int, ...] | None = None,
    extended: bool = False,
) -> Oracle:
    """Evaluate attention row by row, as `polyattn.attention` defines it.

    Parameters
    ----------
    query, key, value : array_like
        As for `polyattn.attention`, of any supported dtype.
    mask, bias, is_causal, window, query_offset, key_lengths, block_table, scale : optional
        As for `polyattn.attention`.
    softcap, score_mod, sinks, dropout, similarity, normalizer, layout : optional
        As for `polyattn.attention`; a normalizer has no logsumexp, which is NaN.
    rows : tuple of int, optional
        The query rows to compute; the results have these only. All by default.
    extended : bool
        Whether to compute with 48 digits and return `numpy.longdouble` instead of float64. This is
        slow and supports only finite numbers without `score_mod`.

    Returns
    -------
    Oracle
        Output and logsumexp, and the condition numbers that limit their errors.

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
    k, v = (gathered(x, block_table) for x in (k, v))
    batch = np.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])
    q, k, v = (np.broadcast_to(x, batch + x.shape[-3:]) for x in (q, k, v))
    (H, L, D), (G, S, E) = q.shape[-3:], v.shape[-3:]
    ends = np.broadcast_to(S if key_lengths is None else key_lengths, batch)
    offsets = np.broadcast_to(ends - L if query_offset is None else query_offset, batch)
    sampled = CallRows(batch, (H, L, S), offsets, rows)
    bias = None if bias is None else np.broadcast_to(lift(bias), (*batch, H, L, S))
    mask, score_mod = plainly(mask, score_mod, sampled)
    length, table = len(sampled.indices), None
    if mask is not None and not callable(mask):
        table = np.broadcast_to(mask, (*batch, H, length, S))
    factor = a.number(factor_of(scale, similarity, D, S, a.sqrt))
    (left, right), (rate, seed, *start) = window or (None, None), dropout or (0, 0)
    keeps = keep_mask(rate, int(seed), batch, (H, L, S), rows, *start) if rate else None

    def is_shown(b: int, h: int, i: int, j: int, p: int) -> bool:
        return (
            j < ends.flat[b]
            and (not is_causal or j <= p)
            and (left is None or p - left <= j)
            and (right is None or j <= p + right)
            and (not callable(mask) or bool(mask(*index(b, h, i, j))))
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
    output, condition, sensitivity = np.zeros((3, *batch, H, length, E), dtype)
    logsumexp, logsumexp_condition = np.zeros((2, *batch, H, length, 1), dtype)
    for (b, item), h in product(enumerate(np.ndindex(*batch)), range(H)):
        g = h // (H // G)
        keys, values = numbers(a, k[item][g]), numbers(a, v[item][g])
        for n, i in enumerate(sampled.indices):
            at, q_i, p = (*item, h, n), numbers(a, q[item][h, i]), i + int(offsets[item])
            biases = [a.number(0.0)] * S if bias is None else numbers(a, bias[item][h, i])
            seen = range(S) if table is None else np.flatnonzero(table[at]).tolist()
            shown = [j for j in seen if is_shown(b, h, i, j, p)]
            products = [scaled(alike(a, similarity, q_i, keys[j]), factor) for j in shown]
            if isinstance(scale, steps.ByNorm):
                products = over_their_norm(a, products, scale.factor)
            scored = [
                (j, score(s, c, b, h, i, j, biases[j]))
                for j, (s, c) in zip(shown, products, strict=True)
                if biases[j] != -math.inf
            ]
            # A key is also absent where score_mod returns -inf.
            scored = [(j, (s, c)) for j, (s, c) in scored if s != -math.inf]
            columns = list(zip(*[values[j] for j, _ in scored], strict=True)) or [()] * E
            if keeps is not None:
                times = [int(keeps[at][j]) / (1 - a.number(rate)) for j, _ in scored]
                columns = [tuple(map(mul, column, times)) for column in columns]
            sink = None if sinks is None else a.number(float(sinks[h]))
            results = attend(a, weigh(a, normalizer, [s for _, s in scored], sink), columns)
            row = (rounded(x) if extended else x for x in results)
            output[at], condition[at], sensitivity[at], logsumexp[at], logsumexp_condition[at] = row

    back = partial(as_called, rank=np.ndim(query), layout=layout)
    return Oracle(
        back(output),
        back(logsumexp)[..., 0],
        back(condition),
        back(sensitivity),
        back(logsumexp_condition)[..., 0],
    )


def factor_of(
    scale: Any, similarity: Any, size: int, keys: int, root: Callable[[int], Any] = math.sqrt
) -> Any:
    """Return the factor of the products, before any norm, by the root of an arithmetic."""
    usual = 1 / root(max(size, 1) if similarity is None else 1)
    if isinstance(scale, steps.LongSequence):
        return usual / root(max(keys, 1))
    return usual if scale is None or isinstance(scale, steps.ByNorm) else scale


def scaled(score: tuple[Any, Any], factor: Any) -> tuple[Any, Any]:
    """Return a score and its condition, multiplied by a factor."""
    return factor * score[0], abs(factor) * score[1]


def alike(a: Arithmetic, similarity: Any, x: Any, y: Any) -> tuple[Any, Any]:
    """Return the similarity of a query and a key, and its condition."""
    if similarity is None:
        terms = list(map(mul, x, y))
        return a.total(terms), a.total(map(abs, terms))
    pairs = list(zip(x, y, strict=True))
    match similarity:
        case steps.Cosine():
            s, c = alike(a, None, x, y)
            lengths = a.sqrt(a.total(m * m for m in x)) * a.sqrt(a.total(n * n for n in y))
            # The product with a zero vector is 0 as well.
            return scaled((s, c + 2 * abs(s)), 1 / (lengths or 1))
        case steps.Distance(1):
            far = a.total(abs(m - n) for m, n in pairs)
            return -far, 2 * far
        case steps.Distance(2):
            far = a.sqrt(a.total((m - n) * (m - n) for m, n in pairs))
            return -far, 2 * far
        case steps.Additive(weight):
            bent = [(w, m + n, a.tanh(m + n)) for w, (m, n) in zip(weight, pairs, strict=True)]
            s = a.total(a.number(float(w)) * t for w, _, t in bent)
            # The slope of tanh reduces an error of the sum.
            c = (abs(float(w)) * (abs(t) + abs(z) * (1 - t * t)) for w, z, t in bent)
            return s, a.total(c)
    raise TypeError(f"{similarity!r} is not a known similarity")


def over_their_norm(a: Arithmetic, scores: Sequence[tuple[Any, Any]], factor: float) -> Any:
    """Return scores divided by their Euclidean norm; its condition is that of the squares."""
    square = a.total(s * s for s, _ in scores)
    if square == 0:
        return [scaled(score, factor) for score in scores]
    errors = a.total(abs(s) * c for s, c in scores) / square
    by = factor / a.sqrt(square)
    return [scaled((s, c + abs(s) * (1 + errors)), by) for s, c in scores]


class Weighed(NamedTuple):
    """The weights of one row, and the effect of errors in its scores."""

    weights: Sequence[Any]
    errors: Sequence[Any]  # how far relative errors of 1 could move each weight
    # The weights of the mean to subtract from the values: where weights sum to 1, only differences
    # of the values count.
    common: Sequence[Any]
    logsumexp: Any


def weigh(a: Arithmetic, normalizer: Any, scores: Sequence[tuple[Any, Any]], sink: Any) -> Weighed:
    """Return the weights of a row from its visible scores and their conditions."""
    plain, none = [s for s, _ in scores], [a.number(0)] * len(scores)
    nan = a.number(math.nan)
    match normalizer:
        case None:
            weights, lse = softmax(a, plain, sink)
            errors = [w * c for w, (_, c) in zip(weights, scores, strict=True)]
            return Weighed(weights, errors, weights, lse)
        case steps.Sigmoid():
            weights = [sigmoid(a, s) for s in plain]
            errors = [w * (1 - w) * c for w, (_, c) in zip(weights, scores, strict=True)]
            return Weighed(weights, errors, none, nan)
        case steps.Sparsemax():
            weights = sparsemax(a, plain)
            # A difference: errors of the scores and of the threshold pass through unchanged.
            errors = [(c + 2) * (w != 0) for w, (_, c) in zip(weights, scores, strict=True)]
            return Weighed(weights, errors, none, nan)
    raise TypeError(f"{normalizer!r} is not a known normalizer")


def attend(a: Arithmetic, weighed: Weighed, columns: Sequence[Sequence[Any]]) -> tuple[Any, ...]:
    """Return one row of every result, from its weights and visible values."""
    weights, errors, common, lse = weighed
    products = [list(map(mul, weights, column)) for column in columns]
    output = [a.total(terms) for terms in products]
    condition = [a.total(map(abs, terms)) for terms in products]
    middle = output
    if common is not weights:
        middle = [a.total(map(mul, common, column)) for column in columns]
    sensitivity = [
        a.total(map(mul, errors, map(abs, map(sub, column, repeat(o)))))
        for o, column in zip(middle, columns, strict=True)
    ]
    return output, condition, sensitivity, lse, 1 + abs(lse) + a.total(errors)


def sigmoid(a: Arithmetic, s: Any) -> Any:
    """Return 1 / (1 + exp(-s)) without overflow."""
    return 1 / (1 + a.exp(-s)) if s >= 0 else a.exp(s) / (1 + a.exp(s))


def sparsemax(a: Arithmetic, scores: Sequence[Any]) -> Sequence[Any]:
    """Return the weights of one row: the scores above a threshold, less it, which sum to 1.

    Scores below the threshold are removed, and again, until it is below all that remain.
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
    """Return the weights of one row, and the logarithm of their denominator."""
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
    """Return an array as nested lists of numbers of the arithmetic."""
    if a is FLOAT:
        return x.tolist()
    return [numbers(a, y) for y in x] if x.ndim else a.number(float(x))


def rounded(x: Any) -> Any:
    """Return a number or nested lists as `numpy.longdouble`, as a sum of two floats."""
    if isinstance(x, list):
        return [rounded(y) for y in x]
    high = float(x)
    return np.longdouble(high) + (np.longdouble(float(x - high)) if math.isfinite(high) else 0)


def index(*at: int) -> tuple[Any, ...]:
    """Return indices as NumPy integers, as callbacks expect them."""
    return tuple(map(np.int64, at))


def lift(x: Any) -> Any:
    """Return an array in float64, or in longdouble if it has that; exact for every dtype."""
    x = np.asarray(x)
    return x if x.dtype == np.longdouble else x.astype(np.float64)


def heads_first(x: Any, layout: str) -> Any:
    """Return an array as (..., H, L, D); an array of rank 2 is one head."""
    if x.ndim == 2:
        return x[None]
    return np.swapaxes(x, -3, -2) if layout == "...LHD" else x


def as_called(x: Any, rank: int, layout: str) -> Any:
    """Invert `heads_first` for the result of a call with arrays of this rank."""
    if rank == 2:
        return x[0]
    return np.swapaxes(x, -3, -2) if layout == "...LHD" else x
