"""The steps of attention that the wrong functions share, each right, for NumPy and torch."""

import math

from array_api_compat import array_namespace


def wide(*arrays):
    """Return arrays in float32 if they are of 16 bits, and as they are else."""
    xp = array_namespace(*arrays)
    return [xp.astype(x, xp.float32) if x.itemsize < 4 else x for x in arrays]


def grouped(query, *arrays):
    """Repeat key heads, so that query head h reads key head h // (H / G)."""
    xp, times = array_namespace(query), 1
    if query.ndim > 2 and arrays[0].shape[-3] and query.shape[-3] != arrays[0].shape[-3]:
        times = query.shape[-3] // arrays[0].shape[-3]
    return [xp.repeat(x, times, axis=-3) if times > 1 else x for x in arrays]


def prepared(query, key, value):
    """Return query, key and value in the dtype of the sums, with a key head for each query head."""
    query, key, value = wide(query, key, value)
    return query, *grouped(query, key, value)


def clean(x):
    """Return an array with 0 for what is not finite."""
    xp = array_namespace(x)
    return xp.where(xp.isfinite(x), x, 0.0)


def scores(query, key, scale=None):
    """Return scale · q·k."""
    scale = 1 / math.sqrt(max(query.shape[-1], 1)) if scale is None else scale
    return query @ clean(key).mT * scale


def positions(s, offset=None):
    """Return how far key j is ahead of row i, (L, S): rows are the newest of the keys."""
    xp, (L, S) = array_namespace(s), s.shape[-2:]  # noqa: N806
    i, j = (xp.arange(n, device=s.device) for n in (L, S))
    return j - (i[:, None] + (S - L if offset is None else offset))


def seen(s, is_causal=False, window=None, mask=None, bias=None):
    """Return which keys are visible to which rows, of the shape of the scores."""
    xp, ahead = array_namespace(s), positions(s)
    left, right = window or (None, None)
    right = min(right or 0, 0) if is_causal else right
    shown = xp.ones_like(s, dtype=xp.bool)
    shown = shown if right is None else shown & (ahead <= right)
    shown = shown if left is None else shown & (ahead >= -left)
    shown = shown if mask is None else shown & mask
    return shown if bias is None else shown & (bias != -math.inf)


def weights(s, shown, sinks=None):
    """Return the softmax of the visible scores; a row that sees no key has weights of 0."""
    xp = array_namespace(s)
    s = xp.where(shown, s, -math.inf)
    top = xp.max(s, axis=-1, keepdims=True) if s.shape[-1] else s.sum(axis=-1, keepdims=True)
    if sinks is not None:
        sinks = xp.astype(sinks, s.dtype)[:, None, None] if s.ndim > 2 else sinks
        top = xp.maximum(top, sinks)
    top = xp.where(top == -math.inf, 0.0, top)
    p = xp.exp(s - top)
    total = xp.sum(p, axis=-1, keepdims=True)
    if sinks is not None:
        total = total + xp.exp(sinks - top)
    return p / xp.where(total == 0, 1.0, total)


def weighed(p, shown, query, key, value):
    """Return the sum of the values; NaN only in rows that see a key which is not finite."""
    xp = array_namespace(p)
    output = p @ clean(value)
    wrong = ~xp.isfinite(xp.sum(key, axis=-1) + 0 * xp.sum(value, axis=-1))[..., None, :]
    touched = xp.any(shown & wrong, axis=-1, keepdims=True)
    return xp.where(touched, math.nan, output) if bool(xp.any(wrong)) else output


def finished(s, shown, arrays, query, sinks=None):
    """Return the output from scores, in the dtype of the query."""
    shown = shown & array_namespace(s).ones_like(s, dtype=array_namespace(s).bool)
    output = weighed(weights(s, shown, sinks), shown, *arrays)
    return array_namespace(s).astype(output, query.dtype)


def attend(query, key, value, *, is_causal=False, window=None, mask=None, bias=None, scale=None,
           softcap=None, sinks=None):  # fmt: skip
    """Attention, right: the control."""
    xp, arrays = array_namespace(query), prepared(query, key, value)
    s = scores(*arrays[:2], scale)
    s = s if softcap is None else softcap * xp.tanh(s / softcap)
    s = s if bias is None else s + xp.where(bias == -math.inf, 0.0, bias)
    return finished(s, seen(s, is_causal, window, mask, bias), arrays, query, sinks)


def gathered(pool, table):
    """Return the keys of pages, (pages, G, size, D), as those of items, (B, G, S, D)."""
    xp = array_namespace(pool)
    turned = xp.permute_dims(pool[table], (0, 2, 1, 3, 4))  # of (B, pages, G, size, D)
    return xp.reshape(turned, (*turned.shape[:2], -1, turned.shape[-1]))


def serve(query, key, value, *, key_lengths=None, block_table=None, is_causal=False, window=None,
          scale=None):  # fmt: skip
    """Attention over a cache or pages, right: the control."""
    if block_table is not None:
        key, value = (gathered(x, block_table) for x in (key, value))
    arrays = prepared(query, key, value)
    s = scores(*arrays[:2], scale)
    return finished(s, ended(s, key_lengths, is_causal, window), arrays, query)


def ended(s, key_lengths=None, is_causal=False, window=None, newest=None):
    """Return which keys are visible; the newest row is at the last key of its item."""
    xp, (L, S) = array_namespace(s), s.shape[-2:]  # noqa: N806
    if key_lengths is None:
        return seen(s, is_causal, window)
    ends = xp.reshape(xp.asarray(key_lengths, device=s.device), (-1, 1, 1, 1))
    i, j = (xp.arange(n, device=s.device) for n in (L, S))
    ahead = j - (i[:, None] + (ends if newest is None else newest) - L)
    left, right = window or (None, None)
    right = min(right or 0, 0) if is_causal else right
    shown = j < ends
    shown = shown if right is None else shown & (ahead <= right)
    return shown if left is None else shown & (ahead >= -left)
