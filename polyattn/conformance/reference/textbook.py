"""Compute attention as in a textbook, in NumPy: the yardstick of accuracy.

It must be ordinary: one page, with every intermediate rounded to one dtype. Its error sets the
limit for the error of a kernel; see `tolerance`.
"""

# ruff: noqa: N806 -- the letters are those of the semantics

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from polyattn._core.expressions import replacements as steps
from polyattn.conformance.reference.expressions import CallRows, gathered, plainly
from polyattn.conformance.reference.oracle import as_called, factor_of, heads_first, lift
from polyattn.conformance.reference.philox import keep_mask

#: Options of `textbook` that change only the order of evaluation, and combinations of them: those
#: of a loop over the keys in C, and of kernels that subtract no maximum from small scores, and from
#: large ones only a multiple of ln 2, so that sums are scaled by powers of two.
ORDERS = (
    ("coordinates_in_turn",),
    ("keys_reversed",),
    ("keys_in_turn",),
    ("scale_first",),
    ("divide_last",),
    ("keys_in_turn", "divide_last"),
    ("coordinates_in_turn", "keys_reversed", "keys_in_turn", "divide_last"),
    ("without_maximum", "divide_last"),
)

#: Scores below it have exponentials that neither overflow nor lose digits, in any dtype.
SMALL = 20.0
LN2 = math.log(2)


def textbook(
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
    coordinates_in_turn: bool = False,
    keys_reversed: bool = False,
    keys_in_turn: bool = False,
    scale_first: bool = False,
    divide_last: bool = False,
    without_maximum: bool = False,
) -> tuple[Any, Any]:
    """Return output and logsumexp, computed only in the dtype of the inputs.

    `rows` selects query rows. The last six options change only the order of evaluation, and so the
    rounding: see `ORDERS`.
    """
    dtype = np.asarray(query).dtype
    q, k, v = (heads_first(np.asarray(x), layout) for x in (query, key, value))
    k, v = (gathered(x, block_table) for x in (k, v))
    (H, L, D), (G, S) = q.shape[-3:], k.shape[-3:-1]
    k, v = (np.repeat(x, H // max(G, 1), axis=-3) for x in (k, v))
    batch = np.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])
    b = np.arange(math.prod(batch)).reshape(*batch, 1, 1, 1)
    ends = np.asarray(S if key_lengths is None else key_lengths)
    sampled = CallRows(batch, (H, L, S), ends - L if query_offset is None else query_offset, rows)
    h, i, j = np.ogrid[:H, :L, :S]
    i = sampled.of(i)

    def rounded(x: Any) -> Any:
        return np.asarray(x).astype(dtype)

    mask, score_mod = plainly(mask, score_mod, sampled)
    q, bias = sampled.of(q), sampled.of(bias)
    hidden = hidden_keys(mask, is_causal, window, sampled.offset, ends, (b, h, i, j))

    times = rounded(factor_of(scale, similarity, D, S))
    if similarity is None:
        before, after = (times, rounded(1)) if scale_first else (rounded(1), times)
        s = product_of(q * before, k.mT, coordinates_in_turn) * after
    else:
        s = likeness(similarity, q, k, coordinates_in_turn) * times
    if isinstance(scale, steps.ByNorm):
        counted = np.where(hidden, rounded(0), s)
        norm = rounded(np.sqrt(row_sums(counted * counted, keys_in_turn)))
        s = rounded(scale.factor) * s / np.where(norm == 0, rounded(1), norm)
    if softcap is not None:
        s = rounded(rounded(np.tanh(rounded(s / rounded(softcap)))) * rounded(softcap))
    if score_mod is not None:
        s = rounded(score_mod(s, b, h, i, j))
    if bias is not None:
        s = s + rounded(bias)
    s = np.broadcast_to(s, np.broadcast_shapes(s.shape, (*batch, H, len(sampled.indices), S)))

    s = np.where(hidden, rounded(-np.inf), s)
    rate, seed, *start = dropout or (0, 0)
    keeps = np.ones((1, 1, 1), bool)
    if rate:
        keeps = keep_mask(rate, int(seed), batch, (H, L, S), rows, *start)
    if keys_reversed:
        s, v, keeps = s[..., ::-1], v[..., ::-1, :], keeps[..., ::-1]

    if normalizer is not None:
        weights = rounded(normalized(normalizer, s, keys_in_turn))
        weights = np.where(keeps, weights / rounded(1 - rate), rounded(0))
        output = as_called(product_of(weights, v, keys_in_turn), np.ndim(query), layout)
        return output, np.full_like(output[..., 0], np.nan)

    highest = np.max(s, axis=-1, keepdims=True, initial=-np.inf)
    if sinks is not None:
        sink = rounded(sinks)[:, None, None]
        highest = np.maximum(highest, sink)
    highest = np.where(np.isneginf(lift(highest)), rounded(0), highest)
    if without_maximum:
        large = np.abs(lift(highest)) >= SMALL
        highest = np.where(large, rounded(np.rint(lift(highest) / LN2) * LN2), rounded(0))
    weights = rounded(np.exp(s - highest))
    denominator = row_sums(weights, keys_in_turn)
    if sinks is not None:
        denominator = denominator + rounded(np.exp(sink - highest))
    divisor = np.where(denominator == 0, rounded(1), denominator)
    before, after = (rounded(1), divisor) if divide_last else (divisor, rounded(1))
    weights = np.where(keeps, weights / rounded(1 - rate), rounded(0)) if rate else weights
    output = product_of(weights / before, v, keys_in_turn) / after
    logsumexp = highest + rounded(np.log(denominator))
    output, logsumexp = (as_called(x, np.ndim(query), layout) for x in (output, logsumexp))
    return output, logsumexp[..., 0]


def hidden_keys(
    mask: Any, is_causal: Any, window: Any, offset: Any, ends: Any, at: tuple[Any, ...]
) -> Any:
    """Return where mask, causal, window and lengths hide keys; broadcasts to (..., H, L, S)."""
    _, _, i, j = at
    offset, ends = (np.asarray(x)[..., None, None, None] for x in (offset, ends))
    position, hidden = i + offset, j >= ends
    left, right = window or (None, None)
    if is_causal:
        hidden = hidden | (j > position)
    if left is not None:
        hidden = hidden | (j < position - left)
    if right is not None:
        hidden = hidden | (j > position + right)
    if mask is not None:
        hidden = hidden | ~(mask(*at) if callable(mask) else np.asarray(mask))
    return hidden


def likeness(similarity: Any, q: Any, k: Any, in_turn: bool) -> Any:
    """Return the similarity of queries and keys, (..., L, S)."""
    if isinstance(similarity, steps.Cosine):
        q, k = (x / np.where((n := norm(x, in_turn)) == 0, n + 1, n) for x in (q, k))
        return product_of(q, k.mT, in_turn)
    q, k = q[..., :, None, :], k[..., None, :, :]
    match similarity:
        case steps.Distance(1):
            return -row_sums(abs(q - k), in_turn)[..., 0]
        case steps.Distance(2):
            return -norm(q - k, in_turn)[..., 0]
        case steps.Additive(weight):
            return row_sums(np.tanh(q + k) * weight.astype(q.dtype), in_turn)[..., 0]
    raise TypeError(f"{similarity!r} is not a known similarity")


def normalized(normalizer: Any, s: Any, in_turn: bool) -> Any:
    """Return the weights of another normalizer than softmax, 0 where a score is -inf."""
    one = s.dtype.type(1)
    if isinstance(normalizer, steps.Sigmoid):
        return one / (one + np.exp(-s))
    if not isinstance(normalizer, steps.Sparsemax):
        raise TypeError(f"{normalizer!r} is not a known normalizer")
    highest = np.max(s, axis=-1, keepdims=True, initial=-np.inf)
    s = s - np.where(np.isneginf(highest), s.dtype.type(0), highest)
    # The largest number of keys that are all above their common threshold.
    ordered = np.sort(s, axis=-1)[..., ::-1]
    counts = np.arange(1, s.shape[-1] + 1, dtype=s.dtype)
    within = ordered > (np.cumsum(ordered, axis=-1, dtype=s.dtype) - one) / counts
    number = np.sum(within, axis=-1, keepdims=True, dtype=s.dtype)
    total = row_sums(np.where(within, ordered, s.dtype.type(0)), in_turn)
    over = np.maximum(s - (total - one) / number, s.dtype.type(0))
    return np.where(np.isneginf(s), s.dtype.type(0), over)


def norm(x: Any, in_turn: bool) -> Any:
    """Return the Euclidean norm over the last axis, keeping the axis."""
    return np.sqrt(row_sums(x * x, in_turn)).astype(x.dtype)


def row_sums(x: Any, in_turn: bool) -> Any:
    """Return the sums over the last axis, keeping the axis."""
    return product_of(x, np.ones_like(x, shape=(x.shape[-1], 1)), in_turn)


def product_of(a: Any, b: Any, in_turn: bool) -> Any:
    """Return `a @ b` in the dtype of `a`, summed in NumPy's order or one after another."""
    if not in_turn:
        return (a @ b).astype(a.dtype)
    shape = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    result = np.zeros((*shape, a.shape[-2], b.shape[-1]), a.dtype)
    for n in range(a.shape[-1]):
        result += a[..., n : n + 1] * b[..., n : n + 1, :]
    return result
