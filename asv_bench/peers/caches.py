"""The error and the time of a decoding step over a cache of integers, beside one of float32.

One token of 32 heads on 8, of 128 numbers each. The error is the root of the mean square of the
difference from float32, over that of the output. Keys of *outlier channels* are 8 times as large in
4 of 128 channels; the scores have the spread of the others, as queries are smaller there.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import numpy as np
import script

import polyattn
from polyattn import nn

HEADS, KEY_HEADS, SIZE, LENGTHS = 32, 8, 128, (1024, 4096, 16384)
CACHES: dict[str, dict[str, int]] = {
    "8 bits": {},
    "4 bits, groups of 64": {"bits": 4},
    "4 bits, groups of 32": {"bits": 4, "group": 32},
}


def arrays(length: int, *, has_outliers: bool) -> list[Any]:
    """Return the query of a token, keys and values."""
    rng = np.random.default_rng(0)
    shapes = (1, HEADS, 1, SIZE), *[(1, KEY_HEADS, length, SIZE)] * 2
    query, key, value = (rng.standard_normal(shape, dtype=np.float32) for shape in shapes)
    channels = np.where(np.arange(SIZE) % 32 == 5, 8, 1).astype(np.float32) if has_outliers else 1
    return [query * 2 / channels, key * channels, value]


def error(found: Any, exact: Any) -> float:
    """Return the root of the mean square of the difference, over that of the exact result."""
    return float(np.sqrt(((found - exact) ** 2).mean() / (exact**2).mean()))


def main() -> int:
    """Print the table."""
    parser = script.parser(__doc__ or "", 15, "quick", "threads", "cpu-time", "json")
    options = script.read(parser)
    with script.measuring(options) as show:
        for length in LENGTHS[: 1 if options.quick else None]:
            for has_outliers in (False, True):
                query, key, value = arrays(length, has_outliers=has_outliers)
                empty = partial(nn.QuantizedCache.init, KEY_HEADS, SIZE, length, batch=(1,))
                calls = {"float32": partial(polyattn.attention, query, key, value)}
                for name, settings in CACHES.items():
                    cache = empty(like=key, **settings).append(key, value)
                    calls[name] = partial(cache.attention, query)
                title = f"{length} keys, {'outlier channels' if has_outliers else 'normal'}"
                show(title, script.compare(calls, options, error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
