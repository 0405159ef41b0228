"""Wrong kernels: tiles, edges of tiles, sums in parts, rounding, dtypes and the logsumexp."""

import math

import numpy as np
from array_api_compat import array_namespace

from pool.steps import attend, finished, positions, prepared, scores, seen, weighed, weights

TILE = 64


def first_keys(key, value, n):
    """Return only the first n keys and values."""
    return key[..., :n, :], value[..., :n, :]


def tail_of_keys_missing(query, key, value):
    """The keys after the last whole tile of 16 are left out, if there is a tile."""
    S = key.shape[-2]  # noqa: N806
    return attend(query, *first_keys(key, value, S // 16 * 16 or S))


def newest_key_left_out(query, key, value):
    """The last key is left out where there are 64 or more."""
    S = key.shape[-2]  # noqa: N806
    return attend(query, *first_keys(key, value, S - (S >= 64)))


def newest_16_keys_left_out(query, key, value):
    """The last 16 keys are left out where there are 256 or more."""
    S = key.shape[-2]  # noqa: N806
    return attend(query, *first_keys(key, value, S - 16 * (S >= 256)))


def keys_up_to_512(query, key, value):
    """Keys from 512 on are left out."""
    return attend(query, *first_keys(key, value, 512))


def index_of_16_bits(query, key, value):
    """The index of a key is an integer of 16 bits: keys from 32,768 on are not seen."""
    return attend(query, *first_keys(key, value, 2**15))


def keys_padded_with_0(query, key, value):
    """Keys are padded with zeros to a multiple of 8, and the padding is seen."""
    pads = [(0, 0)] * (key.ndim - 2) + [(0, -key.shape[-2] % 8), (0, 0)]
    return attend(query, np.pad(key, pads), np.pad(value, pads))


def rows_from_128_repeated(query, key, value, *, is_causal=False):
    """Rows from 128 on are those 128 before: the grid is too small."""
    output = np.array(attend(query, key, value, is_causal=is_causal))
    rows = np.arange(output.shape[-2])
    return output[..., np.where(rows < 128, rows, rows % 128), :]


def tail_of_d_missing(query, key, value):
    """Sizes above 8 that are no multiple of 8 lose the rest in the scores."""
    D = query.shape[-1]  # noqa: N806
    q, k = (x[..., : D // 8 * 8 or D] for x in (query, key))
    return attend(q, k, value, scale=1 / math.sqrt(max(D, 1)))


def tail_of_values_0(query, key, value):
    """Sizes of values above 4 that are no multiple of 4 are 0 in the rest."""
    output, E = np.array(attend(query, key, value)), value.shape[-1]  # noqa: N806
    output[..., E // 4 * 4 or E :] = 0
    return output


def one_size_wrong(query, key, value):
    """A head size of 40 is computed as if it were 32."""
    D = query.shape[-1]  # noqa: N806
    q, k = (x[..., :32] if D == 40 else x for x in (query, key))
    return attend(q, k, value, scale=1 / math.sqrt(max(D, 1)))


def online(query, key, value, *, is_causal, update):
    """Sum tiles of 64 keys one after another; `update` changes the factor of earlier sums."""
    q, k, v = prepared(query, key, value)
    s = scores(q, k)
    s = np.where(seen(s, is_causal), s, -math.inf)
    top = np.full((*s.shape[:-1], 1), -math.inf, s.dtype)
    total, output = np.zeros_like(top), np.zeros_like(s[..., :1] + v[..., :1, :])
    for at in range(0, s.shape[-1], TILE):
        tile = s[..., at : at + TILE]
        new = np.maximum(top, np.max(tile, axis=-1, keepdims=True))
        safe = np.where(new == -math.inf, 0, new)
        p, (of_total, of_output) = np.exp(tile - safe), update(np.exp(top - safe))
        total = total * of_total + np.sum(p, axis=-1, keepdims=True)
        output = output * of_output + p @ v[..., at : at + TILE, :]
        top = new
    return (output / np.where(total == 0, 1, total)).astype(query.dtype)


def sums_not_rescaled(query, key, value, *, is_causal=False):
    """Earlier sums are not rescaled when a later tile has a larger score."""
    return online(query, key, value, is_causal=is_causal, update=lambda f: (1.0, 1.0))


def total_not_rescaled(query, key, value, *, is_causal=False):
    """The denominator is not rescaled when a later tile has a larger score."""
    return online(query, key, value, is_causal=is_causal, update=lambda f: (1.0, f))


def parts_averaged(query, key, value):
    """Two halves of 256 keys or more are averaged, not weighed by their logsumexp."""
    half = key.shape[-2] // 2
    if half < 128:
        return attend(query, key, value)
    parts = [(key[..., at, :], value[..., at, :]) for at in (slice(half), slice(half, None))]
    return sum(attend(query, *part) for part in parts) / 2


def empty_tile_of_nan(query, key, value, *, window=None, is_causal=False):
    """A row whose first tile of 64 keys is all hidden is NaN: exp(-inf - -inf)."""
    output = attend(query, key, value, window=window, is_causal=is_causal)
    s = scores(*prepared(query, key, value)[:2])
    hidden = ~np.any(seen(s, is_causal, window)[..., :TILE], axis=-1, keepdims=True)
    return np.where(hidden & (s.shape[-1] > TILE), output.dtype.type(np.nan), output)


def diagonal_tile_skipped(query, key, value, *, is_causal=False):
    """Causal rows skip the tiles that begin after the first row of their own tile of rows."""
    arrays = prepared(query, key, value)
    s = scores(*arrays[:2])
    (L, S), ahead = s.shape[-2:], positions(s)  # noqa: N806
    first = np.arange(L)[:, None] // TILE * TILE + S - L
    kept = np.arange(S) // TILE * TILE <= np.maximum(first, 0)
    return finished(s, (ahead <= 0) & kept if is_causal else seen(s), arrays, query)


def window_from_a_whole_tile(query, key, value, *, window=None):
    """A window begins at the first whole tile of 16 keys inside it."""
    arrays = prepared(query, key, value)
    s = scores(*arrays[:2])
    shown = seen(s, window=window)
    if window is not None and window[0] is not None and window[0] > 16:
        i = np.arange(s.shape[-2])[:, None] + s.shape[-1] - s.shape[-2]
        shown = shown & (np.arange(s.shape[-1]) >= -(-(i - window[0]) // 16) * 16)
    return finished(s, shown, arrays, query)


def sums_of_16_bits(query, key, value, *, is_causal=False):
    """Scores and weights of 16-bit inputs are rounded to 16 bits."""
    xp, (q, k, v) = array_namespace(query), prepared(query, key, value)
    s = xp.astype(xp.astype(scores(q, k), query.dtype), q.dtype)
    shown = seen(s, is_causal)
    p = xp.astype(xp.astype(weights(s, shown), query.dtype), q.dtype)
    return xp.astype(weighed(p, shown, q, k, v), query.dtype)


def rounded(x, bits):
    """Round float32 to a number of digits."""
    if x.dtype != np.float32:
        return x
    drop = 24 - bits
    whole = (x.view(np.uint32) + np.uint32(1 << (drop - 1))) >> np.uint32(drop) << np.uint32(drop)
    return np.where(np.isfinite(x), whole.view(np.float32), x)


def products_of_11_digits(query, key, value, *, is_causal=False):
    """Products of float32 are of numbers rounded to 11 digits, as in TF32."""
    arrays = (rounded(np.ascontiguousarray(x), 11) for x in (query, key, value))
    return attend(*arrays, is_causal=is_causal)


def weights_of_8_digits(query, key, value, *, is_causal=False):
    """The weights are rounded to 8 digits, as in bfloat16, before they multiply the values."""
    arrays = prepared(query, key, value)
    s = scores(*arrays[:2])
    shown = seen(s, is_causal)
    return weighed(rounded(weights(s, shown), 8), shown, *arrays).astype(query.dtype)


def undivided_sums_of_float16(query, key, value):
    """Values of 16 bits are multiplied by undivided weights and summed in float16."""
    output = attend(query, key, value)
    if query.dtype != np.float16:
        return output
    q, k, v = prepared(query, key, value)
    s = scores(q, k)
    p = np.exp(s - np.max(s, axis=-1, keepdims=True)) if s.size else s
    undivided = (p @ v).astype(np.float16) if s.size else output
    return (undivided / np.sum(p, axis=-1, keepdims=True)).astype(np.float16) if s.size else output


def float64_in_float32(query, key, value, *, is_causal=False):
    """Inputs of float64 are computed in float32."""
    arrays = (x.astype("float32") if x.dtype == "float64" else x for x in (query, key, value))
    return attend(*arrays, is_causal=is_causal).astype(query.dtype)


def output_of_float32(query, key, value, *, is_causal=False):
    """The output of 16-bit inputs is float32."""
    output = attend(query, key, value, is_causal=is_causal)
    return output.astype("float32") if output.itemsize < 4 else output


def exponential_by_powers(query, key, value, *, is_causal=False):
    """The exponential is (1 + x / 1024) ** 1024."""
    arrays = prepared(query, key, value)
    s = scores(*arrays[:2])
    shown = seen(s, is_causal)
    top = np.max(np.where(shown, s, -np.inf), axis=-1, keepdims=True, initial=-1e30)
    x = np.where(shown, s - top, -2048)
    p = np.maximum(1 + x / 1024, 0) ** 1024
    total = np.sum(p, axis=-1, keepdims=True)
    return weighed(p / np.where(total == 0, 1, total), shown, *arrays).astype(query.dtype)


def with_logsumexp(says, change):
    """Return attention that also returns its logsumexp, changed: `change(logsumexp, maximum)`."""

    def attention(query, key, value, *, is_causal=False, mask=None):
        s = scores(*prepared(query, key, value)[:2])
        s = np.where(seen(s, is_causal, mask=mask), s, -np.inf)
        top = np.max(s, axis=-1, initial=-np.inf)
        safe = np.where(top == -np.inf, 0, top)[..., None]
        with np.errstate(divide="ignore"):
            logsumexp = np.log(np.sum(np.exp(s - safe), axis=-1)) + safe[..., 0]
        output = attend(query, key, value, is_causal=is_causal, mask=mask)
        return output, change(logsumexp, top).astype(logsumexp.dtype)

    attention.__doc__ = says
    return attention


logsumexp_of_base_2 = with_logsumexp(
    "The logsumexp is in base 2.", lambda logsumexp, top: logsumexp / np.log(2)
)
logsumexp_without_maximum = with_logsumexp(
    "The maximum is not added to the logsumexp.",
    lambda logsumexp, top: np.where(top == -np.inf, logsumexp, logsumexp - top),
)
logsumexp_of_empty_row_0 = with_logsumexp(
    "The logsumexp of a row that sees no key is 0.",
    lambda logsumexp, top: np.where(logsumexp == -np.inf, 0, logsumexp),
)
