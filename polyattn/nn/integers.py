"""Make integers of 8 bits of keys and values, and attend over them; see `QuantizedCache`."""

from __future__ import annotations

from polyattn._base.arrays import Array, accumulator_of, cast, facts_of, library_of
from polyattn._base.host import is_host


def sums(like: Array) -> str:
    """Return the dtype of sums of an array's numbers, which steps have."""
    return accumulator_of(facts_of(like).dtype)


def in_sums(*arrays: Array) -> list[Array]:
    """Return arrays in the dtype of sums."""
    return [cast(library_of(x).xp, x, getattr(library_of(x).xp, sums(x))) for x in arrays]


def quantized(tokens: Array, block: int, axis: int) -> tuple[Array, Array]:
    """Return integers, and the steps that all numbers along an axis of a block share."""
    xp, (*lead, length, size) = library_of(tokens).xp, tokens.shape
    blocks = xp.reshape(tokens, (*lead, length // block, block, size))
    blocks = xp.astype(blocks, getattr(xp, sums(tokens)))
    largest = xp.sum if 0 in blocks.shape else xp.max  # of no numbers it is 0
    steps = largest(xp.abs(blocks), axis=axis, keepdims=True) / 127
    if is_host(steps) and not xp.all(xp.isfinite(steps)):
        raise ValueError(
            "a key or value of the tokens that become integers is NaN or infinite, which integers"
            " cannot be: append finite numbers, or give a KVCache"
        )
    codes = xp.round(blocks / xp.where(steps == 0, xp.ones_like(steps), steps))
    codes = xp.reshape(xp.astype(codes, xp.int8), tokens.shape)
    return codes, xp.squeeze(steps, axis=axis)


def attention_of_row(
    rows: Array, key: tuple[Array, Array], value: tuple[Array, Array]
) -> tuple[Array, Array]:
    """Return output and logsumexp of rows (..., G, R, D), which see all keys.

    Keys and values are floats of integers and their steps, which stay outside of products.
    """
    xp = library_of(rows).xp
    scores = xp.matmul(rows[..., None, :, :] * key[1], xp.matrix_transpose(key[0]))
    top = xp.max(scores, axis=(-3, -1), keepdims=True)
    weights = xp.exp(scores - top)
    total = xp.sum(weights, axis=(-3, -1), keepdims=True)
    summed = xp.matmul(weights * xp.matrix_transpose(value[1]), value[0])
    logsumexp = top + xp.log(total)
    return xp.sum(summed, axis=-3) / total[..., 0, :, :], logsumexp[..., 0, :, 0]
