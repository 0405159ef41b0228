"""The choice of the weights that dropout keeps: a hash of the seed and the indices.

Philox 4×32-10 makes four words of a counter of four, keyed by the seed. The weight (b, h, i, j)
uses word j mod 4 of the counter (j // 4, i, h, b). So the decision depends only on the seed and the
indices, and is the same in every library, on every device and for every tile.

References
----------
.. [1] Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from polyattn._base.arrays import Array, cast, index_range, is_array

#: Returns which weights are kept for the first, second, third and fourth keys of blocks.
ByWord = Callable[[Array], tuple[Array, ...]]
#: Number of words per counter.
WORDS = 4

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
# The integers that hold a product of two words. JAX has no integers of 64 bits by default.
_WIDE = {"array_api_compat.numpy": "uint64", "array_api_compat.torch": "int64"}


def keep_mask(xp: Any, by_word: ByWord, blocks: Array) -> Array:
    """Return which weights of the keys of blocks are kept."""
    kept = xp.stack(by_word(blocks), axis=-1)
    return xp.reshape(kept, (*kept.shape[:-2], -1))


def keep_mask_of_keys(
    xp: Any, by_word: ByWord, start: int | Array, length: int, like: Array
) -> Array:
    """Return which weights of `length` keys from `start` on are kept, on the device of `like`."""
    first, rest = start // WORDS, start % WORDS
    known = isinstance(rest, int)
    count = -(-(length + (rest if known else WORDS - 1)) // WORDS)
    kept = keep_mask(xp, by_word, first + index_range(xp, 0, count, like))
    if known:
        return kept[..., rest : rest + length]
    return xp.take(kept, rest + index_range(xp, 0, length, like), axis=-1)


def keep_mask_by_key(by_word: ByWord, key: Array) -> Array:
    """Return which weights are kept, for keys in any order: four times the hashes of a range."""
    index = key % WORDS
    # Not by `where`: ONNX Runtime has none for bools.
    kept = [(index == number) & word for number, word in enumerate(by_word(key // WORDS))]
    return kept[0] | kept[1] | kept[2] | kept[3]


def keep_mask_by_word(
    xp: Any,
    seed: int | Array | tuple[Array, Array],
    rate: float,
    batch: Array,
    head: Array,
    row: Array,
    blocks: Array,
) -> tuple[Array, ...]:
    """Return which weights are kept, for the first, second, third and fourth keys of blocks."""
    # torch has no arithmetic in uint32.
    dtype = xp.int64 if xp.__name__ == "array_api_compat.torch" else xp.uint32
    counter = tuple(cast(xp, index, dtype) for index in (blocks, row, head, batch))
    words = philox(xp, counter, _key(xp, seed, dtype, blocks.ndim))
    threshold = _as(words[0], min(round(rate * 2**32), _MASK))
    return tuple([word >= threshold for word in words])


def philox(xp: Any, counter: tuple[Array, ...], key: tuple[Any, Any]) -> tuple[Array, ...]:
    """Return the four words of Philox 4×32-10."""
    wide = _WIDE.get(xp.__name__)
    product = _product_by_halves if wide is None else partial(_product, xp, getattr(xp, wide))
    a, b, c, d = counter
    for number in range(_ROUNDS):
        if number:
            key = _raised(key[0], _WEYL[0], a), _raised(key[1], _WEYL[1], a)
        first, second = _as(a, key[0]), _as(a, key[1])
        high, low = product(_MULTIPLIERS[0], a)
        other_high, other_low = product(_MULTIPLIERS[1], c)
        a, b, c, d = other_high ^ b ^ first, other_low, high ^ d ^ second, low
    return a, b, c, d


def _raised(word: Any, by: int, like: Array) -> Any:
    """Return the sum of two words modulo 2³²."""
    if isinstance(word, int):
        return (word + by) & _MASK
    return (word + _as(like, by)) & _as(like, _MASK)


def _as(like: Array, number: Any) -> Any:
    """Return a word in the dtype of an array, since JAX refuses Python numbers above 31 bits."""
    return getattr(like.dtype, "type", int)(number) if isinstance(number, int) else number


def _product(xp: Any, wide: Any, multiplier: int, word: Array) -> tuple[Array, Array]:
    """Return the high and low word of a product, by integers of 64 bits."""
    product = cast(xp, word, wide) * multiplier
    if word.dtype == wide:  # signed: the product may be negative
        return (product >> 32) & _MASK, product & _MASK
    return cast(xp, product >> 32, word.dtype), cast(xp, product, word.dtype)


def _product_by_halves(multiplier: int, word: Array) -> tuple[Array, Array]:
    """Return the high and low word of a product, by half words, so that no sum exceeds 32 bits."""
    low, high = multiplier & 0xFFFF, multiplier >> 16
    word_low, word_high = word & 0xFFFF, word >> 16
    least = word_low * low
    middle = word_high * low + (least >> 16)
    other = word_low * high + (middle & 0xFFFF)
    return (
        word_high * high + (middle >> 16) + (other >> 16),
        ((other & 0xFFFF) << 16) | (least & 0xFFFF),
    )


def _key(xp: Any, seed: Any, dtype: Any, ndim: int) -> tuple[Any, Any]:
    if isinstance(seed, tuple):
        return seed
    if not is_array(seed):
        return int(seed) & _MASK, int(seed) >> 32
    # With axes, because arithmetic on such an array wraps without a warning. As many as the counter
    # has: JAX can be told to refuse others.
    word = xp.reshape(seed, (1,) * ndim)
    if xp.iinfo(word.dtype).bits > 32:
        word = cast(xp, word, xp.int64)  # torch cannot shift unsigned integers
        return cast(xp, word & _MASK, dtype), cast(xp, (word >> 32) & _MASK, dtype)
    low = cast(xp, word, dtype)
    return low & _as(low, _MASK), low & 0
