"""Wrong masks, windows and positions."""

import math

from array_api_compat import array_namespace

from pool.steps import attend, clean, finished, positions, prepared, scores, seen, weighed, weights


def moved(query, key, value, by, offset=None, **options):
    """Attend where each row sees `by` more keys, or rows count from another key."""
    arrays = prepared(query, key, value)
    s = scores(*arrays[:2])
    return finished(s, seen(s, **options) & (positions(s, offset) <= by), arrays, query)


def causal_ignored(query, key, value, *, is_causal=False):
    """A causal call sees all keys."""
    return attend(query, key, value)


def causal_from_the_first_key(query, key, value, *, is_causal=False):
    """Causal rows count from the first key, although there are more keys than rows."""
    return moved(query, key, value, 0 if is_causal else math.inf, 0)


def causal_and_the_next_key(query, key, value, *, is_causal=False):
    """A causal row sees the next key too."""
    return moved(query, key, value, 1 if is_causal else math.inf)


def causal_without_itself(query, key, value, *, is_causal=False):
    """A causal row does not see its own key."""
    return moved(query, key, value, -1 if is_causal else math.inf)


def causal_for_one_row(query, key, value, *, is_causal=False):
    """One row of a causal call sees only the first key: the mask is made for its length."""
    one = query.shape[-2] == 1
    return moved(query, key, value, 0 if is_causal else math.inf, 0 if one else None)


def mask_ignored_if_causal(query, key, value, *, mask=None, is_causal=False):
    """A causal call ignores its mask."""
    return attend(query, key, value, mask=None if is_causal else mask, is_causal=is_causal)


def mask_inverted(query, key, value, *, attn_mask=None):
    """True in a mask leaves a key out."""
    is_bool = attn_mask is not None and attn_mask.dtype == array_namespace(query).bool
    return attend(query, key, value, **{"mask": ~attn_mask} if is_bool else {"bias": attn_mask})


def mask_added(query, key, value, *, attn_mask=None):
    """A mask is added to the scores as 0 and 1."""
    xp = array_namespace(query)
    bias = None if attn_mask is None else xp.astype(attn_mask, query.dtype)
    return attend(query, key, value, bias=bias)


def mask_of_first_item(query, key, value, *, mask=None):
    """All items have the mask of the first."""
    return attend(query, key, value, mask=mask[:1] if mask is not None and mask.ndim > 3 else mask)


def mask_after_softmax(query, key, value, *, mask=None, is_causal=False):
    """Hidden weights are set to 0 after the softmax, and the rest is not divided again."""
    xp, arrays = array_namespace(query), prepared(query, key, value)
    s = scores(*arrays[:2])
    shown = seen(s, is_causal, mask=mask)
    p = xp.where(shown, weights(s, seen(s)), 0.0)
    return xp.astype(weighed(p, shown, *arrays), query.dtype)


def hidden_by_least_number(query, key, value, *, mask=None, is_causal=False):
    """Hidden scores become the least number: a row that sees no key is the mean of the values."""
    xp, arrays = array_namespace(query), prepared(query, key, value)
    s = scores(*arrays[:2])
    shown = seen(s, is_causal, mask=mask)
    empty = ~xp.any(shown, axis=-1, keepdims=True)
    return finished(xp.where(shown, s, xp.finfo(s.dtype).min), shown | empty, arrays, query)


def hidden_by_minus_1e4(query, key, value, *, mask=None, is_causal=False):
    """Hidden scores become smaller by 10,000, and may still be the largest."""
    xp, arrays = array_namespace(query), prepared(query, key, value)
    s = scores(*arrays[:2])
    shown = seen(s, is_causal, mask=mask)
    some = xp.any(shown, axis=-1, keepdims=True)
    return finished(s - xp.where(shown, 0.0, 1e4), some & seen(s), arrays, query)


def empty_rows_of_nan(query, key, value, *, mask=None, is_causal=False, bias=None):
    """A row that sees no key is NaN."""
    xp = array_namespace(query)
    output = attend(query, key, value, mask=mask, is_causal=is_causal, bias=bias)
    s = scores(*prepared(query, key, value)[:2])
    empty = ~xp.any(seen(s, is_causal, mask=mask, bias=bias), axis=-1, keepdims=True)
    return xp.where(empty, xp.asarray(math.nan, dtype=output.dtype), output)


def hidden_nan_reaches_the_row(query, key, value, *, mask=None, is_causal=False):
    """Hidden keys have a weight of 0, but 0 · NaN is NaN."""
    xp, (q, k, v) = array_namespace(query), prepared(query, key, value)
    s = scores(q, k)
    return xp.astype(weights(s, seen(s, is_causal, mask=mask)) @ v, query.dtype)


def nan_replaced(query, key, value, *, is_causal=False):
    """NaN and infinity become 0, also where a row sees them."""
    return attend(query, clean(key), clean(value), is_causal=is_causal)


def window_without_its_last_key(query, key, value, *, window=None, is_causal=False):
    """A window of n keys to the left shows n - 1."""
    if window is not None and window[0]:
        window = window[0] - 1, window[1]
    return attend(query, key, value, window=window, is_causal=is_causal)


def window_of_one_key_more(query, key, value, *, window=None, is_causal=False):
    """A window of n keys to the left shows n + 1."""
    if window is not None and window[0] is not None:
        window = window[0] + 1, window[1]
    return attend(query, key, value, window=window, is_causal=is_causal)


def window_of_0_is_none(query, key, value, *, window=None):
    """A window of 0 keys to a side is taken as no bound: `window[0] or None`."""
    window = tuple(end or None for end in window) if window else None
    return attend(query, key, value, window=window)


def window_replaces_causal(query, key, value, *, window=None, is_causal=False):
    """A call with a window is not causal."""
    causal = is_causal and (window is None or (window[1] is None and window[0] is None))
    return attend(query, key, value, window=window, is_causal=causal)


def positions_of_bfloat16(query, key, value, *, is_causal=False):
    """Positions are rounded to 8 digits, as in bfloat16: 257 is 256 and sees its next key."""
    xp, arrays = array_namespace(query), prepared(query, key, value)
    s = scores(*arrays[:2])
    offset = s.shape[-1] - s.shape[-2]

    def rounded(first, n):
        x = xp.astype(xp.arange(first, first + n, device=s.device), xp.float32)
        step = 2.0 ** xp.clip(xp.floor(xp.log2(xp.clip(abs(x), 1.0))) - 7, 0.0)
        return xp.round(x / step) * step

    i, j = rounded(offset, s.shape[-2]), rounded(0, s.shape[-1])
    return finished(s, (j <= i[:, None]) if is_causal else seen(s), arrays, query)


def offset_ignored(query, key, value, *, is_causal=False, query_offset=None):
    """The offset that a caller gives is ignored."""
    return attend(query, key, value, is_causal=is_causal)


def offset_of_first_item(query, key, value, *, is_causal=False, query_offset=None):
    """All items have the offset of the first."""
    if getattr(query_offset, "ndim", 0):
        query_offset = int(query_offset.reshape(-1)[0]) if query_offset.size else 0
    by = 0 if is_causal else math.inf
    return moved(query, key, value, by, query_offset)
