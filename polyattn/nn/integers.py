"""Make integers of 8 or 4 bits of keys and values, and attend over them; see `QuantizedCache`."""

from __future__ import annotations

from polyattn._api.partial import Partial
from polyattn._base.arrays import Array, accumulator_of, cast, clip, facts_of, library_of
from polyattn._base.host import is_host
from polyattn._base.quantized import Quantized
from polyattn.nn.shapes import with_last_axes

Sizes = tuple[int, int]
#: That along which the numbers of a block share a step, of 8 bits; None of 4, which have groups.
Axis = int | None
#: The numbers of a token that may share a step and an offset, if they have 4 bits: those of MLX.
GROUPS = 32, 64, 128


def sums(like: Array) -> str:
    """Return the dtype of sums of an array's numbers, which steps have."""
    return accumulator_of(facts_of(like).dtype)


def in_sums(*arrays: Array) -> list[Array]:
    """Return arrays in the dtype of sums."""
    return [cast(library_of(x).xp, x, getattr(library_of(x).xp, sums(x))) for x in arrays]


def quantized(tokens: Array, block: int, axis: Axis, group: int) -> tuple[Array, Array]:
    """Return integers, and the steps that numbers along an axis of a block, or a group, share."""
    if axis is None:
        return packed(tokens, block, group)
    xp, (*lead, length, size) = library_of(tokens).xp, tokens.shape
    blocks = xp.reshape(tokens, (*lead, length // block, block, size))
    blocks = xp.astype(blocks, getattr(xp, sums(tokens)))
    largest = xp.sum if 0 in blocks.shape else xp.max  # of no numbers it is 0
    steps = largest(xp.abs(blocks), axis=axis, keepdims=True) / 127
    _check_finite(steps)
    codes = xp.round(blocks / xp.where(steps == 0, xp.ones_like(steps), steps))
    codes = xp.reshape(xp.astype(codes, xp.int8), tokens.shape)
    return codes, xp.squeeze(steps, axis=axis)


def _check_finite(steps: Array) -> None:
    xp = library_of(steps).xp
    if is_host(steps) and not xp.all(xp.isfinite(steps)):
        raise ValueError(
            "a key or value of the tokens that become integers is NaN or infinite, which integers"
            " cannot be: append finite numbers, or give a KVCache"
        )


def layout(sizes: Sizes, block: int, bits: int, group: int) -> tuple[str, Sizes, Sizes]:
    """Return the dtype of integers, and the sizes of keys and values and of their steps in it."""
    key, value = sizes
    if bits == 8:
        return "int8", sizes, (key, block)
    if bits != 4:
        raise ValueError(f"bits must be 4 or 8; got {bits!r}")
    if group not in GROUPS:
        raise ValueError(f"group must be one of {', '.join(map(str, GROUPS))}; got {group!r}")
    for name, size in (("size", key), ("value_size", value)):
        if size % group:
            other = "group=32 or bits=8" if size % 32 == 0 else "bits=8"
            raise ValueError(
                f"{name} must be a multiple of group={group} with 4 bits; got {size}: give {other}"
            )
    return "uint8", (key // 2, value // 2), (2 * block * key // group, 2 * block * value // group)


def packed(tokens: Array, block: int, group: int) -> tuple[Array, Array]:
    """Return integers of 4 bits, two in a byte, and the steps and offsets of blocks of tokens."""
    xp, (*lead, length, size) = library_of(tokens).xp, tokens.shape
    groups = xp.reshape(tokens, (*lead, length, size // group, group))
    groups = xp.astype(groups, getattr(xp, sums(tokens)))
    low, high = xp.min(groups, axis=-1, keepdims=True), xp.max(groups, axis=-1, keepdims=True)
    is_low = xp.abs(low) > xp.abs(high)
    far = xp.where(is_low, low, high)
    step = (high - low) / 15
    _check_finite(step)
    one = xp.ones_like(step)
    # No step is 0, which divides 0 by 0: equal numbers are their offset with any other.
    step = xp.where(step == 0, one, xp.where(is_low, step, -step))
    count = xp.round(far / step)
    step = far / xp.where(count == 0, one, count)
    step = xp.where(step == 0, one, step)
    codes = xp.astype(clip(xp, xp.round((groups - far) / step), 0, 15), xp.uint8)
    pairs = xp.reshape(codes, (*lead, length, size // 2, 2))
    both = xp.stack((step, far), axis=-3)  # (..., length, 2, n, 1)
    steps = xp.reshape(both, (*lead, length // block, 2 * block * size // group))
    return pairs[..., 0] | pairs[..., 1] << 4, steps


def as_integers(codes: Array, steps: Array, axis: Axis, block: int) -> Quantized:
    """Return integers (..., S, size), and steps (..., n, width), as a kernel reads them."""
    length = codes.shape[-2]
    if axis is None:
        steps = with_last_axes(steps, 2, length, 2, steps.shape[-1] // (2 * block))
    elif axis == -1:
        steps = with_last_axes(steps, 2, length, 1)
    return Quantized(codes, steps)


def blocks_of(codes: Array, steps: Array, axis: Axis, block: int) -> tuple[Array, Array]:
    """Return integers of 8 bits as floats (..., n, block, size), and what to multiply them by."""
    xp, (*lead, length, size) = library_of(codes).xp, codes.shape
    codes = xp.reshape(codes, (*lead, length // block, block, size))
    return xp.astype(codes, steps.dtype), xp.expand_dims(steps, axis=axis)


def floats_of(codes: Array, steps: Array, axis: Axis, block: int) -> Array:
    """Return what integers stand for."""
    if axis is not None:
        floats, steps = blocks_of(codes, steps, axis, block)
        return with_last_axes(floats * steps, 3, *codes.shape[-2:])
    steps = as_integers(codes, steps, axis, block).steps
    xp, (*lead, half), count = library_of(codes).xp, codes.shape, steps.shape[-1]
    numbers = xp.stack((codes & 15, codes >> 4), axis=-1)
    groups = xp.reshape(numbers, (*lead, count, 2 * half // max(count, 1)))
    groups = xp.astype(groups, steps.dtype) * steps[..., 0, :, None] + steps[..., 1, :, None]
    return xp.reshape(groups, (*lead, 2 * half))


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
