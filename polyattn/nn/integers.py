"""Make integers of keys and values, and attend over them; see `QuantizedCache`."""

from __future__ import annotations

from polyattn._api.partial import Partial
from polyattn._base.arrays import Array, accumulator_of, cast, facts_of, library_of
from polyattn._base.host import is_host
from polyattn._base.quantized import Quantized
from polyattn.nn.shapes import with_last_axes


def sums(like: Array) -> str:
    """Return the dtype of sums of an array's numbers, which steps have."""
    return accumulator_of(facts_of(like).dtype)


def in_sums(*arrays: Array) -> list[Array]:
    """Return arrays in the dtype of sums."""
    return [cast(library_of(x).xp, x, getattr(library_of(x).xp, sums(x))) for x in arrays]


def quantized(tokens: Array, block: int, axis: int) -> tuple[Array, Array]:
    """Return integers, and the steps that the numbers along an axis of a block share."""
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


def as_integers(codes: Array, steps: Array, axis: int) -> Quantized:
    """Return integers (..., S, size), and steps (..., n, width), as a kernel reads them."""
    if axis == -1:
        steps = with_last_axes(steps, 2, codes.shape[-2], 1)
    return Quantized(codes, steps)


def blocks_of(codes: Array, steps: Array, axis: int) -> tuple[Array, Array]:
    """Return integers as floats (..., n, block, size), and what to multiply them by."""
    xp, (*lead, length, size), blocks = library_of(codes).xp, codes.shape, steps.shape[-2]
    codes = xp.reshape(codes, (*lead, blocks, length // blocks, size))
    return xp.astype(codes, steps.dtype), xp.expand_dims(steps, axis=axis)


def floats_of(codes: Array, steps: Array, axis: int) -> Array:
    """Return what integers stand for."""
    floats, steps = blocks_of(codes, steps, axis)
    return with_last_axes(floats * steps, 3, *codes.shape[-2:])


def attention_of_row(rows: Array, key: tuple[Array, Array], value: tuple[Array, Array]) -> Partial:
    """Return attention of the one row of each head, given as (..., G, R, D), which sees all keys.

    Keys and values are floats of integers and their steps, which stay outside of products.
    """
    xp = library_of(rows).xp
    scores = xp.matmul(rows[..., None, :, :] * key[1], xp.matrix_transpose(key[0]))
    top = xp.max(scores, axis=(-3, -1), keepdims=True)
    weights = xp.exp(scores - top)
    total = xp.sum(weights, axis=(-3, -1), keepdims=True)
    summed = xp.matmul(weights * xp.matrix_transpose(value[1]), value[0])
    logsumexp = top + xp.log(total)
    output = xp.sum(summed, axis=-3) / total[..., 0, :, :]
    *batch, groups, heads, size = output.shape
    shape = (*batch, groups * heads, 1)
    return Partial(xp.reshape(output, (*shape, size)), xp.reshape(logsumexp, shape))
