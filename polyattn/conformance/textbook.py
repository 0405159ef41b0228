"""Attention as anyone writes it in NumPy: the yardstick of accuracy.

It must be ordinary: a page, every intermediate rounded to one dtype. How far it is from the
exact result is how far any kernel may be, and some; see `tolerance`.
"""

# ruff: noqa: N806 -- the letters are those of the semantics

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from polyattn.conformance.oracle import as_called, heads_first, lift

__all__ = ["ORDERS", "textbook"]

#: The options of `textbook` that change the order of evaluation and nothing else, as they go
#: together: how a loop over the keys goes that is written in C, and how kernels go that subtract no
#: maximum where scores are small.
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

#: Scores whose exponentials neither overflow nor lose digits, in any dtype that is summed in.
SMALL = 20.0


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
    scale: float | None = None,
    softcap: float | None = None,
    score_mod: Callable[..., Any] | None = None,
    sinks: Any = None,
    layout: str = "...HLD",
    coordinates_in_turn: bool = False,
    keys_reversed: bool = False,
    keys_in_turn: bool = False,
    scale_first: bool = False,
    divide_last: bool = False,
    without_maximum: bool = False,
) -> tuple[Any, Any]:
    """Attention as a page of NumPy, wholly in the inputs' dtype: `(output, logsumexp)`.

    The last six options are the same formula in another order of evaluation: see `ORDERS`. What
    they change in the result is rounding and nothing else.
    """
    dtype = np.asarray(query).dtype
    q, k, v = (heads_first(np.asarray(x), layout) for x in (query, key, value))
    (H, L, D), (G, S) = q.shape[-3:], k.shape[-3:-1]
    k, v = (np.repeat(x, H // max(G, 1), axis=-3) for x in (k, v))
    batch = np.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])
    b = np.arange(math.prod(batch)).reshape(*batch, 1, 1, 1)
    h, i, j = (np.arange(n).reshape(at) for n, at in ((H, (-1, 1, 1)), (L, (-1, 1)), (S, (-1,))))

    def rounded(x: Any) -> Any:
        return np.asarray(x).astype(dtype)

    scale = rounded(1 / math.sqrt(max(D, 1)) if scale is None else scale)
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
    if without_maximum:
        highest = np.where(np.abs(lift(highest)) < SMALL, rounded(0), highest)
    weights = rounded(np.exp(s - highest))
    ones = np.ones_like(v, shape=(*v.shape[:-1], 1))
    denominator = product_of(weights, ones, keys_in_turn)
    if sinks is not None:
        denominator = denominator + rounded(np.exp(sink - highest))
    divisor = np.where(denominator == 0, rounded(1), denominator)
    before, after = (rounded(1), divisor) if divide_last else (divisor, rounded(1))
    output = product_of(weights / before, v, keys_in_turn) / after
    logsumexp = highest + rounded(np.log(denominator))
    output, logsumexp = (as_called(x, np.ndim(query), layout) for x in (output, logsumexp))
    return output, logsumexp[..., 0]


def product_of(a: Any, b: Any, in_turn: bool) -> Any:
    """`a @ b` in the dtype of `a`, summed in the library's order, or strictly one after another."""
    if not in_turn:
        return (a @ b).astype(a.dtype)
    shape = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    result = np.zeros((*shape, a.shape[-2], b.shape[-1]), a.dtype)
    for n in range(a.shape[-1]):
        result += a[..., n : n + 1] * b[..., n : n + 1, :]
    return result
