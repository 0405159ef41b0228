"""What attention means, to be believed: the exact result of a call, and how hard it was to get.

It must be right beyond doubt: one loop for each letter of the formula, exactly rounded sums, a
hidden key never looked at. It shares no arithmetic with any kernel. Python's floats serve for all
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
        sum_j w_ij |v_je|: what errors in the weights could do to the output.
    sensitivity : numpy.ndarray
        sum_j w_ij c_ij |v_je - o_ie|: what errors in the scores could, whose own condition c_ij is
        the sum of |scale q_id k_jd| and of their size after each further step.
    logsumexp_condition : numpy.ndarray
        1 + |lse_i| + sum_j w_ij c_ij, by the same reasoning.
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
    scale: float | None = None,
    softcap: float | None = None,
    score_mod: Callable[..., Any] | None = None,
    sinks: Any = None,
    layout: str = "...HLD",
    extended: bool = False,
) -> Oracle:
    """Evaluate attention row by row, as `polyattn.attention` defines it.

    Parameters
    ----------
    query, key, value : array_like
        As for `polyattn.attention`, of any dtype that it takes.
    mask, bias, is_causal, window, query_offset, scale, softcap, score_mod, sinks, layout : optional
        As for `polyattn.attention`.
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
    bias = None if bias is None else np.broadcast_to(lift(bias), (*batch, H, L, S))
    mask_at = mask if callable(mask) or mask is None else lookup(mask, batch, (H, L, S))
    offsets = np.broadcast_to(S - L if query_offset is None else query_offset, batch)
    scale = 1 / a.sqrt(max(D, 1)) if scale is None else a.number(scale)
    left, right = window or (None, None)

    def is_visible(b: int, h: int, i: int, j: int, p: int, s_bias: Any) -> bool:
        return (
            (not is_causal or j <= p)
            and (left is None or p - left <= j)
            and (right is None or j <= p + right)
            and (mask_at is None or bool(mask_at(*index(b, h, i, j))))
            and s_bias != -math.inf
        )

    def score(q_i: Any, k_j: Any, b: int, h: int, i: int, j: int, s_bias: Any) -> tuple[Any, Any]:
        terms = [scale * x * y for x, y in zip(q_i, k_j, strict=True)]
        s, c = a.total(terms), a.total(map(abs, terms))
        if softcap is not None:
            t = a.tanh(s / softcap)
            s, c = softcap * t, c * (1 - t * t) + abs(softcap * t)
        if score_mod is not None:
            s = a.number(score_mod(np.float64(s), *index(b, h, i, j)))
            c = c + abs(s)
        return s + s_bias, c + abs(s_bias)

    dtype = np.longdouble if extended else np.float64
    output, condition, sensitivity = np.zeros((3, *batch, H, L, E), dtype)
    logsumexp, logsumexp_condition = np.zeros((2, *batch, H, L, 1), dtype)
    for (b, item), h, i in product(enumerate(np.ndindex(*batch)), range(H), range(L)):
        at, g = (*item, h, i), h // (H // G)
        p = i + int(offsets[item])
        q_i, keys, values = (numbers(a, x) for x in (q[at], k[item][g], v[item][g]))
        biases = [a.number(0.0)] * S if bias is None else numbers(a, bias[at])
        visible = [j for j in range(S) if is_visible(b, h, i, j, p, biases[j])]
        scored = [(j, score(q_i, keys[j], b, h, i, j, biases[j])) for j in visible]
        # Where score_mod returns -inf the key is absent, too.
        scored = [(j, (s, c)) for j, (s, c) in scored if s != -math.inf]
        scores = [s for _, s in scored]
        columns = [[values[j][e] for j, _ in scored] for e in range(E)]
        sink = None if sinks is None else a.number(float(sinks[h]))
        row = (rounded(x) if extended else x for x in attend(a, scores, columns, sink))
        output[at], condition[at], sensitivity[at], logsumexp[at], logsumexp_condition[at] = row

    back = partial(as_called, rank=np.ndim(query), layout=layout)
    return Oracle(
        back(output),
        back(logsumexp)[..., 0],
        back(condition),
        back(sensitivity),
        back(logsumexp_condition)[..., 0],
    )


def attend(
    a: Arithmetic, scores: Sequence[tuple[Any, Any]], columns: Sequence[Sequence[Any]], sink: Any
) -> tuple[Any, ...]:
    """One row of every result, from its visible scores with their conditions, and its values."""
    weights, lse = softmax(a, [s for s, _ in scores], sink)
    moved = [w * c for w, (_, c) in zip(weights, scores, strict=True)]
    output = [a.total(map(mul, weights, column)) for column in columns]
    condition = [a.total(abs(w * v) for w, v in zip(weights, x, strict=True)) for x in columns]
    sensitivity = [
        a.total(m * abs(v - o) for m, v in zip(moved, column, strict=True))
        for o, column in zip(output, columns, strict=True)
    ]
    return output, condition, sensitivity, lse, 1 + abs(lse) + a.total(moved)


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
    mask: Any, batch: tuple[int, ...], shape: tuple[int, ...]
) -> Callable[[int, int, int, int], Any]:
    """A mask array as the function of the indices that it stands for."""
    table = np.broadcast_to(np.asarray(mask), batch + shape).reshape(math.prod(batch), *shape)
    return lambda b, h, i, j: table[b, h, i, j]
