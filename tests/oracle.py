"""What attention means, twice: the oracle to be believed and the textbook to be compared with.

`oracle` must be right beyond doubt: Python floats, one loop per letter of the formula, exactly
rounded sums, a hidden key never looked at. `textbook` must be ordinary: the formula as anyone
writes it in NumPy, every intermediate rounded to the inputs' dtype; its error is the yardstick.
The two share no arithmetic.
"""

# ruff: noqa: N806 -- the letters are those of the semantics

import math
from functools import partial
from itertools import product
from operator import mul
from typing import NamedTuple

import numpy as np


class Oracle(NamedTuple):
    """The exact results, and how far relative errors of 1 on the way could move each of them.

    `condition` is sum_j w_ij |v_je|: errors in the weights. `sensitivity` is
    sum_j w_ij c_ij |v_je - o_ie|: errors in the scores, whose own condition c_ij is the sum of
    |scale q_id k_jd| and of their size after each further step. `logsumexp_condition` is
    1 + |lse_i| + sum_j w_ij c_ij, by the same reasoning.
    """

    output: np.ndarray
    logsumexp: np.ndarray
    condition: np.ndarray
    sensitivity: np.ndarray
    logsumexp_condition: np.ndarray


def oracle(
    query,
    key,
    value,
    *,
    mask=None,
    bias=None,
    is_causal=False,
    window=None,
    query_offset=None,
    scale=None,
    softcap=None,
    score_mod=None,
    sinks=None,
    layout="...HLD",
):
    """Evaluate attention in float64, row by row, as `polyattn.attention` defines it."""
    q, k, v = (heads_first(lift(x), layout) for x in (query, key, value))
    batch = np.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])
    q, k, v = (np.broadcast_to(x, batch + x.shape[-3:]) for x in (q, k, v))
    (H, L, D), (G, S, E) = q.shape[-3:], v.shape[-3:]
    bias = None if bias is None else np.broadcast_to(lift(bias), (*batch, H, L, S))
    mask_at = mask if callable(mask) or mask is None else lookup(mask, batch, (H, L, S))
    offsets = np.broadcast_to(S - L if query_offset is None else query_offset, batch)
    scale = 1 / math.sqrt(D) if scale is None else scale
    left, right = window or (None, None)

    def is_visible(b, h, i, j, p, s_bias):
        return (
            (not is_causal or j <= p)
            and (left is None or p - left <= j)
            and (right is None or j <= p + right)
            and (mask_at is None or bool(mask_at(*map(np.int64, (b, h, i, j)))))
            and s_bias != -math.inf
        )

    def score(q_i, k_j, b, h, i, j, s_bias):
        terms = [scale * x * y for x, y in zip(q_i, k_j, strict=True)]
        s, c = total(terms), total(map(abs, terms))
        if softcap is not None:
            t = math.tanh(s / softcap)
            s, c = softcap * t, c * (1 - t * t) + abs(softcap * t)
        if score_mod is not None:
            s = float(score_mod(np.float64(s), *map(np.int64, (b, h, i, j))))
            c = c + abs(s)
        return s + s_bias, c + abs(s_bias)

    output, condition, sensitivity = np.zeros((3, *batch, H, L, E))
    logsumexp, logsumexp_condition = np.zeros((2, *batch, H, L, 1))
    for (b, item), h, i in product(enumerate(np.ndindex(*batch)), range(H), range(L)):
        at, g = (*item, h, i), h // (H // G)
        p = i + int(offsets[item])
        q_i, keys, values = q[at].tolist(), k[item][g].tolist(), v[item][g].tolist()
        biases = [0.0] * S if bias is None else bias[at].tolist()
        visible = [j for j in range(S) if is_visible(b, h, i, j, p, biases[j])]
        scores = [score(q_i, keys[j], b, h, i, j, biases[j]) for j in visible]
        columns = [[values[j][e] for j in visible] for e in range(E)]
        sink = None if sinks is None else float(sinks[h])
        row = attend(scores, columns, sink)
        output[at], condition[at], sensitivity[at], logsumexp[at], logsumexp_condition[at] = row

    back = partial(as_called, rank=np.ndim(query), layout=layout)
    return Oracle(
        back(output),
        back(logsumexp)[..., 0],
        back(condition),
        back(sensitivity),
        back(logsumexp_condition)[..., 0],
    )


def attend(scores, columns, sink):
    """One row of every result, from its visible scores with their conditions, and its values."""
    weights, lse = softmax([s for s, _ in scores], sink)
    moved = [w * c for w, (_, c) in zip(weights, scores, strict=True)]
    output = [total(map(mul, weights, column)) for column in columns]
    condition = [total(abs(w * v) for w, v in zip(weights, x, strict=True)) for x in columns]
    sensitivity = [
        total(m * abs(v - o) for m, v in zip(moved, column, strict=True))
        for o, column in zip(output, columns, strict=True)
    ]
    return output, condition, sensitivity, lse, 1 + abs(lse) + total(moved)


def softmax(scores, sink=None):
    """The weights of one row, and the logarithm of their common denominator."""
    logits = scores if sink is None else [*scores, sink]
    if any(math.isnan(s) for s in logits):
        return [math.nan] * len(scores), math.nan
    highest = max(logits, default=-math.inf)
    if highest == -math.inf:
        return [0.0] * len(scores), -math.inf
    denominator = total(math.exp(s - highest) for s in logits)
    weights = [math.exp(s - highest) / denominator for s in scores]
    return weights, highest + math.log(denominator)


def total(terms):
    """The sum, exactly rounded; by IEEE addition where a term is NaN or infinite."""
    terms = list(terms)
    return math.fsum(terms) if all(map(math.isfinite, terms)) else float(sum(terms))


def lift(x):
    """The same numbers in float64: exact for every dtype that the library takes."""
    return np.asarray(x).astype(np.float64)


def heads_first(x, layout):
    """(..., H, L, D), whatever the layout; an array of rank 2 is one head."""
    if x.ndim == 2:
        return x[None]
    return np.swapaxes(x, -3, -2) if layout == "...LHD" else x


def as_called(x, rank, layout):
    """The inverse of `heads_first`, for a result of a call with arrays of this rank."""
    if rank == 2:
        return x[0]
    return np.swapaxes(x, -3, -2) if layout == "...LHD" else x


def lookup(mask, batch, shape):
    """A mask array as the function of the indices that it stands for."""
    table = np.broadcast_to(np.asarray(mask), batch + shape).reshape(math.prod(batch), *shape)
    return lambda b, h, i, j: table[b, h, i, j]


def textbook(
    query,
    key,
    value,
    *,
    mask=None,
    bias=None,
    is_causal=False,
    window=None,
    query_offset=None,
    scale=None,
    softcap=None,
    score_mod=None,
    sinks=None,
    layout="...HLD",
    coordinates_in_turn=False,
    keys_reversed=False,
    keys_in_turn=False,
    scale_first=False,
    divide_last=False,
):
    """Attention as a page of NumPy, wholly in the inputs' dtype: `(output, logsumexp)`.

    The last five options are the same formula in another order of evaluation. What they change
    in the result is rounding and nothing else.
    """
    dtype = np.asarray(query).dtype
    q, k, v = (heads_first(np.asarray(x), layout) for x in (query, key, value))
    (H, L, D), (G, S) = q.shape[-3:], k.shape[-3:-1]
    k, v = (np.repeat(x, H // G, axis=-3) for x in (k, v))
    batch = np.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])
    b = np.arange(math.prod(batch)).reshape(*batch, 1, 1, 1)
    h, i, j = (np.arange(n).reshape(at) for n, at in ((H, (-1, 1, 1)), (L, (-1, 1)), (S, (-1,))))

    def rounded(x):
        return np.asarray(x).astype(dtype)

    scale = rounded(1 / math.sqrt(D) if scale is None else scale)
    before, after = (scale, rounded(1)) if scale_first else (rounded(1), scale)
    s = product_of(q * before, k.mT, coordinates_in_turn) * after
    if softcap is not None:
        s = rounded(rounded(np.tanh(rounded(s / rounded(softcap)))) * rounded(softcap))
    if score_mod is not None:
        s = rounded(score_mod(s, b, h, i, j))
    if bias is not None:
        s = s + rounded(bias)
    s = np.broadcast_to(s, np.broadcast_shapes(s.shape, (*batch, H, L, S)))

    offset = np.asarray(S - L if query_offset is None else query_offset)
    position = i + offset[..., None, None, None]
    left, right = window or (None, None)
    hidden = np.zeros((1, 1, 1), bool)
    if is_causal:
        hidden = hidden | (j > position)
    if left is not None:
        hidden = hidden | (j < position - left)
    if right is not None:
        hidden = hidden | (j > position + right)
    if mask is not None:
        hidden = hidden | ~(mask(b, h, i, j) if callable(mask) else np.asarray(mask))
    s = np.where(hidden, rounded(-np.inf), s)
    if keys_reversed:
        s, v = s[..., ::-1], v[..., ::-1, :]

    highest = np.max(s, axis=-1, keepdims=True, initial=-np.inf)
    if sinks is not None:
        sink = rounded(sinks)[:, None, None]
        highest = np.maximum(highest, sink)
    highest = np.where(np.isneginf(lift(highest)), rounded(0), highest)
    weights = rounded(np.exp(s - highest))
    ones = np.ones_like(v[..., :1])
    denominator = product_of(weights, ones, keys_in_turn)
    if sinks is not None:
        denominator = denominator + rounded(np.exp(sink - highest))
    divisor = np.where(denominator == 0, rounded(1), denominator)
    before, after = (rounded(1), divisor) if divide_last else (divisor, rounded(1))
    output = product_of(weights / before, v, keys_in_turn) / after
    logsumexp = highest + rounded(np.log(denominator))
    output, logsumexp = (as_called(x, np.ndim(query), layout) for x in (output, logsumexp))
    return output, logsumexp[..., 0]


def product_of(a, b, in_turn):
    """`a @ b` in the dtype of `a`, summed in the library's order, or strictly one after another."""
    if not in_turn:
        return (a @ b).astype(a.dtype)
    shape = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    result = np.zeros((*shape, a.shape[-2], b.shape[-1]), a.dtype)
    for n in range(a.shape[-1]):
        result += a[..., n : n + 1] * b[..., n : n + 1, :]
    return result
