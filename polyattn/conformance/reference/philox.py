"""Decide which weights dropout keeps, independently: Philox 4×32-10 in Python integers.

It shares only the definition with `polyattn._core.tiles.dropout`: the weight (b, h, i, j) is kept
where word j mod 4 of the counter (j // 4, i, h, b), keyed by the seed, is no less than rate · 2³².
"""

from __future__ import annotations

from functools import cache
from itertools import product
from math import prod
from typing import Any

import numpy as np

Words = tuple[int, int, int, int]


def philox(counter: Words, key: tuple[int, int]) -> Words:
    """Return the four random words of a counter."""
    a, b, c, d = counter
    for turn in range(10):
        first, second = ((k + turn * w) % 2**32 for k, w in zip(key, WEYL, strict=True))
        high, low = divmod(0xD2511F53 * a, 2**32)
        other_high, other_low = divmod(0xCD9E8D57 * c, 2**32)
        a, b, c, d = other_high ^ b ^ first, other_low, high ^ d ^ second, low
    return a, b, c, d


#: Added to the words of the key in each round.
WEYL = (0x9E3779B9, 0xBB67AE85)


@cache
def keep_mask(
    rate: float,
    seed: int,
    batch: tuple[int, ...],
    shape: tuple[int, int, int],
    rows: tuple[int, ...] | None = None,
    start: tuple[int, int, int, int] = (0, 0, 0, 0),
) -> np.ndarray[Any, Any]:
    """Return which weights of a call are kept, (..., H, L, S) or only the given rows.

    The first item, head, row and key have the indices of `start`.
    """
    heads, length, keys = shape
    rows = tuple(range(length)) if rows is None else rows
    key, least = (seed % 2**32, seed // 2**32), round(rate * 2**32)
    item, head, row, column = start
    before = column % 4  # of the block of the first key
    width = before + keys
    keep = np.zeros((prod(batch), heads, len(rows), width), bool)
    blocks = product(range(prod(batch)), range(heads), enumerate(rows), range(0, width, 4))
    for b, h, (n, i), block in blocks:
        words = philox(((column + block) // 4, row + i, head + h, item + b), key)[: width - block]
        keep[b, h, n, block : block + 4] = [word >= least for word in words]
    return keep[..., before:].reshape(*batch, *keep.shape[1:3], keys)
