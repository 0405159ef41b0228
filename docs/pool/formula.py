"""Wrong scores, softmaxes and heads."""

import math

import numpy as np
from array_api_compat import array_namespace

from pool.steps import attend, finished, prepared, scores, seen, weighed, weights


def unscaled(query, key, value, *, is_causal=False):
    """Scores are not scaled."""
    return attend(query, key, value, is_causal=is_causal, scale=1.0)


def scale_of_d(query, key, value, *, is_causal=False):
    """Scores are divided by D, not by its root."""
    return attend(query, key, value, is_causal=is_causal, scale=1 / max(query.shape[-1], 1))


def scale_of_value_size(query, key, value, *, is_causal=False):
    """Scores are divided by the root of the size of the values."""
    scale = 1 / math.sqrt(max(value.shape[-1], 1))
    return attend(query, key, value, is_causal=is_causal, scale=scale)


def scale_of_padded_size(query, key, value, *, is_causal=False):
    """The scale is of a head size that was padded to a multiple of 8."""
    scale = 1 / math.sqrt(max(-(-query.shape[-1] // 8) * 8, 1))
    return attend(query, key, value, is_causal=is_causal, scale=scale)


def scale_off_by_one_percent(query, key, value, *, is_causal=False):
    """The scale is 1 % too large."""
    scale = 1.01 / math.sqrt(max(query.shape[-1], 1))
    return attend(query, key, value, is_causal=is_causal, scale=scale)


def scale_ignored(query, key, value, *, is_causal=False, scale=None):
    """The scale that a caller gives is ignored."""
    return attend(query, key, value, is_causal=is_causal)


def scale_of_zero_is_default(query, key, value, *, scale=None):
    """A scale of 0 is taken as none: `scale or default`."""
    return attend(query, key, value, scale=scale or None)


def softmax_over_rows(query, key, value):
    """The softmax is over the rows."""
    arrays = prepared(query, key, value)
    s = scores(*arrays[:2]).mT
    p = weights(s, seen(s)).mT
    output = weighed(p, seen(p), *arrays)
    return array_namespace(query).astype(output, query.dtype)


def softmax_without_maximum(query, key, value, *, is_causal=False):
    """No maximum is subtracted before the exponential."""
    xp, arrays = array_namespace(query), prepared(query, key, value)
    s = scores(*arrays[:2])
    shown = seen(s, is_causal)
    p = xp.where(shown, xp.exp(s), 0.0)
    total = xp.sum(p, axis=-1, keepdims=True)
    output = weighed(p / xp.where(total == 0, 1.0, total), shown, *arrays)
    return xp.astype(output, query.dtype)


def maximum_at_least_0(query, key, value, *, is_causal=False):
    """The running maximum begins at 0, not at -inf: rows of low scores underflow."""
    xp, arrays = array_namespace(query), prepared(query, key, value)
    s = scores(*arrays[:2])
    shown = seen(s, is_causal)
    top = xp.max(xp.where(shown, s, 0.0), axis=-1, keepdims=True) if s.shape[-1] else 0.0
    p = xp.where(shown, xp.exp(s - xp.where(top > 0, top, 0.0)), 0.0)
    total = xp.sum(p, axis=-1, keepdims=True)
    output = weighed(p / xp.where(total == 0, 1.0, total), shown, *arrays)
    return xp.astype(output, query.dtype)


def scores_clipped(query, key, value, *, is_causal=False):
    """Scores are clipped at 20 in size, as if against overflow."""
    xp, arrays = array_namespace(query), prepared(query, key, value)
    s = xp.clip(scores(*arrays[:2]), -20.0, 20.0)
    return finished(s, seen(s, is_causal), arrays, query)


def small_weights_dropped(query, key, value, *, is_causal=False):
    """Weights below exp(-6) of the largest are 0."""
    xp, arrays = array_namespace(query), prepared(query, key, value)
    s = scores(*arrays[:2])
    shown = seen(s, is_causal)
    top = xp.max(xp.where(shown, s, -math.inf), axis=-1, keepdims=True) if s.shape[-1] else s
    return finished(xp.where(s < top - 6, -math.inf, s), shown, arrays, query)


def softcap_after_bias(query, key, value, *, bias=None, softcap=None):
    """The softcap comes after the bias."""
    xp, arrays = array_namespace(query), prepared(query, key, value)
    s = scores(*arrays[:2])
    s = s if bias is None else s + xp.where(bias == -math.inf, 0.0, bias)
    s = s if softcap is None else softcap * xp.tanh(s / softcap)
    return finished(s, seen(s, bias=bias), arrays, query)


def softcap_without_division(query, key, value, *, softcap=None):
    """The softcap is c · tanh(s), without the division by c."""
    xp, arrays = array_namespace(query), prepared(query, key, value)
    s = scores(*arrays[:2])
    s = s if softcap is None else softcap * xp.tanh(s)
    return finished(s, seen(s), arrays, query)


def bias_scaled(query, key, value, *, bias=None):
    """The scale multiplies the bias too."""
    scale = 1 / math.sqrt(max(query.shape[-1], 1))
    return attend(query, key, value, bias=None if bias is None else bias * scale)


def bias_of_first_head(query, key, value, *, bias=None):
    """All heads have the bias of the first."""
    return attend(query, key, value, bias=bias[..., :1, :, :] if np.ndim(bias) > 2 else bias)


def sinks_of_0(query, key, value, *, sinks=None):
    """Every sink is 0: exp(0) is added to the sum of each row."""
    return attend(query, key, value, sinks=None if sinks is None else 0 * sinks)


def mean_of_values(query, key, value):
    """Every row is the mean of the values."""
    return attend(query, key, value, scale=0.0)


def zeros(query, key, value):
    """Every row is 0."""
    return 0 * attend(query, key, value)


def half_of_d(query, key, value, *, is_causal=False):
    """Only the first half of each query and key counts."""
    D = query.shape[-1]  # noqa: N806
    q, k = (x[..., : (D + 1) // 2] for x in (query, key))
    return attend(q, k, value, is_causal=is_causal, scale=1 / math.sqrt(max(D, 1)))


def heads_in_turn(query, key, value, *, is_causal=False):
    """Query head h reads key head h % G."""
    if query.ndim > 2 and key.shape[-3] and query.shape[-3] != key.shape[-3]:
        xp, G = array_namespace(query), key.shape[-3]  # noqa: N806
        key, value = (xp.concat([x] * (query.shape[-3] // G), axis=-3) for x in (key, value))
    return attend(query, key, value, is_causal=is_causal)


def heads_after_length(query, key, value):
    """The axes of heads and length change places: each token attends among its heads."""
    if query.ndim < 3 or query.shape[-2] != key.shape[-2]:
        return attend(query, key, value)
    swapped = (array_namespace(x).moveaxis(x, -2, -3) for x in (query, key, value))
    output = attend(*swapped)
    return array_namespace(output).moveaxis(output, -2, -3)


def heads_scrambled(query, key, value, *, is_causal=False):
    """The output, heads after length, is reshaped to heads first instead of transposed."""
    output = attend(query, key, value, is_causal=is_causal)
    xp = array_namespace(output)
    return xp.reshape(xp.moveaxis(output, -2, -3), output.shape) if output.ndim > 2 else output


def keys_of_first_item(query, key, value):
    """All items of a batch read the keys of the first."""
    return attend(query, key[:1] if key.ndim > 3 else key, value)


def strides_ignored(query, key, value):
    """Memory is read as if arrays were contiguous."""
    return attend(*(x.T.ravel().reshape(x.shape) if x.flags.f_contiguous else x
                    for x in (query, key, value)))  # fmt: skip


def query_scaled_in_place(query, key, value):
    """The query of the caller is multiplied by the scale."""
    query *= query.dtype.type(1 / math.sqrt(max(query.shape[-1], 1)))
    return attend(query, key, value, scale=1.0)
