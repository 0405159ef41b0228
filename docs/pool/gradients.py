"""Wrong gradients: right outputs whose backward pass, written by hand, is wrong. On torch."""

import math

import torch

from pool.steps import finished, grouped, scores, seen, weights


class Attention(torch.autograd.Function):
    """Attention with gradients by query, key and value that a rule computes from the weights."""

    @staticmethod
    def forward(ctx, rule, query, key, value, is_causal):
        s = scores(query, key)
        shown = seen(s, is_causal)
        p = weights(s, shown)
        ctx.rule, ctx.is_causal = rule, is_causal
        ctx.save_for_backward(query, key, value, p)
        return finished(s, shown, (query, key, value), query)

    @staticmethod
    def backward(ctx, along):
        query, key, value, p = ctx.saved_tensors
        scale = 1 / math.sqrt(max(query.shape[-1], 1))
        return None, *ctx.rule(query, key, value, p, along, scale), None


def with_rule(rule):
    """Return attention with the gradients of a rule; key heads are repeated before it."""

    def attend(query, key, value, *, is_causal=False):
        batch = torch.broadcast_shapes(*(x.shape[:-3] for x in (query, key, value)))
        key, value = grouped(query, key, value)
        arrays = (x.expand(*batch, *x.shape[-3:]) if x.ndim > 2 else x for x in (query, key, value))
        wide = (x.float() if x.itemsize < 4 else x for x in arrays)
        return Attention.apply(rule, *wide, is_causal).to(query.dtype)

    attend.__doc__ = rule.__doc__
    return attend


def by_scores(p, value, along):
    """Return the gradient by the scores."""
    products = along @ value.mT
    return p * (products - (p * products).sum(-1, keepdim=True))


def rule(q, k, v, p, g, scale):
    """The right gradients."""
    ds = by_scores(p, v, g)
    return ds @ k * scale, ds.mT @ q * scale, p.mT @ g


attend = with_rule(rule)


@with_rule
def query_gradient_unscaled(q, k, v, p, g, scale):
    """The gradient of the query is not scaled."""
    ds = by_scores(p, v, g)
    return ds @ k, ds.mT @ q * scale, p.mT @ g


@with_rule
def row_sum_missing(q, k, v, p, g, scale):
    """The gradient of the softmax lacks the sum over the row."""
    ds = p * (g @ v.mT)
    return ds @ k * scale, ds.mT @ q * scale, p.mT @ g


@with_rule
def row_sum_of_output(q, k, v, p, g, scale):
    """The sum over the row is of the rounded output, of 11 digits."""
    output = (p @ v).half().to(p.dtype)
    ds = p * (g @ v.mT - (g * output).sum(-1, keepdim=True))
    return ds @ k * scale, ds.mT @ q * scale, p.mT @ g


@with_rule
def weights_of_all_keys(q, k, v, p, g, scale):
    """The backward pass forgets the causal mask."""
    return rule(q, k, v, torch.softmax(q @ k.mT * scale, -1) if p.shape[-1] else p, g, scale)


@with_rule
def last_keys_without_gradient(q, k, v, p, g, scale):
    """Keys after the last whole tile of 16 have no gradient, if there is a tile."""
    dq, dk, dv = rule(q, k, v, p, g, scale)
    kept = k.shape[-2] // 16 * 16 or k.shape[-2]
    inside = (torch.arange(k.shape[-2]) < kept)[:, None]
    return dq, dk * inside, dv * inside


@with_rule
def rows_from_64_left_out(q, k, v, p, g, scale):
    """Keys and values have only the gradients of the first 64 rows."""
    dq, *_ = rule(q, k, v, p, g, scale)
    _, dk, dv = rule(q[..., :64, :], k, v, p[..., :64, :], g[..., :64, :], scale)
    return dq, dk, dv


@with_rule
def query_gradient_of_64_elements(q, k, v, p, g, scale):
    """The gradient of the query is 0 from its element 64 on."""
    dq, dk, dv = rule(q, k, v, p, g, scale)
    return dq * (torch.arange(q.shape[-1]) < 64), dk, dv


def one_head_of_each_group(query, key, value, *, is_causal=False):
    """A key head has the gradient of the first query head that reads it, not of all."""
    if query.ndim > 2 and key.shape[-3] and query.shape[-3] != key.shape[-3]:
        times = query.shape[-3] // key.shape[-3]
        first = (torch.arange(query.shape[-3]) % times == 0)[:, None, None]
        key, value = grouped(query, key, value)
        key, value = (torch.where(first, x, x.detach()) for x in (key, value))
    return attend(query, key, value, is_causal=is_causal)


def first_item_of_shared_keys(query, key, value):
    """Keys that all items share have the gradient of the first item only."""
    if query.ndim > 3 and key.shape[0] < query.shape[0]:
        first = (torch.arange(query.shape[0]) == 0).reshape(-1, *[1] * (query.ndim - 1))
        key, value = (torch.where(first, x, x.detach()) for x in (key, value))
    return attend(query, key, value)


def gradient_of_empty_rows_nan(query, key, value, *, is_causal=False):
    """A row that sees no key gives the keys a gradient of NaN: softmax of only -inf."""
    s = scores(query, *grouped(query, key))
    shown = seen(s, is_causal)
    v = grouped(query, value)[0]
    p = torch.softmax(torch.where(shown, s, -math.inf), -1)
    return torch.where(shown.any(-1, keepdim=True), p @ v, 0.0).to(query.dtype)
