"""Attention row by row in NumPy, and its gradients: what `check_cases.py` checks by default."""

import numpy as np


def attention(
    query, key, value, mask=None, bias=None, is_causal=False, window=None, query_offset=None,
    key_lengths=None, block_table=None, scale=None, softcap=None, sinks=None, layout="...HLD",
):  # fmt: skip
    """Return the output and the logsumexp, summed in float32, or float64 for float64."""
    options = mask, bias, is_causal, window, query_offset, key_lengths
    q, k, v = (widened(x, layout) for x in (query, key, value))
    k, v = (joined(x, block_table) for x in (k, v))
    q, k, v = of_one_batch(q, k, v)
    output = np.zeros((*q.shape[:-1], v.shape[-1]), q.dtype)
    logsumexp = np.zeros((*q.shape[:-1], 1), q.dtype)
    for at, head, keys, added in visible(q, k, options):
        weights, lse, _ = weigh(q[at], k[head][keys], added, scale, softcap, sink_of(sinks, at))
        output[at], logsumexp[at] = weights @ v[head][keys], lse
    logsumexp = as_called(logsumexp, query, layout)[..., 0]
    return as_called(output, query, layout).astype(query.dtype), logsumexp


def gradients(
    query, key, value, cotangent, mask=None, bias=None, is_causal=False, window=None,
    query_offset=None, key_lengths=None, scale=None, softcap=None, sinks=None, layout="...HLD",
):  # fmt: skip
    """Return the gradients of sum(output · cotangent) by name."""
    options = mask, bias, is_causal, window, query_offset, key_lengths
    q, k, v, g = of_one_batch(*(widened(x, layout) for x in (query, key, value, cotangent)))
    of_q, of_k, of_v = (np.zeros_like(x) for x in (q, k, v))
    of_bias = np.zeros((*q.shape[:-1], k.shape[-2]), q.dtype)
    of_sinks = np.zeros(q.shape[:-1], q.dtype)
    factor = q.dtype.type(max(q.shape[-1], 1) ** -0.5 if scale is None else scale)
    for at, head, keys, added in visible(q, k, options):
        sink = sink_of(sinks, at)
        weights, lse, slope = weigh(q[at], k[head][keys], added, scale, softcap, sink)
        products = v[head][keys] @ g[at]
        mean = weights @ products
        of_scores = weights * (products - mean)
        of_bias[at][keys] = of_scores
        of_sinks[at] = -np.exp(sink - lse) * mean if np.isfinite(lse) else 0
        of_scores = of_scores * slope
        of_q[at] = factor * (of_scores @ k[head][keys])
        of_k[head][keys] += factor * np.outer(of_scores, q[at])
        of_v[head][keys] += np.outer(weights, g[at])
    named = {"query": (of_q, query), "key": (of_k, key), "value": (of_v, value)}
    result = {
        name: as_called(summed(x, widened(like, layout).shape), like, layout)
        for name, (x, like) in named.items()
    }
    result |= {} if bias is None else {"bias": summed(of_bias, bias.shape)}
    result |= {} if sinks is None else {"sinks": summed(of_sinks.sum(-1), sinks.shape)}
    return {name: x.astype(query.dtype) for name, x in result.items()}


def visible(q, k, options):
    """Yield each row, its key head, the keys that it sees, and their bias."""
    mask, bias, is_causal, window, query_offset, key_lengths = options
    *batch, heads, length, _ = q.shape
    per_key, count = heads // max(k.shape[-3], 1), k.shape[-2]
    ends = np.broadcast_to(count if key_lengths is None else key_lengths, batch)
    firsts = np.broadcast_to(ends - length if query_offset is None else query_offset, batch)
    left, right = window or (None, None)
    j, shape = np.arange(count), (*batch, heads, length, count)
    mask, bias = (x if x is None else np.broadcast_to(x, shape) for x in (mask, bias))
    for at in np.ndindex(*q.shape[:-1]):
        *item, h, i = at
        position = firsts[tuple(item)] + i
        seen = j < ends[tuple(item)]
        if is_causal:
            seen &= j <= position
        if left is not None:
            seen &= j >= position - left
        if right is not None:
            seen &= j <= position + right
        if mask is not None:
            seen &= mask[at]
        if bias is not None:
            seen &= bias[at] != -np.inf
        keys = np.flatnonzero(seen)
        added = 0 if bias is None else bias[at][keys].astype(q.dtype)
        yield at, (*item, h // per_key), keys, added


def weigh(q, keys, bias, scale, softcap, sink):
    """Return the weights of the keys of a row, the logsumexp, and the slope of the softcap."""
    scores = keys @ (q * q.dtype.type(max(len(q), 1) ** -0.5 if scale is None else scale))
    slope = np.ones_like(scores)
    if softcap is not None:
        tanh = np.tanh(scores / q.dtype.type(softcap))
        scores, slope = q.dtype.type(softcap) * tanh, 1 - tanh * tanh
    scores = scores + bias
    highest = max(np.max(scores, initial=-np.inf), sink)
    if highest == -np.inf:
        return np.zeros_like(scores), highest, slope
    weights = np.exp(scores - highest)
    total = weights.sum() + np.exp(sink - highest)
    return weights / total, highest + np.log(total), slope


def sink_of(sinks, at):
    """Return the sink of a row's head, -inf if there is none."""
    return -np.inf if sinks is None else sinks[at[-2]].astype(np.float64)


def widened(x, layout):
    """Return an array in the dtype of the sums, heads first."""
    x = x.astype(np.float64 if x.dtype == np.float64 else np.float32)
    x = x[None] if x.ndim == 2 else x
    return np.swapaxes(x, -3, -2) if layout == "...LHD" else x


def joined(pool, table):
    """Return the keys of each item, (items, G, S, D), from a pool of pages (pages, G, page, D)."""
    if table is None:
        return pool
    items, pages = table.shape
    taken = np.moveaxis(pool[table], 1, 2)  # (items, G, pages, page, D)
    return taken.reshape(items, pool.shape[1], pages * pool.shape[2], pool.shape[3])


def of_one_batch(*arrays):
    """Return copies whose batch axes are broadcast to one another."""
    batch = np.broadcast_shapes(*(x.shape[:-3] for x in arrays))
    return [np.broadcast_to(x, batch + x.shape[-3:]).copy() for x in arrays]


def as_called(x, like, layout):
    """Return a result with heads first in the caller's rank and layout."""
    if like.ndim == 2:
        return x[0]
    return np.swapaxes(x, -3, -2) if layout == "...LHD" else x


def summed(x, shape):
    """Return the sum over the axes along which an array of this shape was broadcast."""
    x = x.sum(axis=tuple(range(x.ndim - len(shape))))
    return x.sum(axis=tuple(n for n, length in enumerate(shape) if length == 1), keepdims=True)
