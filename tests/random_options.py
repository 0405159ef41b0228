"""Random options of calls, for kernels that random calls are compared with the formula on."""

import random
from typing import Any

import numpy as np

from polyattn import masks, scores


def random_options(seed: int, b: int, h: int, rows: int, keys: int) -> dict[str, Any]:
    """Return options of a call, most of them absent."""
    # Not the numbers that a caller draws with the same seed.
    draw, rng = random.Random(f"options {seed}"), np.random.default_rng([seed, 1])
    given: dict[str, Any] = {}

    def perhaps(chance: float = 0.25) -> bool:
        return draw.random() < chance

    given["is_causal"] = perhaps(0.4)
    if perhaps():
        given["window"] = draw.choice([(draw.randint(0, 20), None), (None, 3), (0, 0), (70, 9)])
    if perhaps(0.3):
        number = draw.randint(-5, keys)
        given["query_offset"] = draw.choice([number, rng.integers(-3, keys + 1, b)])
    if perhaps():
        given["scale"] = draw.choice([0.3, -0.2, 1.0])
    if perhaps():
        given["softcap"] = draw.choice([0.7, 20.0])
    if perhaps():
        given["sinks"] = rng.standard_normal(h).astype("float32")
    if perhaps():
        given["dropout"] = (0.3, draw.randint(0, 2**60), (1, 2, 3, draw.randint(0, 9)))
    if perhaps(0.3):
        lead = draw.choice([(), (1, h), (b, 1), (b, h)])
        bias = rng.standard_normal((*lead, draw.choice([1, rows]), draw.choice([1, keys])))
        bias[rng.random(bias.shape) < 0.2] = -np.inf
        given["bias"] = bias.astype("float32")
    if perhaps() and "softcap" not in given:
        table = rng.standard_normal((8, h)).astype("float32")
        given["score_mod"] = draw.choice(
            [
                scores.alibi(h),
                scores.relative_bias(table, max_distance=16),
                scores.temperature(2.0) >> scores.alibi(rng.random(h).astype("float32")),
            ]
        )
    if perhaps(0.5):
        array = rng.random((b, 1, rows, keys)) < 0.6
        every = [
            array,
            np.repeat(array, h, axis=1),
            array[:, :, :1],
            np.ascontiguousarray(array.swapaxes(-1, -2)).swapaxes(-1, -2),
            masks.padding(rng.integers(0, keys + 1, b)),
            masks.padding(keys // 2, query_lengths=rng.integers(0, rows + 1, b)),
            masks.prefix(keys // 3) & masks.window(9, 3),
            masks.dense(array) & masks.padding(keys - 1),
        ]
        ids = np.sort(rng.integers(0, 4, (b, max(rows, keys))))
        every += [
            masks.segments(ids[:, :rows], ids[:, :keys]),
            masks.segments(rng.integers(0, 3, (b, rows)), rng.integers(0, 3, (b, keys))),
            masks.prefix(keys // 3) | masks.causal(),
            masks.dilated(2) & masks.window(9, 3),
            ~masks.global_tokens(0, 3),
        ]
        given["mask"] = draw.choice(every)
    return given
